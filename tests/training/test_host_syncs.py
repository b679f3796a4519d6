"""How often the host would wait for a GPU in an ordinary ODC step; counted on the CPU, by the operations that ask.

What cannot be seen there: a tensor sent to the host by `to("cpu")`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TINY
from torch.utils._python_dispatch import TorchDispatchMode

import odcluster
from odcluster.training.trainer import Trainer

ASKING = {
    "_local_scalar_dense": "item(), bool(), int() or float()",
    "is_nonzero": "the truth of a tensor",
    "equal": "torch.equal",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "bincount": "bincount",
    "repeat_interleave": "repeat_interleave with a tensor",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "argwhere": "nonzero",
}
"""Operations whose result has a size or a value that the host must know."""
LEAVING = ("cpu", "numpy", "tolist", "__array__")
"""Functions of a tensor that bring it to the host; on the CPU they run no operation that could be seen."""

ALLOWED = {
    "item(), bool(), int() or float()": 2,
    # 1. trainer: is the loss and every gradient finite? Asked before the optimiser step, which it may prevent.
    # 2. balance.handle_small_clusters: is there a small cluster? Handling one has sizes that only the labels know.
}
"""For each kind of question, how often one ordinary step asks it, and why."""


class Questions(TorchDispatchMode):
    """Counts what would make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ASKING:
            self.asked[ASKING[name]] += 1
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [i for i in arguments[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            self.asked["an index that is a mask"] += len(masks)
        return function(*arguments, **(options or {}))


@contextmanager
def questions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Questions]:
    with monkeypatch.context() as patch, Questions() as counted:
        for name in LEAVING:
            original = getattr(torch.Tensor, name, None)
            if original is not None:
                patch.setattr(torch.Tensor, name, noticed(counted.asked, name, original))
        yield counted
    counted.asked += Counter()  # without those never asked


def noticed(asked: Counter[str], name: str, original: Any) -> Any:
    def leaving(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        asked[f"Tensor.{name}"] += 1
        return original(tensor, *arguments, **options)

    return leaving


def counted_steps(
    image_folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[tuple[bool, Counter[str]]]:
    """One run; for each step with clusters whether small ones were handled, and what was asked."""
    counted: list[tuple[bool, Counter[str]]] = []
    original = Trainer._train_step

    def train_step(self: Trainer, raw: Any, epoch: int) -> None:
        handled: list[float] = []
        after_step = self.method.after_step

        def noting(batch: Any, outcome: Any) -> Any:
            values = after_step(batch, outcome)
            handled.append(float(values.get("small_clusters", -1.0)))
            return values

        self.method.after_step = noting  # type: ignore[method-assign]
        with questions(monkeypatch) as found:
            stepping = self.optimizer.step

            def uncounted() -> None:
                before = Counter(found.asked)
                stepping()  # AdamW counts its steps on the CPU
                found.asked.clear()
                found.asked.update(before)

            self.optimizer.step = uncounted  # type: ignore[assignment]
            original(self, raw, epoch)
            self.optimizer.step = stepping  # type: ignore[method-assign]
        del self.method.after_step
        if handled and handled[0] >= 0:
            counted.append((handled[0] > 0, found.asked))

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", train_step)
        odcluster.train(image_folder, out=run, quiet=True, **{**TINY, **options})
    return counted


@pytest.mark.parametrize(
    "options",
    [{}, {"recipe": "odc_resnet50_imagenet", "lr": 0.01}, {"update_interval": 1, "sampling": "replacement"}],
)
def test_an_ordinary_step_asks_the_device_only_what_it_must(options, image_folder, tmp_path, monkeypatch):
    steps = counted_steps(image_folder, tmp_path / "run", monkeypatch, **options)
    ordinary = [asked for handled, asked in steps if not handled]
    assert len(ordinary) >= 5
    for asked in ordinary:
        assert dict(asked) == ALLOWED


def test_each_kind_of_question_is_noticed(monkeypatch):
    """The test above is worth something only if it sees what it looks for."""
    values, mask = torch.arange(6.0), torch.tensor([True, False] * 3)
    ways = {
        "item": lambda: values[0].item(),
        "bool": lambda: bool(mask[0]),
        "float": lambda: float(values[1]),
        "nonzero": lambda: mask.nonzero(),
        "mask": lambda: values[mask],
        "assigned by mask": lambda: values.clone().__setitem__(mask, torch.zeros(3)),
        "unique": lambda: values.unique(),
        "bincount": lambda: torch.bincount(torch.arange(3)),
        "equal": lambda: torch.equal(values, values),
        "cpu": lambda: values.cpu(),
        "tolist": lambda: values.tolist(),
        "numpy": lambda: values.numpy(),
    }
    for name, way in ways.items():
        with questions(monkeypatch) as found:
            way()
        assert sum(found.asked.values()) >= 1, name
    with questions(monkeypatch) as found:
        torch.where(mask, values, 0.0)[torch.tensor([1, 2])].sum()
    assert not found.asked
