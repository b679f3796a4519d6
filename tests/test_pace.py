"""--minutes measures what training will do: the same precision and optimiser, and nothing is learned by it."""

import numpy as np
import pytest
import torch

from odcluster import pace
from odcluster.build import build_loader, build_method
from odcluster.config import changed
from odcluster.data.sources import open_source
from odcluster.recipes import odc_small
from odcluster.training.console import Console
from odcluster.training.devices import StopFlag
from odcluster.training.resolve import resolve
from odcluster.training.trainer import Trainer

CPU = torch.device("cpu")


@pytest.mark.parametrize(("precision", "expected"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_a_step_is_measured_as_it_will_be(monkeypatch, precision, expected):
    monkeypatch.setattr(pace, "SECONDS", 0.0)
    source = open_source(np.random.default_rng(0).integers(0, 256, (64, 16, 16, 3), dtype=np.uint8))
    given = changed(odc_small(), precision=precision, epochs=2, workers=0, batch_size=16, clusters=4)
    config, _ = resolve(given, source, CPU)
    quiet, stop = Console(quiet=True), StopFlag()
    method = build_method(config, len(source), CPU, quiet)
    kinds, steps = set(), []
    method.backbone.network.layers[1].register_forward_hook(lambda module, inputs, output: kinds.add(output.dtype))
    with build_loader(config, source, method, CPU, quiet, stop) as loader:
        trainer = Trainer(method, loader, source.manifest, config, CPU, quiet, stop)
        step = trainer.optimizer.step
        monkeypatch.setattr(trainer.optimizer, "step", lambda: (steps.append(1), step()))
        before = [parameter.clone() for parameter in trainer.module.parameters()]
        per_step, per_image = pace.measure(trainer)
    assert kinds == {expected}
    assert len(steps) == pace.FEWEST_STEPS
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.module.parameters(), strict=True))
    assert 0 < per_image < per_step
