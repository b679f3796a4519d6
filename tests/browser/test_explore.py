"""Clusters and images in a real browser: what people do with them."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
from explore_page import SHOWN, api, card, largest, open_view, overview, undo
from PIL import Image
from playwright.sync_api import expect


def test_the_token_opens_the_page_and_nothing_else_does(browser, address, token):
    with browser.new_context() as context:
        page = context.new_page()
        assert page.goto(address + "/").status == 403
        assert page.goto(f"{address}/?token=wrong").status == 403
        page.goto(f"{address}/?token={token}")
        expect(page.locator(".card").first).to_be_visible()
        assert token not in page.url


def test_cards_show_what_the_server_knows(page):
    overview(page)
    first = largest(page)[0]
    expect(page.locator(".card").first).to_have_attribute("data-key", str(first["id"]))
    expect(card(page, first["id"])).to_contain_text(f"cluster {first['id']}")
    expect(card(page, first["id"])).to_contain_text(f"{first['size']} images")
    expect(card(page, first["id"]).locator("img")).to_have_count(min(9, len(first["examples"])))
    run = api(page, "/api/run")
    expect(page.locator(".summary")).to_contain_text(f"{run['images']:,} images in {run['clusters']:,} clusters")


def test_sorting_follows_the_server(page):
    overview(page)
    for order in ("size asc", "tightness desc", "id asc"):
        key, direction = order.split()
        expected = [c["id"] for c in api(page, f"/api/clusters?sort={key}&order={direction}")["clusters"]]
        page.get_by_label("Sort clusters").select_option(order)
        page.wait_for_function(f"expected => JSON.stringify({SHOWN}) === JSON.stringify(expected)", arg=expected)


def test_naming_by_key_searching_and_undoing(page):
    overview(page)
    cluster = largest(page)[0]["id"]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("n")
    field = page.get_by_label(f"Name of cluster {cluster}")
    field.fill("not this")
    field.press("Escape")
    expect(card(page, cluster)).to_contain_text(f"cluster {cluster}")
    page.keyboard.press("n")
    field.fill("Stripes & <b>bold</b>")
    field.press("Enter")
    expect(card(page, cluster).locator(".name")).to_have_text("Stripes & <b>bold</b>")
    expect(card(page, cluster).locator(".mosaic")).to_be_focused()

    page.keyboard.press("/")
    page.keyboard.type("stripes")
    expect(page.locator(".card")).to_have_count(1)
    expect(page.locator(".summary")).to_contain_text("1 of")
    page.get_by_label("Search clusters by name or number").fill("nothing is called so")
    expect(page.get_by_text("No cluster fits")).to_be_visible()
    page.get_by_label("Search clusters by name or number").fill("")
    page.get_by_role("button", name="Named", exact=True).click()
    expect(page.locator(".card")).to_have_count(1)
    page.get_by_role("button", name="All", exact=True).click()

    undo(page)
    expect(card(page, cluster).locator(".name")).to_have_text(f"cluster {cluster}")
    page.keyboard.press("Control+Shift+z")
    expect(card(page, cluster).locator(".name")).to_have_text("Stripes & <b>bold</b>")
    undo(page)


def test_a_name_given_meanwhile_elsewhere_is_not_overwritten(page):
    overview(page)
    cluster = largest(page)[0]["id"]
    card(page, cluster).locator(".name").click()
    edit = {"action": "name", "cluster": cluster, "name": "theirs", "expected": ""}
    assert page.request.post(page.address + "/api/edits", data=edit, headers={"X-Odcluster": "1"}).ok
    page.get_by_label(f"Name of cluster {cluster}").fill("mine")
    page.allow_failures(409)
    page.keyboard.press("Enter")
    expect(page.locator(".toast.bad")).to_be_visible()
    expect(card(page, cluster).locator(".name")).to_have_text("theirs")
    undo(page)


def test_reviewing(page):
    overview(page)
    cluster = largest(page)[0]["id"]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("r")
    expect(card(page, cluster).locator(".tick")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="To review").click()
    expect(card(page, cluster)).to_have_count(0)
    page.get_by_role("button", name="All", exact=True).click()
    card(page, cluster).locator(".tick").click()
    expect(card(page, cluster).locator(".tick")).to_have_attribute("aria-pressed", "false")
    undo(page)
    undo(page)


def test_merging_cards(page):
    overview(page)
    first, second = largest(page, 2)
    page.get_by_role("button", name="Merge clusters").click()
    card(page, first["id"]).locator(".mosaic").click()
    card(page, second["id"]).locator(".mosaic").click()
    page.get_by_role("region", name="Merge clusters").get_by_role("button", name="Merge", exact=True).click()
    expect(card(page, second["id"])).to_have_count(0)
    expect(card(page, first["id"])).to_contain_text(f"{first['size'] + second['size']} images")
    undo(page)
    expect(card(page, second["id"])).to_have_count(1)


def test_merging_on_the_cluster_page_with_the_keyboard(page):
    first, second = largest(page, 2)
    open_view(page, f"cluster/{first['id']}")
    expect(page.locator(".tile").first).to_be_visible()
    page.keyboard.press("m")
    page.get_by_label("Search clusters").fill(f"cluster {second['id']}")
    page.get_by_role("dialog").get_by_role("button", name=re.compile(rf"^cluster {second['id']} ?\d")).click()
    page.get_by_role("button", name="Merge 1 cluster").click()
    expect(page.locator(".cluster-head")).to_contain_text(f"merged from cluster {second['id']}")
    undo(page)
    expect(page.locator(".cluster-head")).not_to_contain_text("merged from")


def test_the_cluster_page_lists_images_from_most_to_least_central(page):
    first = largest(page)[0]
    open_view(page, f"cluster/{first['id']}")
    tiles = page.locator(".tile")
    expect(tiles).to_have_count(first["size"])
    items = api(page, f"/api/clusters/{first['id']}?order=central")["images"]["items"]
    assert [i["id"] for i in items] == [int(k) for k in tiles.evaluate_all("t => t.map(x => x.dataset.key)")]
    expect(tiles.first.locator(".picture")).to_have_attribute("title", items[0]["name"].replace("\r\n", "\n"))
    outliers = sum(item["outlier"] for item in items)
    expect(page.locator(".mark.outlier")).to_have_count(outliers)
    page.get_by_role("button", name="Least central first").click()
    expect(tiles.first).to_have_attribute("data-key", str(items[-1]["id"]))
    expect(page.locator(".near").first).to_be_visible()
    page.locator(".near").first.click()
    expect(page).not_to_have_url(re.compile(f"cluster/{first['id']}$"))
    page.keyboard.press("Escape")
    expect(page.locator(".card").first).to_be_visible()


def test_selecting_moving_and_excluding(page):
    first = largest(page)[0]
    open_view(page, f"cluster/{first['id']}")
    pictures = page.locator(".tile .picture")
    pictures.nth(0).click()
    pictures.nth(2).click(modifiers=["Shift"])
    bar = page.get_by_role("region", name="Selected images")
    expect(bar).to_contain_text("3 images selected")
    page.keyboard.press("Escape")
    expect(bar).to_be_hidden()

    start, end = pictures.nth(0).bounding_box(), pictures.nth(1).bounding_box()
    page.mouse.move(start["x"] + 20, start["y"] + 20)
    page.mouse.down()
    page.mouse.move(end["x"] + 30, end["y"] + 40, steps=4)
    page.mouse.up()
    expect(bar).to_contain_text("2 images selected")
    bar.get_by_role("button", name="New cluster").click()
    expect(page.locator(".cluster-title")).to_contain_text(f"{first['size'] - 2} images")
    undo(page)
    expect(page.locator(".cluster-title")).to_contain_text(f"{first['size']} images")

    excluded = int(page.locator(".tile").first.get_attribute("data-key"))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Home")
    page.keyboard.press("x")
    tile = page.locator(f'.tile[data-key="{excluded}"]')
    expect(tile.locator(".mark.excluded")).to_be_visible()
    assert api(page, f"/api/images/{excluded}")["excluded"]
    tile.locator(".picture").click()
    bar.get_by_role("button", name="Include again").click()
    expect(tile.locator(".mark.excluded")).to_have_count(0)
    assert not api(page, f"/api/images/{excluded}")["excluded"]
    undo(page)
    undo(page)


def test_moving_to_a_cluster_that_is_picked(page):
    first, second = largest(page, 2)
    open_view(page, f"cluster/{first['id']}")
    moved = int(page.locator(".tile").first.get_attribute("data-key"))
    page.locator(".tile .picture").first.click()
    page.get_by_role("button", name="Move to …").click()
    page.get_by_label("Search clusters").fill(f"cluster {second['id']}")
    page.get_by_role("dialog").get_by_role("button", name=re.compile(rf"^cluster {second['id']} ?\d")).click()
    expect(page.locator(f'.tile[data-key="{moved}"]')).to_have_count(0)
    open_view(page, f"cluster/{second['id']}")
    expect(page.locator(f'.tile[data-key="{moved}"] .mark.moved')).to_be_visible()
    undo(page)


def test_one_image_large(page):
    first = largest(page)[0]
    open_view(page, f"cluster/{first['id']}")
    expect(page.locator(".tile").first).to_be_visible()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    viewer = page.get_by_role("dialog")
    ids = [int(key) for key in page.locator(".tile").evaluate_all("t => t.map(x => x.dataset.key)")]
    expect(viewer.locator("img.large")).to_have_attribute("src", f"/image/{ids[0]}")
    expect(viewer).to_contain_text(re.compile("20 . 20 pixels"))
    page.keyboard.press("ArrowRight")
    expect(viewer.locator("img.large")).to_have_attribute("src", f"/image/{ids[1]}")
    page.keyboard.press("s")
    expect(page).to_have_url(re.compile(f"#/similar/{ids[1]}$"))
    expect(page.locator(".tile .note").first).to_be_visible()
    scores = [float(score) for score in page.locator(".tile .note").all_text_contents()]
    assert scores == sorted(scores, reverse=True)


def test_dropping_an_image_finds_similar_ones(page, photos):
    overview(page)
    path = photos / "image0007.png"
    encoded = base64.b64encode(path.read_bytes()).decode()
    page.evaluate(
        """encoded => {
            const bytes = Uint8Array.from(atob(encoded), c => c.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], "<img src=x onerror=alert(1)>.png", { type: "image/png" }));
            for (const type of ["dragenter", "dragover", "drop"])
                document.body.dispatchEvent(
                    new DragEvent(type, { dataTransfer: transfer, bubbles: true, cancelable: true }));
        }""",
        encoded,
    )
    expect(page.locator(".subject")).to_contain_text("<img src=x onerror=alert(1)>.png")
    expect(page.locator(".subject")).to_contain_text("confidence")
    assert page.locator("#drop").is_hidden()
    answer = page.request.post(
        page.address + "/api/similar", data=path.read_bytes(), headers={"X-Odcluster": "1"}
    ).json()
    tiles = page.locator(".tile")
    expect(tiles).to_have_count(len(answer["items"]))
    assert [i["id"] for i in answer["items"]] == [int(k) for k in tiles.evaluate_all("t => t.map(x => x.dataset.key)")]


def test_a_file_that_is_no_image_is_refused_with_a_sentence(page):
    open_view(page, "similar")
    page.allow_failures(400)
    page.get_by_label("Image file").set_input_files(
        {"name": "a.png", "mimeType": "image/png", "buffer": b"not an image"}
    )
    expect(page.locator(".toast.bad")).to_be_visible()
    assert page.locator(".toast.bad span").first.text_content().endswith(".")


def test_choosing_a_file(page):
    open_view(page, "similar")
    buffer = io.BytesIO()
    Image.fromarray(np.full((24, 24, 3), 90, np.uint8)).save(buffer, "PNG")
    page.get_by_label("Image file").set_input_files(
        {"name": "grey.png", "mimeType": "image/png", "buffer": buffer.getvalue()}
    )
    expect(page.locator(".subject")).to_contain_text("grey.png")
    expect(page.locator(".tile").first).to_be_visible()
