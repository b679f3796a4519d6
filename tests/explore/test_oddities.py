"""Near-duplicates: what a slow loop over all pairs finds, groups that do not chain, pixels that decide. Outliers."""

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from odcluster.data.sources import open_source
from odcluster.explore import oddities
from odcluster.explore.export import unguard
from odcluster.explore.oddities import (
    DuplicateGroup,
    Outliers,
    Pixels,
    far_from_their_cluster,
    medians,
    near_duplicates,
    small_picture,
    write_duplicates_csv,
    write_outliers_csv,
)

NASTY = [
    "=HYPERLINK(A1)",
    'a,"b"\nc.jpg',
    "bare\rreturn",
    "<script>.png",
    "\x1b[31mred",
    b"\xe9.jpg".decode("utf-8", "surrogateescape"),
]


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def with_copies(num: int, dim: int, copies: int, noise: float, seed: int) -> np.ndarray:
    """Random rows, of which the last are noisy copies of the first."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=(num, dim))
    rows[num - copies :] = rows[:copies] + noise * random.normal(size=(copies, dim))
    return unit(rows[random.permutation(num)])


def literal_groups(rows: np.ndarray, threshold: float) -> list[list[int]]:
    """One image after the other: who is free leads, and takes those that are close and free."""
    free, groups = [True] * len(rows), []
    for first in range(len(rows)):
        if not free[first]:
            continue
        others = [i for i in range(first + 1, len(rows)) if free[i] and float(rows[first] @ rows[i]) >= threshold]
        if others:
            groups.append([first, *others])
            for i in (first, *others):
                free[i] = False
    return groups


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("threshold", [0.5, 0.9, 0.99])
def test_groups_are_those_of_a_loop_over_all_pairs(
    seed: int, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oddities, "LEADERS", 16)  # several blocks
    monkeypatch.setattr(oddities, "OTHERS", 24)
    rows = with_copies(150, 6, 60, 0.1, seed)
    found = near_duplicates(rows, threshold)
    assert sorted(group.ids for group in found) == sorted(literal_groups(rows, threshold))
    assert [len(group.ids) for group in found] == sorted((len(group.ids) for group in found), reverse=True)
    for group in found:
        assert group.similarity == pytest.approx(
            min(float(rows[group.ids[0]] @ rows[i]) for i in group.ids[1:]), abs=1e-5
        )


def test_a_chain_of_neighbours_is_not_one_group() -> None:
    angles = np.deg2rad(np.arange(0, 90, 10))
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    groups = near_duplicates(rows, float(np.cos(np.deg2rad(11))))
    assert [group.ids for group in groups] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_rows_without_a_feature_are_nobodys_duplicates() -> None:
    rows = np.zeros((6, 4), np.float32)
    rows[4] = np.nan
    rows[2] = rows[5] = [1, 0, 0, 0]
    assert near_duplicates(rows) == [DuplicateGroup([2, 5], 1.0)]
    assert near_duplicates(rows[:0]) == []


def test_beyond_the_exact_size_the_same_copies_are_found(tmp_path: Path) -> None:
    rows = with_copies(6000, 32, 300, 0.05, 2)
    np.save(tmp_path / "rows.npy", rows)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    exact, pruned = (
        {frozenset(group.ids) for group in near_duplicates(mapped, exact_rows=limit)} for limit in (6000, 100)
    )
    assert len(exact) == 300
    assert len(exact & pruned) >= 297


def test_the_last_progress_says_that_all_is_done() -> None:
    for limit in (10_000, 10):
        calls: list[tuple[int, int]] = []
        near_duplicates(with_copies(3000, 8, 10, 0.01, 0), progress=lambda *call: calls.append(call), exact_rows=limit)  # noqa: B023
        assert calls[-1] == (3000, 3000)
        assert calls == sorted(calls)


# --- Pixels -----------------------------------------------------------------------------------------


def photo(seed: int, side: int = 96) -> Image.Image:
    """Blobs of several sizes: as much structure as a photo has."""
    random = np.random.default_rng(seed)
    pixels = np.zeros((side, side, 3))
    for size in (3, 6, 12, 24):
        coarse = Image.fromarray(random.integers(0, 255, (size, size, 3)).astype(np.uint8))
        pixels += np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC)) / 4
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four photos, copies of two of them, a damaged file; sorted: a* show one photo, b* another, the rest its own."""
    folder = tmp_path_factory.mktemp("copies")
    first, second = photo(1), photo(2)
    first.save(folder / "a1.png")
    first.resize((48, 48)).save(folder / "a2.png")
    first.save(folder / "a3.jpg", quality=30)
    second.save(folder / "b1.png")
    ImageEnhance.Brightness(second).enhance(1.2).save(folder / "b2.png")
    photo(3).save(folder / "c.png")
    photo(4).save(folder / "d.png")
    (folder / "e.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    return folder


def test_pixels_decide_whatever_the_network_says(copies: Path) -> None:
    source = open_source(copies)
    alike = unit(np.ones((len(source), 4)))  # a network that sees no difference
    assert near_duplicates(alike)[0].ids == list(range(8))
    groups = near_duplicates(alike, pixels=Pixels(source))
    assert [[source.manifest.paths[i] for i in group.ids] for group in groups] == [
        ["a1.png", "a2.png", "a3.jpg"],
        ["b1.png", "b2.png"],
    ]
    different = np.eye(len(source), dtype=np.float32)
    assert near_duplicates(different, pixels=Pixels(source)) == []


def test_few_pairs_and_many_pairs_are_judged_alike(copies: Path) -> None:
    pixels, ids = Pixels(open_source(copies)), np.arange(8)
    dense = pixels.agree(ids, ids, np.ones((8, 8), bool))
    assert dense[:3, :3].all()
    assert dense.sum() == 9 + 4 + 2  # the damaged file agrees with nothing, not even itself
    for first in range(8):
        asked = np.zeros((8, 100), bool)
        asked[first, 3] = True
        others = np.full(100, 1)
        assert pixels.agree(ids, others, asked)[first, 3] == dense[first, 1]


def test_only_so_many_images_are_opened(copies: Path) -> None:
    pixels = Pixels(open_source(copies), most=2)
    assert [group.ids for group in near_duplicates(unit(np.ones((8, 4))), pixels=pixels)] == [[0, 1]]
    assert pixels.left_out == 6


def test_a_frame_does_not_make_images_alike(tmp_path: Path) -> None:
    for seed in (1, 2):
        framed = Image.new("RGB", (96, 96), "white")
        framed.paste(photo(seed, 72), (12, 12))
        framed.save(tmp_path / f"{seed}.png")
    first, second = (small_picture(open_source(tmp_path), i) for i in range(2))
    assert first is not None
    assert second is not None
    assert float(first[oddities.WHOLE] @ second[oddities.WHOLE]) > float(
        first[oddities.CENTRE] @ second[oddities.CENTRE]
    )
    assert near_duplicates(unit(np.ones((2, 4))), pixels=Pixels(open_source(tmp_path))) == []


def test_plain_images_are_alike_if_they_are_as_bright(tmp_path: Path) -> None:
    for name, grey in (("a", 20), ("b", 21), ("c", 230)):
        Image.new("RGB", (40, 30), (grey, grey, grey)).save(tmp_path / f"{name}.png")
    assert [group.ids for group in near_duplicates(unit(np.ones((3, 4))), pixels=Pixels(open_source(tmp_path)))] == [
        [0, 1]
    ]


# --- Outliers ---------------------------------------------------------------------------------------


def test_outliers_are_far_in_the_spread_of_their_own_cluster() -> None:
    random = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 200)
    similarities = np.concatenate(
        [random.normal(mean, spread, 200) for mean, spread in ((0.9, 0.01), (0.6, 0.05), (0.8, 0.02))]
    )
    similarities[7], similarities[250], similarities[450] = 0.75, 0.55, 0.5
    labels[9] = -1
    similarities[11] = np.nan
    found = far_from_their_cluster(similarities, labels)
    assert {7, 450} <= set(found.ids.tolist()) <= {7, 450} | set(range(600)) - {250}
    assert len(found.ids) < 10
    assert (np.diff(found.scores) <= 0).all()
    assert found.unseen.tolist() == [9, 11]


def test_a_cluster_of_copies_does_not_make_everything_an_outlier() -> None:
    labels = np.repeat([0, 1], [20, 200])
    similarities = np.r_[np.full(20, 0.99), np.random.default_rng(0).normal(0.7, 0.05, 200)]
    similarities[5] = 0.97
    assert 5 not in far_from_their_cluster(similarities, labels).ids
    nothing = far_from_their_cluster(np.empty(0), np.empty(0, np.int64))
    assert len(nothing.ids) == len(nothing.unseen) == 0


def test_medians_by_label() -> None:
    random = np.random.default_rng(1)
    values, labels = random.normal(size=101), random.integers(0, 9, 101)
    labels[labels == 4] = 5
    expected = [np.median(values[labels == label]) if (labels == label).any() else np.nan for label in range(9)]
    np.testing.assert_allclose(medians(values, labels), expected)


# --- Files ------------------------------------------------------------------------------------------


def read(path: Path) -> list[list[str]]:
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.reader(file, strict=True))


def test_tables_keep_any_name_and_are_harmless(tmp_path: Path) -> None:
    write_duplicates_csv(tmp_path / "d.csv", [DuplicateGroup([0, 2, 4], 0.91), DuplicateGroup([1, 5], 0.9)], NASTY)
    lines = read(tmp_path / "d.csv")
    assert lines[0] == ["group", "path", "similarity"]
    assert [(line[0], unguard(line[1])) for line in lines[1:]] == [("1", NASTY[i]) for i in (0, 2, 4)] + [
        ("2", NASTY[i]) for i in (1, 5)
    ]
    assert all(not line[1].startswith("=") for line in lines)
    found = Outliers(np.array([3, 0]), np.array([5.5, 4.25]), np.array([5]))
    write_outliers_csv(tmp_path / "o.csv", found, NASTY, np.array([2, 0, 0, 1, 0, -1]))
    rows = [[unguard(line[0]), *line[1:]] for line in read(tmp_path / "o.csv")]
    assert rows == [["path", "cluster", "score"], [NASTY[3], "1", "5.5"], [NASTY[0], "2", "4.25"], [NASTY[5], "-1", ""]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.csv", "o.csv"]
