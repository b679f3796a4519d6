"""When what happens: phases, steps and the learning rate, as functions of the step alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from odcluster.methods.interface import Phase

DECAY_SHARE = 1 / 11
"""The paper trains 400 epochs at a constant rate and 40 more at a tenth of it."""


@dataclass(frozen=True)
class Schedule:
    """The whole run laid out in steps."""

    phases: list[Phase]
    steps_per_epoch: int
    total_steps: int
    anchor: tuple[int, int] = (0, 0)
    """A step and the epoch that it begins. Epochs have another length since then, if images came or went."""

    def place(self, step: int) -> tuple[int, int]:
        """The epoch of a step and its position there."""
        epochs, position = divmod(step - self.anchor[0], self.steps_per_epoch)
        return self.anchor[1] + epochs, position

    def first_step(self, epoch: int) -> int:
        """The step that begins an epoch; before the anchor, where it would be had epochs always been this long."""
        return self.anchor[0] + (epoch - self.anchor[1]) * self.steps_per_epoch

    def phase_at(self, step: int) -> tuple[Phase, int]:
        """The phase of a step and the step at which that phase began."""
        start = self.first_step(0)
        for phase in self.phases[:-1]:
            if step < start + phase.epochs * self.steps_per_epoch:
                return phase, start
            start += phase.epochs * self.steps_per_epoch
        return self.phases[-1], start

    def curve_at(self, step: int) -> tuple[int, int]:
        """Where the learning rate curve of a step begins and ends; the optimiser is new at its beginning."""
        start = end = self.first_step(0)
        for phase in self.phases:
            if not phase.continues and step >= end:
                start = end
            elif not phase.continues and step < end:
                break
            end += phase.epochs * self.steps_per_epoch
        return start, min(end, self.total_steps)

    def lr(self, step: int) -> float:
        phase, _ = self.phase_at(step)
        start, end = self.curve_at(step)
        return phase.lr * rate(phase.schedule, (step - start) / (end - start)) * self._warmup(phase, step - start)

    def _warmup(self, phase: Phase, done: int) -> float:
        steps = phase.warmup_epochs * self.steps_per_epoch
        return min(1.0, (done + 1) / steps) if steps > 0 else 1.0


def lay_out(
    phases: list[Phase], steps_per_epoch: int, epochs: int, max_steps: int | None, anchor: tuple[int, int] = (0, 0)
) -> Schedule:
    """The schedule of a run of so many epochs, or fewer steps."""
    end = Schedule(phases, steps_per_epoch, 0, anchor).first_step(epochs)
    return Schedule(phases, steps_per_epoch, min(end, max_steps or end), anchor)


def rate(schedule: str, progress: float) -> float:
    """The factor of the learning rate after this share of a phase."""
    if schedule == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    if schedule == "step":
        return 0.1 if progress >= 1 - DECAY_SHARE else 1.0
    assert schedule == "constant", schedule
    return 1.0
