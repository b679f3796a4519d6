"""The map, oddities, training and edits in a real browser; other browsers, small screens, many clusters."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from explore_page import api, card, largest, open_view, overview, undo
from playwright.sync_api import Page, expect

import odcluster


def wait_for_map(page: Page) -> None:
    expect(page.locator(".map-info")).to_contain_text("images")
    expect(page.locator(".map-notice")).to_be_hidden()


def test_lasso_on_the_map(page):
    open_view(page, "map")
    wait_for_map(page)
    total = api(page, "/api/run")["images"]
    page.get_by_role("button", name="Show all").click()
    page.keyboard.press("l")
    box = page.locator("canvas.over").bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    corners = [(box["x"] + 20, box["y"] + 90), (middle[0], box["y"] + 90), (middle[0], box["y"] + box["height"] - 20)]
    page.mouse.move(*corners[0])
    page.mouse.down()
    for corner in [*corners[1:], (box["x"] + 20, box["y"] + box["height"] - 20)]:
        page.mouse.move(*corner, steps=3)
    page.mouse.up()
    panel = page.get_by_role("complementary", name="Selected images")
    expect(panel.locator(".tile").first).to_be_visible()
    count = int(panel.locator(".actions-text").text_content().split()[0])
    assert 0 < count < total
    kept = int(panel.locator(".tile").first.get_attribute("data-key"))
    panel.locator(".tile .picture").first.click()
    expect(panel).to_contain_text(f"{count - 1} images selected")
    clusters = api(page, "/api/run")["clusters"]
    panel.get_by_role("button", name="New cluster").click()
    expect(panel).to_be_hidden()
    new = max(cluster["id"] for cluster in api(page, "/api/clusters?per_page=100")["clusters"])
    assert new >= clusters
    answer = api(page, f"/api/clusters/{new}")
    assert answer["cluster"]["size"] == count - 1
    assert kept not in [image["id"] for image in answer["images"]["items"]]
    undo(page)


def test_the_map_names_what_is_under_the_pointer_and_zooms(page):
    open_view(page, "map")
    wait_for_map(page)
    page.get_by_role("button", name="Show all").click()
    points = page.evaluate(
        """async () => {
            const view = new DataView(await (await fetch("/api/map?kind=pca")).arrayBuffer());
            return Array.from({ length: view.byteLength / 16 }, (_, i) =>
                [view.getInt32(16 * i, true), view.getFloat32(16 * i + 4, true), view.getFloat32(16 * i + 8, true)]);
        }"""
    )
    box = page.locator("canvas.over").bounding_box()
    scale = min(box["width"], box["height"]) / 2 * 0.94
    image, x, y = points[0]
    place = (box["x"] + box["width"] / 2 + x * scale, box["y"] + box["height"] / 2 - y * scale)
    close = {i for i, px, py in points if np.hypot(px - x, py - y) * scale < 2}
    page.mouse.move(*place)
    tip = page.locator(".tip")
    expect(tip).to_be_visible()
    assert int(re.search(r"/thumb/(\d+)", tip.locator("img").get_attribute("src")).group(1)) in close
    assert image in close
    before = page.screenshot()
    page.mouse.wheel(0, -400)
    page.mouse.move(box["x"] + 5, box["y"] + box["height"] - 5)
    expect(tip).to_be_hidden()
    assert page.screenshot() != before


def test_oddities(page):
    open_view(page, "oddities/outliers")
    expect(page.locator(".tile, .empty:visible").first).to_be_visible()
    page.get_by_role("link", name="Near-duplicates").click()
    expect(page.locator(".groups")).to_be_visible()
    group = api(page, "/api/oddities?kind=duplicates")["groups"][0]["ids"]
    expect(page.locator(".group").first.locator("img")).to_have_count(min(12, len(group)))
    page.locator(".group").first.get_by_role("button", name=re.compile("^Exclude")).click()
    expect(page.locator(".toast")).to_contain_text("Excluded")
    assert [api(page, f"/api/images/{image}")["excluded"] for image in group] == [False] + [True] * (len(group) - 1)
    undo(page)


def test_training_curves(page):
    open_view(page, "training")
    expect(page.locator(".chart").first).to_be_visible()
    expect(page.locator(".summary")).to_contain_text("Finished")
    loss = page.locator(".chart", has=page.get_by_text("Loss", exact=True))
    loss.locator("svg").hover()
    expect(loss.locator(".reading")).to_contain_text("step")


def test_edits_are_listed_and_undone_there(page):
    overview(page)
    cluster = largest(page)[0]["id"]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("r")
    expect(card(page, cluster).locator(".tick")).to_have_attribute("aria-pressed", "true")
    open_view(page, "edits")
    newest = page.locator(".edits li").first
    expect(newest).to_be_visible()
    page.get_by_role("button", name="Undo", exact=True).last.click()
    expect(newest).to_have_class("undone")
    page.get_by_role("button", name="Redo", exact=True).click()
    expect(newest).not_to_have_class("undone")
    undo(page)


def test_nasty_file_names_are_text(page, nasty_names):
    """The page fixture fails the test on any dialog or console error."""
    assert len(nasty_names) == 5
    for image, name in nasty_names.items():
        open_view(page, f"similar/{image}")
        page.wait_for_function("name => document.querySelector('.subject .filename')?.textContent === name", arg=name)
        page.locator(".tile .corner").first.click(force=True)
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.press("Escape")
    assert page.evaluate("document.querySelectorAll('main script, main b, [onerror]').length") == 0


def test_a_phone_shows_all_of_it(phone):
    cluster = largest(phone)[0]["id"]
    for view in ("", f"cluster/{cluster}", "map", "similar/0", "oddities/duplicates", "training", "edits"):
        open_view(phone, view)
        expect(phone.locator("main > section")).to_be_visible()
        phone.wait_for_load_state("networkidle")
        assert phone.evaluate("document.documentElement.scrollWidth") <= 390, view
        expect(phone.locator("#nav a").first).to_be_in_viewport()
        expect(phone.locator("#nav a").last).to_be_in_viewport(ratio=1)


def test_dark_and_light(page):
    colour = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="dark")
    overview(page)
    dark = page.evaluate(colour)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(colour)
    assert dark != light
    page.get_by_role("button", name="Theme: as the system").click()
    page.get_by_role("button", name="Theme: light").click()
    assert page.evaluate(colour) == dark
    page.reload()
    expect(page.locator(".card").first).to_be_visible()
    assert page.evaluate(colour) == dark


def test_keys_are_listed_and_every_control_has_a_name(page):
    overview(page)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_contain_text("merge clusters")
    page.keyboard.press("Escape")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, a, input, select")].filter(node =>
            !(node.textContent.trim() || node.getAttribute("aria-label") || node.labels?.length)).length"""
    )
    assert nameless == 0
    assert page.evaluate("[...document.images].every(image => image.hasAttribute('alt'))")


def test_edits_of_another_browser_appear(page, browser_page):
    overview(page)
    other = browser_page()
    cluster = largest(page)[0]["id"]
    overview(other)
    card(other, cluster).locator(".name").click()
    other.get_by_label(f"Name of cluster {cluster}").fill("from there")
    other.keyboard.press("Enter")
    expect(card(page, cluster).locator(".name")).to_have_text("from there")
    undo(page)


def test_a_server_that_is_gone_is_said(page):
    overview(page)
    page.allow_failures()
    page.route("**/api/**", lambda route: route.abort())
    expect(page.locator("#banner")).to_contain_text("odcluster explore")
    page.unroute("**/api/**")
    expect(page.locator("#banner")).to_be_hidden()


def test_a_missing_cluster_is_said(page):
    page.allow_failures(404)
    open_view(page, "cluster/987654")
    expect(page.get_by_role("link", name="All clusters")).to_be_visible()


def test_ten_thousand_clusters_and_two_hundred_thousand_points_stay_fluent(page):
    """The server's answers are replaced: only the page is looked at."""

    def clusters(route):
        query = dict(part.split("=") for part in route.request.url.split("?")[1].split("&"))
        first = int(query.get("page", 0)) * int(query["per_page"])
        made = [
            {"id": i, "name": "", "size": 10, "tightness": 0.5, "change": None, "reviewed": False, "merged": []}
            | {"examples": [0] * 9}
            for i in range(first, first + int(query["per_page"]))
        ]
        route.fulfill(json={"total": 10_000, "page": 0, "clusters": [] if "named" in query.get("show", "") else made})

    def points(route):
        random = np.random.default_rng(0)
        records = np.empty(200_000, [("id", "<i4"), ("x", "<f4"), ("y", "<f4"), ("cluster", "<i4")])
        records["id"] = np.arange(len(records))
        records["x"], records["y"] = random.normal(0, 0.3, (2, len(records))).clip(-1, 1)
        records["cluster"] = random.integers(0, 500, len(records))
        route.fulfill(body=records.tobytes(), headers={"X-Total": "1000000"}, content_type="application/octet-stream")

    page.route("**/api/clusters?**", clusters)
    page.route("**/api/map?**", points)
    overview(page)
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    expect(card(page, 9_999)).to_be_visible()
    assert page.locator(".card").count() < 200

    open_view(page, "map")
    expect(page.locator(".map-info")).to_contain_text("200,000 of 1,000,000 images")
    page.evaluate(
        """async () => {
            const { Scatter } = await import("/app/scatter.js");
            const scatter = new Scatter(document.querySelector("canvas.points"));
            const n = 200000, random = () => Float32Array.from({ length: n }, () => Math.random() * 2 - 1);
            scatter.setPoints({ ids: new Int32Array(n), x: random(), y: random(), clusters: new Int32Array(n) });
            scatter.colours.fill(0xff8040c0);
            window.drawFrame = () => { scatter.panBy(3, 2); scatter.draw(); };
            window.drawFrame();
        }"""
    )
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    before = processor_seconds(session)
    page.evaluate("() => { for (let i = 0; i < 20; i++) drawFrame(); }")
    frame = (processor_seconds(session) - before) / 20
    print(f"a frame of 200,000 points: {1000 * frame:.1f} ms")
    assert 0.0005 < frame < 0.06


def processor_seconds(session) -> float:
    """What the page's thread has used; a busy machine does not change it much."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "ThreadTime")


def test_the_page_builds_no_markup_from_text_and_loads_nothing_from_elsewhere():
    app = Path(odcluster.__file__).parent / "explore" / "app"
    files = sorted(path for path in app.iterdir() if path.is_file())
    assert {path.suffix for path in files} == {".html", ".css", ".js", ".svg"}
    for path in files:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "http:", "https:"):
            assert forbidden not in text, (path.name, forbidden)
