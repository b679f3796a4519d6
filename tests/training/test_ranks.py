"""Several processes as one run on this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from launching import launch, succeed, together
from tiny_runs import TINY, make_images, metrics_without_timings

import odcluster
from odcluster.training import checkpoint
from odcluster.training.metrics import read_metrics
from odcluster.training.shards import find

SINGLE_MODE = {
    **TINY,
    "recipe": "odc_small",
    "backbone": "test_vit",  # layer norm: no number depends on how a batch is shared
    "image_size": 32,
    "crop_size": 32,
    "neck_norm": "none",
    "precision": "float32",
    "clusters": 6,
    "small_cluster": 6,
    "max_steps": 20,
    "warm_share": 0.0,
    "update_interval": 4,
    "instance_weight": 0.5,
    "rotation_weight": 0.5,
    "fine_share": 0.0,
    "num_views": 2,
    "algorithm": "sgd",  # AdamW would make a step of the rounding of a gradient that is 0 (the bias of keys)
    "lr": 0.05,
}
SINGLE_MODE.pop("epochs")


def state(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint, however many ranks wrote it."""
    from odcluster.ranks import SINGLE

    found = find(run / "checkpoints", pytest.fail, SINGLE)
    assert found is not None
    return {name: tensor for group in found.tensors.values() for name, tensor in group.items()}


def same_to_rounding(run: Path, reference: Path) -> None:
    ours, theirs = state(run), state(reference)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor, theirs[name], atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_clustering_across_four_ranks_equals_one_process(tmp_path):
    succeed(tmp_path, 4, "clustering")


def test_two_ranks_do_what_one_does(image_folder, tmp_path):
    """20 steps with small clusters that are dissolved and split, to rounding; and one goes on with what two began.

    Under torchrun, as a user would have it; the other tests fork their ranks.
    """
    reference = odcluster.train(image_folder, out=tmp_path / "one", quiet=True, **SINGLE_MODE)
    lines = read_metrics(reference / "metrics.jsonl")
    assert sum(line.get("small_clusters", 0) for line in lines) > 0, "the test must meet small clusters"
    half = {**SINGLE_MODE, "checkpoint_minutes": 0, "keep_checkpoints": 100}
    other = {name: {**TINY, "epochs": 2, **given} for name, given in METHODS.items()}
    runs = [["train", str(image_folder), str(tmp_path / "two"), half]]
    runs += [["train", str(image_folder), str(tmp_path / name), options] for name, options in other.items()]
    done = launch(2, "train", json.dumps(runs))
    assert done.returncode == 0, done.stderr[-6000:]
    run = tmp_path / "two"
    same_to_rounding(run, reference)
    for ours, theirs in zip(metrics_without_timings(run), metrics_without_timings(reference), strict=True):
        assert ours == {
            key: pytest.approx(value, rel=1e-4, abs=1e-5) if isinstance(value, float) else value
            for key, value in theirs.items()
        }
    assert {path.name for path in (run / "checkpoints" / "step-00000020").iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "memory.safetensors",
        "memory-0000-of-0002.safetensors",
        "memory-0001-of-0002.safetensors",
        "state.json",
    }
    assert len((run / "clusters.csv").read_text().splitlines()) == 98
    for name in METHODS:
        assert (tmp_path / name / "backbone" / "model.safetensors").is_file(), name
        assert not any(line.get("skipped") for line in read_metrics(tmp_path / name / "metrics.jsonl"))
    # From the middle, with one rank (with two, to the bit: tests/faults/test_lost_ranks.py).
    for path in checkpoint.candidates(run / "checkpoints"):
        if int(path.name[5:]) > 7:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    odcluster.resume(run, quiet=True)
    same_to_rounding(run, reference)


METHODS = {
    "paper": {"recipe": "odc_resnet50_imagenet", "lr": 0.01},
    "deepcluster": {"method": "deepcluster"},
}


def test_ranks_that_differ_stop(image_folder, tmp_path):
    options = json.dumps({**TINY, "warm_share": 0.0})
    for child in together(tmp_path, 2, "disagree", str(image_folder), str(tmp_path / "run"), options):
        assert child.code != 0
        assert "samples.labels of rank 1 differs from that of rank 0" in child.said()


def test_two_ranks_take_images_in_as_one_does(image_folder, tmp_path):
    """Whoever wrote the checkpoint, and with however many the run goes on."""
    more = make_images(tmp_path / "more", 21, seed=3)
    options = {**SINGLE_MODE, "max_steps": 7}
    alone = odcluster.train(image_folder, out=tmp_path / "alone", quiet=True, **options)
    both = tmp_path / "both"
    shutil.copytree(alone, both)
    odcluster.resume(alone, add=more, epochs=1, quiet=True)
    succeed(tmp_path, 2, "train", json.dumps([["resume", str(both), None, {"add": str(more), "epochs": 1}]]))
    same_to_rounding(both, alone)
    assert (both / "clusters.csv").read_text().count("\n") == 1 + 97 + 21
    third = make_images(tmp_path / "third", 5, seed=4)
    odcluster.resume(both, add=third, quiet=True)  # two ranks wrote, one goes on
    assert (both / "clusters.csv").read_text().count("\n") == 1 + 97 + 21 + 5
