"""The estimator keeps scikit-learn's conventions and gives what the verbs give."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.utils import estimator_checks
from tiny_runs import TINY

import odcluster
from odcluster import OnlineDeepClustering
from odcluster.errors import UserError
from odcluster.explore.export import read_clusters_csv
from odcluster.training.run import Run

OWN = ("backbone", "image_size", "batch_size", "epochs", "workers")
OPTIONS = {name: value for name, value in TINY.items() if name not in (*OWN, "clusters")}


def tiny(**changes: object) -> OnlineDeepClustering:
    own = {**{name: TINY[name] for name in OWN}, "epochs": 1, "n_clusters": 6, "options": OPTIONS}
    return OnlineDeepClustering(**{**own, **changes})


@pytest.fixture(scope="module")
def array(image_folder) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path)) for path in sorted(image_folder.iterdir())])


@pytest.fixture(scope="module")
def fitted(array) -> OnlineDeepClustering:
    return tiny().fit(array)


@pytest.mark.parametrize(
    "check",
    [
        estimator_checks.check_estimator_cloneable,
        estimator_checks.check_estimator_repr,
        estimator_checks.check_no_attributes_set_in_init,
        estimator_checks.check_parameters_default_constructible,
        estimator_checks.check_do_not_raise_errors_in_init_or_set_params,
        estimator_checks.check_get_params_invariance,
        estimator_checks.check_set_params,
        estimator_checks.check_mixin_order,
        estimator_checks.check_estimator_tags_renamed,
        estimator_checks.check_valid_tag_types,
    ],
    ids=lambda check: check.__name__,
)
def test_scikit_learns_own_checks(check):
    check("OnlineDeepClustering", OnlineDeepClustering())


def test_what_fit_leaves_behind(fitted, array):
    assert fitted.labels_.shape == (97,)
    assert set(np.unique(fitted.labels_)) == set(range(6))
    assert fitted.cluster_centers_.shape == (6, TINY["dim"])
    assert fitted.n_features_in_ == array[0].size
    assert len(fitted.paths_) == 97
    assert (fitted.labels_ == read_clusters_csv(Run(fitted.run_).clusters_file).labels).all()


def test_predict_is_assign_and_transform_is_embed(fitted, array, tmp_path):
    table = odcluster.assign(fitted.run_, array, quiet=True, workers=0, out=str(tmp_path / "t.csv")).read_text()
    assert fitted.predict(array).tolist() == [int(line.split(",")[1]) for line in table.splitlines()[1:]]
    rows = odcluster.embed(fitted.run_, array, quiet=True, workers=0, out=str(tmp_path / "f.npy"))
    features = fitted.transform(array)
    np.testing.assert_allclose(features, np.load(rows, allow_pickle=False), atol=1e-4)
    assert fitted.get_feature_names_out().shape == (features.shape[1],)


def test_the_seed_decides_and_clones_learn_the_same(fitted, array):
    again = clone(fitted)
    assert not hasattr(again, "run_")
    assert again.get_params() == fitted.get_params()
    assert (again.fit_predict(array) == fitted.labels_).all()


def test_it_works_in_a_pipeline(array):
    classes = np.arange(97) % 5
    pipeline = make_pipeline(tiny(), LogisticRegression(max_iter=200))
    pipeline.set_params(onlinedeepclustering__epochs=1).fit(array, classes)
    assert pipeline.score(array, classes) > 0.5


def test_a_list_of_paths_keeps_its_order(image_folder, array):
    paths = sorted(image_folder.iterdir(), reverse=True)
    given = [*paths, paths[3]]  # twice the same
    estimator = tiny().fit(given)
    assert estimator.paths_ == [os.path.abspath(path) for path in given]
    assert estimator.labels_[3] == estimator.labels_[-1]
    names = Run(estimator.run_).manifest().paths
    labels = read_clusters_csv(Run(estimator.run_).clusters_file).labels
    assert estimator.labels_.tolist() == [labels[names.index(os.path.abspath(path))] for path in given]
    assert not hasattr(estimator, "n_features_in_")
    # The same pixels as files and as an array, in the same order
    assert (estimator.predict(given[:10]) == estimator.predict(array[::-1][:10])).all()


def test_a_folder_and_an_unreadable_image(fitted, image_folder, tmp_path):
    np.testing.assert_array_equal(fitted.predict(image_folder), fitted.predict(sorted(image_folder.iterdir())))
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    good = min(image_folder.iterdir())
    with pytest.warns(UserWarning, match="1 of 2 images cannot be read"):
        assert fitted.predict([broken, good])[0] == -1
    with pytest.warns(UserWarning, match="1 of 2 images cannot be read"):
        features = fitted.transform([broken, good])
    assert np.isnan(features[0]).all()
    assert np.isfinite(features[1]).all()


def test_a_temporary_run_goes_with_its_estimator_and_a_kept_one_stays(array, tmp_path):
    estimator = tiny(options={**OPTIONS, "max_steps": 1}, epochs=None).fit(array)
    first = Path(estimator.run_)
    with pytest.raises(UserError, match="out="):
        pickle.dumps(estimator)
    estimator.set_params(out=tmp_path / "run").fit(array)
    assert not first.parent.exists()
    labels = estimator.predict(array)
    stored = pickle.dumps(estimator)
    del estimator
    assert (pickle.loads(stored).predict(array) == labels).all()
    temporary = tiny(options={**OPTIONS, "max_steps": 1}, epochs=None).fit(array)
    place = Path(temporary.run_)
    del temporary
    assert not place.parent.exists()


def test_mistakes_are_explained_before_anything_is_trained(array, tmp_path):
    with pytest.raises(UserError, match="argument of its own"):
        tiny(options={"epochs": 3}).fit(array)
    with pytest.raises(UserError, match="crop_size"):
        tiny(options={"crop_sise": 3}).fit(array)
    with pytest.raises(UserError, match="a folder, a list of paths"):
        tiny().fit([1, 2, 3])
    (tmp_path / "run-images.csv").write_text("mine")
    with pytest.raises(UserError, match="exists"):
        tiny(out=tmp_path / "run").fit([tmp_path / "a.png"])
    with pytest.raises(NotFittedError):
        tiny().predict(array)
