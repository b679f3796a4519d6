"""A hundred losses that were written down once: an unintended change of the algorithm shows here.

Bit-equality is asked for only between runs on one machine (test_exactness.py): held to the instruction sets of older
CPUs (SSE4.1, AVX2) the same code gave losses that differed by up to 3e-6 in the first twenty steps and by up to 2.5 %
in a hundred, when some labels have fallen the other way. Hence the tolerances.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from harness import METHODS

import odcluster
from odcluster.training.metrics import Window


def test_the_losses_are_those_that_were_written_down(images, tmp_path, monkeypatch):
    losses, add = [], Window.add

    def noted(self, values):
        if "loss" in values:
            losses.append(float(values["loss"].detach()))
        add(self, values)

    monkeypatch.setattr(Window, "add", noted)
    changes = {"max_steps": 100, "epochs": 17, "precision": "float32", "checkpoint_minutes": 10.0}
    odcluster.train(images, out=tmp_path / "run", quiet=True, **{**METHODS["odc of the paper"], **changes})
    golden = json.loads((Path(__file__).parent / "golden.json").read_text())
    np.testing.assert_allclose(losses[:20], golden[:20], rtol=1e-4)
    np.testing.assert_allclose(losses, golden, rtol=0.06)
    np.testing.assert_allclose(np.mean(losses[-20:]), np.mean(golden[-20:]), rtol=0.01)
