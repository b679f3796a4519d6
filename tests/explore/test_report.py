"""The report's parts: pictures that fit into their room, names that stay text, a command that can be typed."""

import base64
import io
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from odcluster.config import Config, changed
from odcluster.data.sources import open_source
from odcluster.explore.collection import NoImages
from odcluster.explore.report import FALLBACK, LAYOUTS, MOST_CARDS, layout, phase_marks
from odcluster.explore.report_pictures import Pictures
from odcluster.explore.report_words import command, data_name, shown_name, shown_options
from odcluster.recipes import recipe


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (24, 64, 64, 3)).astype(np.uint8)


def decoded(tile: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(tile.split("base64,")[1].split('"')[0])))


def test_a_tile_is_a_square_picture_of_at_most_the_side_asked_for(noise: np.ndarray) -> None:
    pictures = Pictures(open_source(noise), 10**6)
    assert decoded(pictures.tile(0, 32, "x")).size == (32, 32)
    small = pictures.tile(0, 200, "x")
    assert decoded(small).size == (64, 64)
    assert "coarse" in small
    assert "coarse" not in pictures.tile(0, 100, "x")


def test_no_room_no_picture(noise: np.ndarray) -> None:
    pictures = Pictures(open_source(noise), 9000)
    tiles = [pictures.tile(id, 48, "x") for id in range(24)]
    drawn = sum("<img" in tile for tile in tiles)
    assert 0 < drawn < 24
    assert pictures.left_out == 24 - drawn
    assert sum(len(tile) for tile in tiles if "<img" in tile) < 9000 + 5000  # the last may pass the line


def test_an_unreadable_image_is_a_grey_square(noise: np.ndarray) -> None:
    pictures = Pictures(NoImages(open_source(noise).manifest), 10**6)
    tile = pictures.tile(3, 48, 'a"b<script>')
    assert "<img" not in tile
    assert "a&quot;b&lt;script&gt;" in tile
    assert pictures.unreadable == 1


def test_the_layout_gives_way_as_clusters_become_many(noise: np.ndarray) -> None:
    pictures = Pictures(open_source(noise), 3_000_000)
    found = [layout(pictures, range(5), num) for num in (10, 60, 100, 400, 100_000)]
    assert found[0] == (*LAYOUTS[0], 10)
    order = [LAYOUTS.index(choice[:2]) for choice in found[:-1]]
    assert order == sorted(order)
    assert found[-1][:2] == FALLBACK
    assert 1 <= found[-1][2] <= MOST_CARDS
    for side, per_card, num in found:
        assert num * per_card * pictures.size(range(5), side) <= 3_000_000


def test_other_peoples_text_is_one_line_without_surprises() -> None:
    nasty = b"caf\xe9\n\x1b[31m\xe2\x80\xaex.jpg".decode("utf-8", "surrogateescape")
    assert shown_name(nasty) == "caf\ufffd\ufffd\ufffd[31m\ufffdx.jpg"
    assert shown_name("été 中文 <b>") == "été 中文 <b>"


def collection_of(config: Config, root: str) -> SimpleNamespace:
    return SimpleNamespace(config=config, manifest=SimpleNamespace(root=root))


def test_the_command_has_what_differs_from_the_recipe_and_no_folders() -> None:
    config = changed(
        recipe("odc_small"), data="/home/me/secret/photos", weights="/home/me/x.pth", clusters=7, crop_scale=(0.5, 1)
    )
    words = shlex.split(command(collection_of(config, "/home/me/secret/photos/")))
    assert words[:5] == ["odcluster", "train", "photos", "--recipe", "odc_small"]
    assert words[5:] == ["--weights", "x.pth", "--clusters", "7", "--crop-scale", "0.5", "1"]
    unknown = collection_of(changed(config, recipe="of_later"), "/home/me/secret/photos")
    assert "home" not in command(unknown)
    assert data_name(collection_of(Config(), "")) == "an array"
    assert "/" not in str(shown_options(config)["weights"])


def test_the_first_clusters_are_marked_where_they_begin() -> None:
    config = changed(recipe("odc_small"), epochs=10, batch_size=8, warm_share=0.3)
    assert phase_marks(config, 80) == [(30, "first clusters")]
    assert phase_marks(changed(config, warm_share=0.0), 80) == []
    assert phase_marks(changed(config, method="rotation"), 80) == []
