"""What the pretext tasks share: a question with a known answer for every image, one phase, no memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from odcluster.config import Config
from odcluster.methods.interface import Batch, Outcome, Phase, Survey
from odcluster.models.backbones import Backbone
from odcluster.ranks import SINGLE, Ranks


class Pretext(nn.Module):
    """A task adds its head and `forward`, which leaves the share of right answers in `accuracy`."""

    accuracy: Tensor

    def __init__(self, backbone: Backbone, config: Config, ranks: Ranks = SINGLE) -> None:
        super().__init__()
        self.config, self.ranks = config, ranks
        self.backbone = backbone

    def phases(self) -> list[Phase]:
        return [whole_run(self.config)]

    def begin_epoch(self, epoch: int, survey: Survey) -> Mapping[str, float]:
        return {}

    def epoch_order(self, epoch: int) -> None:
        return None

    def renewed(self) -> list[nn.Parameter]:
        return []

    def after_step(self, batch: Batch, outcome: Outcome) -> Mapping[str, Tensor | float]:
        return {"accuracy": batch.mean_of_all(self.accuracy)}

    def end_epoch(self, epoch: int) -> None:
        return None

    def finish(self, survey: Survey) -> None:
        return None

    def complete(self, survey: Survey) -> Mapping[str, float]:
        return {}

    def health(self) -> Mapping[str, float]:
        return {}


def whole_run(config: Config) -> Phase:
    """One phase that lasts the whole run."""
    assert config.epochs is not None, "the configuration is not resolved"
    assert config.lr is not None, "the configuration is not resolved"
    optimiser = config.optimiser
    return Phase(
        config.method, config.epochs, config.lr, optimiser.weight_decay, optimiser.schedule, optimiser.warmup_epochs
    )
