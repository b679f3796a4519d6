"""clusters.csv: exact for any file name, harmless in a spreadsheet, never half written."""

import csv
import stat
from pathlib import Path

import numpy as np
import pytest

from odcluster.errors import DataError
from odcluster.explore.export import (
    guard,
    rank_within_cluster,
    read_clusters_csv,
    unguard,
    write_clusters_csv,
)

NASTY = [
    "=HYPERLINK(A1)",
    "+1",
    "-1.jpg",
    "@sum",
    "\tx",
    "\rx",
    "\nx",
    " =1+1",
    "＝1",  # noqa: RUF001
    "'quoted'",
    "'=1",
    "''",
    'a,"b"\nc\r\nd.jpg',
    "bare\rreturn",
    "line\u2028separator\x0b\x0c\x1c",
    "\x1b[31mred",
    "<script>alert(1)</script>",
    b"latin-\xe9.jpg".decode("utf-8", "surrogateescape"),
    "été/中文.png",
    "",
    " ",
    "plain.jpg",
]
ALPHABET = [*"=+-@\t\r\n'\",; ab/", "\udcff", "é", "＝"]  # noqa: RUF001


def write(path: Path, names: list[str]) -> None:
    labels = np.arange(len(names)) % 3
    similarities = np.linspace(1, 0, len(names))
    write_clusters_csv(path, names, labels, similarities, rank_within_cluster(labels, similarities))


def literal_ranks(labels: np.ndarray, similarities: np.ndarray) -> list[int]:
    return [
        0
        if label < 0
        else 1
        + sum(
            other == label and (s > similarities[i] or (s == similarities[i] and j < i))
            for j, (other, s) in enumerate(zip(labels, similarities, strict=True))
        )
        for i, label in enumerate(labels)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_ranks_are_what_loops_give(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(-1, 6, 120)
    similarities = rng.integers(0, 12, 120) / 12  # many ties
    assert rank_within_cluster(labels, similarities).tolist() == literal_ranks(labels, similarities)


def test_ranks_of_special_cases() -> None:
    assert rank_within_cluster(np.array([], int), np.array([])).tolist() == []
    assert rank_within_cluster(np.array([-1, -1]), np.array([0.5, 0.2])).tolist() == [0, 0]
    assert rank_within_cluster(np.array([4, 4, 4]), np.array([np.nan, -0.5, 0.1])).tolist() == [3, 2, 1]
    with pytest.raises(ValueError, match="one of each"):
        rank_within_cluster(np.array([1, 2]), np.array([0.5]))


def test_nasty_names_round_trip(tmp_path: Path) -> None:
    write(tmp_path / "clusters.csv", NASTY)
    assert read_clusters_csv(tmp_path / "clusters.csv").names == NASTY


@pytest.mark.parametrize("seed", range(10))
def test_any_names_round_trip(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = ["".join(rng.choice(ALPHABET, rng.integers(0, 6))) for _ in range(200)]
    write(tmp_path / "clusters.csv", names)
    assert read_clusters_csv(tmp_path / "clusters.csv").names == names


def test_no_cell_is_a_formula_to_a_spreadsheet(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    write(tmp_path / "c.csv", NASTY + ["".join(rng.choice(ALPHABET, 4)) for _ in range(300)])
    with (tmp_path / "c.csv").open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        cells = [row[0] for row in csv.reader(file)]  # any reader, not only ours
    assert not [c for c in cells if c[:1] in {*"\t\r\n"} or c.strip()[:1] in {*"=+-@＝＋－＠"}]  # noqa: RUF001
    assert "plain.jpg" in cells  # ordinary names stay as they are


def test_guarding_is_one_to_one() -> None:
    assert all(unguard(guard(name)) == name for name in NASTY)
    assert guard("=1") == "'=1"
    assert guard("'=1") == "''=1"
    assert guard("a=1") == "a=1"


def test_values_round_trip_and_unlabelled_images_have_empty_cells(tmp_path: Path) -> None:
    labels = np.array([3, -1, 3, 0])
    similarities = np.array([0.25, 0.9, 0.123456789, -0.5], np.float32)
    ranks = rank_within_cluster(labels, similarities)
    write_clusters_csv(tmp_path / "c.csv", ["a", "b", "c", "d"], labels, similarities, ranks)
    assert (tmp_path / "c.csv").read_text() == (
        "path,cluster,similarity,rank\na,3,0.250000,1\nb,-1,,\nc,3,0.123457,2\nd,0,-0.500000,1\n"
    )
    table = read_clusters_csv(tmp_path / "c.csv")
    assert table.labels.tolist() == labels.tolist()
    assert table.ranks.tolist() == [1, 0, 2, 1]
    np.testing.assert_allclose(table.similarities, [0.25, np.nan, 0.123457, -0.5])


def test_an_empty_table_round_trips(tmp_path: Path) -> None:
    write(tmp_path / "c.csv", [])
    table = read_clusters_csv(tmp_path / "c.csv")
    assert (table.names, len(table.labels), len(table.similarities), len(table.ranks)) == ([], 0, 0, 0)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "clusters.csv"
    write(path, ["old.jpg"])
    with pytest.raises(UnicodeEncodeError):
        write(path, ["new.jpg"] * 5000 + ["\ud800"])  # fails in the middle of the file
    assert read_clusters_csv(path).names == ["old.jpg"]
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="one value per image"):
        write_clusters_csv(path, ["a"], np.zeros(2, int), np.zeros(2), np.zeros(2, int))


def test_the_file_is_as_readable_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write(tmp_path / "c.csv", ["a"])
    assert stat.S_IMODE((tmp_path / "c.csv").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line 0: the header is missing"),
        ("name,label\n", "line 1"),
        ("path,cluster,similarity,rank\na,1,0.5,1\nb,2\n", "line 3"),
        ("path,cluster,similarity,rank\na,x,0.5,1\n", "line 2"),
        ('path,cluster,similarity,rank\n"a,1,0.5,1\n', "unexpected end of data"),
    ],
)
def test_another_table_is_refused_by_line(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "c.csv").write_text(text)
    with pytest.raises(DataError, match=reason):
        read_clusters_csv(tmp_path / "c.csv")
