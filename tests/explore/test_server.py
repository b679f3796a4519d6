"""The web app: what is answered, what two browsers may do to each other, and how it ends."""

from __future__ import annotations

import http.client
import io
import re
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from explore_clients import NASTY, TOKEN, browser, edit, get
from PIL import Image

from odcluster.errors import UserError
from odcluster.explore import answers, maps
from odcluster.explore.collection import open_collection
from odcluster.explore.server import Server
from odcluster.gallery import explore, listening

# --- What is answered ---------------------------------------------------------------------------------------


def test_the_run(client: Any) -> None:
    found = get(client, "/api/run")
    assert (found["name"], found["method"], found["images"], found["clusters"]) == ("<b>run", "odc", 80, 6)
    assert (found["state"], found["step"], found["total_steps"]) == ("finished", 10, 10)
    assert (found["has_features"], found["edits"], found["reviewed"]) == (True, 0, 0)
    assert found["maps"] == maps.kinds()


def test_clusters_are_sorted_filtered_and_paged(client: Any) -> None:
    every = get(client, "/api/clusters")
    assert every["total"] == 6
    sizes = [card["size"] for card in every["clusters"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == 80
    for card in every["clusters"]:
        assert len(card["examples"]) == min(9, card["size"])
        assert 0 <= card["tightness"] <= 1
        assert (card["name"], card["reviewed"], card["merged"]) == ("", False, [])
        assert card["change"] is None or isinstance(card["change"], int)
    for sort in ("size", "tightness", "id"):
        for order in ("asc", "desc"):
            values = [c[sort] for c in get(client, f"/api/clusters?sort={sort}&order={order}")["clusters"]]
            assert values == sorted(values, reverse=order == "desc")
    pages = [get(client, f"/api/clusters?sort=id&per_page=4&page={page}")["clusters"] for page in range(3)]
    assert [[card["id"] for card in page] for page in pages] == [[0, 1, 2, 3], [4, 5], []]
    edit(client, action="name", cluster=3, name="Zebras", expected="")
    edit(client, action="name", cluster=5, name="apes <b>", expected="")
    edit(client, action="review", cluster=5, reviewed=True)

    def ids(query: str) -> list[int]:
        return [card["id"] for card in get(client, f"/api/clusters?{query}")["clusters"]]

    assert ids("sort=name") == [5, 3, 0, 1, 2, 4]
    assert ids("sort=name&order=desc") == [3, 5, 0, 1, 2, 4]
    assert ids("show=named&sort=id") == [3, 5]
    assert ids("show=unreviewed&sort=id") == [0, 1, 2, 3, 4]
    assert ids("search=APES%20%20%3Cb") == [5]
    assert ids("search=cluster%204") == ids("search=4") == ids("search=%234") == [4]
    assert ids("search=cluster%2099") == ids("search=%F0%9F%90%88") == []
    assert get(client, "/api/run")["reviewed"] == 1


def test_one_cluster_from_centre_to_edge(client: Any) -> None:
    found = get(client, "/api/clusters/2")
    items = found["images"]["items"]
    assert found["images"]["total"] == len(items) == found["cluster"]["size"]
    similarities = [item["similarity"] for item in items]
    assert similarities == sorted(similarities, reverse=True)
    assert [item["id"] for item in items[:9]] == found["cluster"]["examples"]
    assert all(item["cluster"] == 2 and not item["moved"] and not item["excluded"] for item in items)
    edge = get(client, "/api/clusters/2?order=edge&per_page=3&page=1")["images"]["items"]
    assert [item["id"] for item in edge] == [item["id"] for item in items[::-1][3:6]]
    near = found["nearest"]
    assert sorted(card["id"] for card in near) == [0, 1, 3, 4, 5]
    assert [card["similarity"] for card in near] == sorted((card["similarity"] for card in near), reverse=True)
    assert found["history"][-1] == [10, found["cluster"]["size"]]


def test_file_names_are_text_whatever_they_are(client: Any, run: Path) -> None:
    names = {get(client, f"/api/images/{id}")["name"] for id in range(80)}
    for name in NASTY:
        assert name.decode("utf-8", "replace") in names
    for id in range(80):  # and each of them has its picture
        assert ("x-refused" in client.get(f"/thumb/{id}?size=96").headers) == (id == 79)


def test_an_image_its_picture_and_its_likes(client: Any) -> None:
    found = get(client, "/api/images/10")
    assert (found["id"], found["width"], found["height"], found["cluster_name"]) == (10, 20, 20, "")
    items = get(client, "/api/images/10/similar?count=7")["items"]
    assert len(items) == 7
    assert 10 not in [item["id"] for item in items]
    assert [item["score"] for item in items] == sorted((item["score"] for item in items), reverse=True)
    for place in ("/thumb/10?size=96", "/thumb/10?size=384", "/image/10"):
        answer = client.get(place)
        assert answer.headers["content-type"] in ("image/webp", "image/jpeg")
        assert Image.open(io.BytesIO(answer.content)).size == (20, 20)
    broken = client.get("/thumb/79")
    assert broken.status_code == 200
    assert "damaged" in broken.headers["x-refused"]
    assert get(client, "/api/images/79")["width"] is None


def test_a_dropped_image(client: Any, run: Path, server: Server) -> None:
    root = server.collection.manifest.root
    content = Path(root, server.collection.manifest.paths[20]).read_bytes()
    answer = client.post("/api/similar?count=5", content=content).json()
    assert len(answer["items"]) == 5
    assert 0 <= answer["cluster"] < 6
    assert 0 < answer["confidence"] <= 1
    edit(client, action="name", cluster=answer["cluster"], name="here", expected="")
    assert client.post("/api/similar", content=content).json()["cluster_name"] == "here"


def bomb() -> bytes:
    """A PNG of 50,000 x 50,000 pixels in a few bytes."""
    content = b"\x89PNG\r\n\x1a\n"
    header = (50000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")):
        content += len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
    return content


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "empty file"), (b"<svg onload=alert(1)>", "SVG"), (bomb(), "too large"), (b"\xff\xd8\xff broken", "JPEG")],
)
def test_what_is_no_image_is_refused_by_name(client: Any, content: bytes, sentence: str) -> None:
    answer = client.post("/api/similar", content=content)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]


def test_too_much_is_refused_before_it_is_all_there(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_UPLOAD", 1000)
    assert client.post("/api/similar", content=bytes(1001)).status_code == 413
    assert client.post("/api/edits", content=b" " * 1001).status_code == 413


def test_the_map(client: Any) -> None:
    answer = client.get("/api/map?kind=pca")
    assert answer.headers["x-total"] == "80"
    table = np.frombuffer(answer.content, maps.RECORD)
    assert table["id"].tolist() == list(range(80))
    assert max(np.abs(table["x"]).max(), np.abs(table["y"]).max()) == 1
    edit(client, action="move", images=[4, 5], to="new")
    edit(client, action="exclude", images=[6])
    again = np.frombuffer(client.get("/api/map").content, maps.RECORD)
    assert again["cluster"][4:7].tolist() == [6, 6, -1]
    assert np.array_equal(again["x"], table["x"])


def test_training(client: Any) -> None:
    found = get(client, "/api/training")
    assert found["series"]["loss"][-1][0] == 10
    assert {"change", "lr", "images_per_second"} <= set(found["series"])
    assert [row[0] for row in found["sizes"]] == [5, 10]
    assert all(row[1:] == sorted(row[1:]) for row in found["sizes"])
    assert (found["state"], found["eta_seconds"]) == ("finished", None)


def test_oddities(client: Any, server: Server) -> None:
    def ready(kind: str) -> Any:
        for _ in range(100):
            answer = client.get(f"/api/oddities?kind={kind}&per_page=2")
            if answer.status_code != 202:
                return answer.json()
            assert answer.json()["progress"]
        raise AssertionError

    outliers = ready("outliers")
    assert len(outliers["items"]) == min(2, outliers["total"])
    assert outliers["total"] == server.collection.view().clusters.outliers.sum()
    duplicates = ready("duplicates")
    assert duplicates["total"] > 0  # stripes alike
    first = duplicates["groups"][0]
    assert len(first["ids"]) > 1
    assert 0 < first["similarity"] <= 1.0001
    others = get(client, f"/api/images/{first['ids'][0]}")["duplicates"]
    assert sorted([first["ids"][0], *others]) == sorted(first["ids"])


# --- Edits ------------------------------------------------------------------------------------------------------


def test_edits_are_seen_listed_undone_and_redone(client: Any) -> None:
    version = get(client, "/api/run")["version"]
    made = edit(client, action="merge", clusters=[0, 1])
    assert made["edit"]["text"] == "cluster 1 is merged into cluster 0"
    assert made["version"] == get(client, "/api/run")["version"] != version
    get(client, "/api/clusters/1", 404)
    card = get(client, "/api/clusters/0")["cluster"]
    assert card["merged"] == [1]
    new = edit(client, action="move", images=card["examples"][:2], to="new")
    assert "new cluster 6" in new["edit"]["text"]
    moved = get(client, "/api/clusters/6")
    assert moved["cluster"]["size"] == 2
    assert all(item["moved"] for item in moved["images"]["items"])
    edit(client, action="exclude", images=[card["examples"][2]])
    shown = get(client, "/api/clusters/0?per_page=500")
    assert shown["cluster"]["size"] == card["size"] - 3
    assert [item["excluded"] for item in shown["images"]["items"]] == [False] * (card["size"] - 3) + [True]
    assert get(client, "/api/run")["edits"] == 3
    listed = get(client, "/api/edits")["edits"]
    assert [entry["undone"] for entry in listed] == [False] * 3
    assert listed[0]["text"] == "1 image is left out"
    undone = [client.post("/api/undo").json()["undone"] for _ in range(3)]
    assert undone == [entry["text"] for entry in listed]
    answer = client.post("/api/undo")
    assert (answer.status_code, answer.json()["error"]) == (400, "there is nothing to undo")
    assert (
        get(client, "/api/clusters/1")["cluster"]["size"] + get(client, "/api/clusters/0")["cluster"]["size"]
        == (card["size"])
    )
    assert client.post("/api/redo").json()["redone"] == "cluster 1 is merged into cluster 0"
    assert [entry["undone"] for entry in get(client, "/api/edits")["edits"]] == [True, True, False]


def test_two_browsers_lose_no_edit(server: Server) -> None:
    one, two = browser(server), browser(server)
    edit(one, action="name", cluster=0, name="one's", expected="")
    answer = edit(two, 409, action="name", cluster=0, name="two's", expected="")
    assert answer["current"] == "one's"
    assert "look at it again" in answer["error"]
    edit(two, action="name", cluster=0, name="two's", expected="one's")
    edit(one, action="merge", clusters=[2, 0])
    assert edit(two, 409, action="review", cluster=0, reviewed=True)["current"] == 2
    statuses: list[int] = []

    def many(client: Any, first: int) -> None:
        for image in range(first, first + 10):
            answer = client.post("/api/edits", json={"action": "exclude", "images": [image]})
            statuses.append(answer.status_code)

    threads = [threading.Thread(target=many, args=(c, 10 * i)) for i, c in enumerate((one, two, one, two))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 40
    assert server.collection.view().state.excluded == set(range(40))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"action": "fly"}', b"{}", b"\xff\xfe", b'"\\ud800"'])
def test_edits_that_are_none_are_refused(client: Any, content: bytes) -> None:
    answer = client.post("/api/edits", content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_a_run_without_clusters_is_shown_as_such(run: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(run, tmp_path / "run"))
    for name in ("checkpoints", "backbone", "explore"):
        shutil.rmtree(bare / name, ignore_errors=True)
    (bare / "clusters.csv").unlink()
    served = Server(open_collection(bare), TOKEN)
    client = browser(served)
    found = get(client, "/api/run")
    assert (found["clusters"], found["has_features"], found["maps"], found["state"]) == (0, False, [], "stopped")
    assert get(client, "/api/clusters") == {"total": 0, "page": 0, "clusters": []}
    assert get(client, "/api/map", 202)["progress"]
    assert get(client, "/api/oddities?kind=duplicates", 202)["progress"]
    assert get(client, "/api/images/3/similar")["items"] == []
    assert get(client, "/api/images/3")["similarity"] is None
    assert "first checkpoint" in client.post("/api/similar", content=b"x").json()["error"]
    served.stop()


# --- The real thing -----------------------------------------------------------------------------------------------


def test_a_real_server_starts_answers_and_stops_at_once(run: Path, tmp_path: Path) -> None:
    code = "import sys; from odcluster.gallery import explore; explore(sys.argv[1], open_browser=False)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        said = [process.stdout.readline() for _ in range(3)]
        assert said[0] == "<b>run (finished): 80 images, 6 clusters\n"
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{20,})\n", said[1])
        port, token = int(found[1]), found[2]

        def asked(path: str, **headers: str) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", path, headers=headers)
            return connection.getresponse().status

        assert asked("/api/run", **{"X-Token": token}) == 200
        assert asked("/api/run") == 403
        assert asked("/api/run", **{"X-Token": token, "Host": "evil.example"}) == 403
        assert asked(f"/?token={token}") == 303
        idle = http.client.HTTPConnection("127.0.0.1", port)  # an open page must not keep it from stopping
        idle.request("GET", "/api/run", headers={"X-Token": token})
        idle.getresponse().read()
        with pytest.raises(UserError, match="leave --port out"), listening(port):
            pass
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=30)
        assert (process.returncode, out, errors) == (0, "", "")
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(UserError, match=r"pip install 'odcluster\[explore\]'"):
        explore(run)
    with pytest.raises(UserError, match="between 1 and 65535"), listening(99999):
        pass
