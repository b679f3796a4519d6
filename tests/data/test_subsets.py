"""Some images of other data: the same names, labels and pixels, whatever the storage; changed data is noticed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import TINY, make_images
from tiny_studies import pack_images

import odcluster
from odcluster.data.sources import open_source
from odcluster.data.subsets import write_subset
from odcluster.errors import DataError, UserError


@pytest.mark.parametrize("kind", ["packed", "folder", "arrays"])
def test_chosen_images_keep_name_label_and_pixels(kind, tmp_path):
    if kind == "folder":
        data = make_images(tmp_path / "images", 20)
    else:
        data = tmp_path / "images.npz"
        pack_images(data, 20, seed=0)
    if kind == "arrays":
        whole = open_source(data)
        np.savez(data, images=np.stack([whole.image(i) for i in range(20)]), labels=whole.manifest.labels)
    whole = open_source(data)
    ids = np.array([17, 2, 5, 5])  # any order, repeated: what counts is which
    write_subset(tmp_path / "some.subset", str(data), ids)
    some = open_source(tmp_path / "some.subset")
    assert some.manifest.paths == [whole.manifest.paths[i] for i in (2, 5, 17)]
    assert some.manifest.kind == whole.manifest.kind
    for new, old in enumerate((2, 5, 17)):
        assert (some.image(new) == whole.image(old)).all()
        assert (pickle.loads(pickle.dumps(some)).image(new) == whole.image(old)).all()
    if whole.manifest.labels is not None:
        assert some.manifest.labels is not None
        assert some.manifest.labels.tolist() == whole.manifest.labels[[2, 5, 17]].tolist()
    assert some.manifest.fingerprint() != whole.manifest.fingerprint()


def test_a_subset_trains_and_resumes_like_any_data(tmp_path):
    pack_images(tmp_path / "images.npz", 120, seed=0)
    write_subset(tmp_path / "some.subset", str(tmp_path / "images.npz"), np.arange(0, 120, 2))
    run = odcluster.train(tmp_path / "some.subset", out=tmp_path / "run", quiet=True, **{**TINY, "clusters": 4})
    assert (run / "clusters.csv").read_text().count("\n") == 61
    odcluster.resume(run, quiet=True)


def test_data_that_changed_since_is_refused(tmp_path):
    pack_images(tmp_path / "images.npz", 20, seed=0)
    write_subset(tmp_path / "some.subset", str(tmp_path / "images.npz"), np.arange(5))
    pack_images(tmp_path / "images.npz", 20, seed=1)
    with pytest.raises(DataError, match="has changed since"):
        open_source(tmp_path / "some.subset")


@pytest.mark.parametrize(
    "values",
    [
        "not json",
        {},
        {"ids": []},
        {"ids": [3, 1]},
        {"ids": [-1, 2]},
        {"ids": ["a"]},
        {"ids": [[1, 2]]},
        {"ids": [10**30]},
        {"of": 7},
        {"of": "other.subset"},
    ],
)
def test_a_broken_file_is_one_sentence(values, tmp_path: Path):
    pack_images(tmp_path / "images.npz", 20, seed=0)
    write_subset(tmp_path / "some.subset", str(tmp_path / "images.npz"), np.arange(5))
    whole = json.loads((tmp_path / "some.subset").read_text())
    text = values if isinstance(values, str) else json.dumps({**whole, **values} if values else {})
    (tmp_path / "some.subset").write_text(text)
    with pytest.raises(UserError) as caught:
        open_source(tmp_path / "some.subset")
    assert "\n" not in str(caught.value)
    assert "make it again" in str(caught.value)


def test_ids_beyond_the_data_are_refused(tmp_path):
    pack_images(tmp_path / "images.npz", 20, seed=0)
    write_subset(tmp_path / "some.subset", str(tmp_path / "images.npz"), np.arange(25))
    with pytest.raises(DataError, match="choose again"):
        open_source(tmp_path / "some.subset")
