"""The loop. Owns time, the optimiser, the finite check, checkpoints and the wish to stop; knows nothing of learning.

Promises: killed at any instant and resumed, a run ends with the same bits as one that was never stopped (same machine);
a non-finite loss or gradient changes neither weights nor memories; an unreadable image is left out of its batch and
named. Across ranks, all do the same at the same step: what one of them notices (a wish to stop, an unreadable image, a
number that is not finite, the time for a checkpoint) becomes known to all before any acts on it; rank 0 writes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from odcluster.config import Config
from odcluster.config_file import decisive, fingerprint
from odcluster.data.loading import Batches, RawBatch
from odcluster.data.order import batch_ids, epoch_order, num_steps, rank_slice
from odcluster.data.randomness import Purpose
from odcluster.data.sources import Manifest
from odcluster.errors import DataError, Diverged, Interrupted
from odcluster.methods.interface import Batch, Method, Phase
from odcluster.models.backbones import Backbone, layer_lr_scales
from odcluster.ranks import SINGLE, Ranks
from odcluster.training import checkpoint, health, shards
from odcluster.training.checkpoint import NotSaved
from odcluster.training.console import Console
from odcluster.training.devices import StopFlag, seed_torch
from odcluster.training.metrics import MetricsFile, Window
from odcluster.training.optimisers import Muon
from odcluster.training.parallel import average_statistics, check_agreement, spread_over
from odcluster.training.run import Run, write_atomically
from odcluster.training.schedule import Schedule, lay_out
from odcluster.training.survey import DataSurvey, to_network

MEMORY_PREFIXES = ("samples.", "centroids.")
"""Buffers of the method that go into memory.safetensors; everything else is the model."""
MOST_SKIPS = 3
"""This many non-finite steps in a row end the run."""
SIZE_RECORDS = 50
"""Cluster sizes are on record about this often in a run."""
MOST_RECORDED = 100_000
"""Sizes of more clusters than this are not recorded: metrics.jsonl is not the place for them."""


class Trainer:
    """One run, from wherever it stands to its end."""

    def __init__(
        self,
        method: Method,
        loader: Batches,
        manifest: Manifest,
        config: Config,
        device: torch.device,
        console: Console,
        stop: StopFlag,
        ranks: Ranks = SINGLE,
    ) -> None:
        assert config.batch_size is not None
        assert config.epochs is not None
        self.module, self.ranks = cast(nn.Module, method), ranks
        self.method, self.loader, self.manifest, self.config = method, loader, manifest, config
        self.device, self.console, self.stop = device, console, stop
        self.batch_size = min(config.batch_size, len(manifest))
        self.schedule = self._schedule((0, 0))
        self.module.to(device)
        self.network = spread_over(ranks, self.module)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.running.precision == "bfloat16")
        self.mean, self.std = loader.normalisation_on(device)
        self.step = 0
        self.begun = False  # whether begin_epoch has been done for the epoch of this step
        self.finished = False
        self.skips = 0
        self.changed: dict[str, int] | None = None  # how many images came and went, until the method knows of it
        self.refused: dict[int, str] = {}
        self.parts: list[list[int]] = []  # ids of the batch, of each rank
        self.window = Window()
        self.warned: set[str] = set()
        self.optimizer = self._new_optimizer(self.schedule.phase_at(0)[0])

    # Where a run stands ------------------------------------------------------------

    def run(self, run: Run, start: checkpoint.Checkpoint | None) -> None:
        """Train to the end, writing to the run directory; raises Interrupted after saving when asked to stop."""
        self.run_directory = run
        self.known_valid = {start.path} if start else set()
        if self.ranks.is_first:
            self.metrics = MetricsFile(run.metrics_file, start.state["metrics_size"] if start else 0)
        if start:
            self._restore(start)
        self.last_save = self.interval_start = time.monotonic()
        self.images = self.waited = 0.0
        try:
            if start and (changed := start.state.get("changed")):
                self._take_in(changed)
            while self.step < self.schedule.total_steps:
                self._epoch()
            if not self.finished:
                self.method.finish(DataSurvey(self, self.config.epochs or 0))
                self.finished = True
            self.save(last=True)
        except Interrupted as stopped:
            self.save(last=True)
            raise Interrupted(
                f"stopped at step {self.step}, everything saved: `odcluster resume {run.path}` goes on"
            ) from stopped
        finally:
            if self.ranks.is_first:
                self.metrics.close()

    def save(self, last: bool = False) -> None:
        """Write a checkpoint. When the disk is full, go on and try again later; at the end, say so and fail."""
        try:
            directory = self.run_directory.checkpoints
            self.known_valid.add(shards.save(directory, self.step, self.tensors(), self.state(), self.ranks))
            if self.ranks.is_first:
                checkpoint.prune(directory, self.config.running.keep_checkpoints, self.known_valid)
        except (NotSaved, OSError) as error:
            if last:
                raise DataError(
                    f"{error}; free some space, then `odcluster resume {self.run_directory.path}`"
                ) from error
            self.console.warn(f"{error}; earlier checkpoints are intact, training goes on and tries again later")
        self.last_save = time.monotonic()

    def state(self) -> dict[str, Any]:
        """All state of the run that is not made of tensors, and what a resume must find unchanged."""
        backbone = cast(Backbone, self.method.backbone)
        return {
            "begun": self.begun,
            "finished": self.finished,
            "skips": self.skips,
            "refused": self.refused,
            "window": self.window.state(),
            "warned": sorted(self.warned),
            "metrics_size": self.metrics.size() if self.ranks.is_first else 0,
            "manifest": self.manifest.fingerprint(),
            "normalisation": [backbone.mean, backbone.std],
            "stem": backbone.stem,
            "config": fingerprint(self.config),
            "options": decisive(self.config),
            "versions": {"torch": torch.__version__},
            "anchor": self.schedule.anchor,
            "total_steps": self.schedule.total_steps,
            "changed": self.changed,
        }

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All state of the run that is made of tensors, by file."""
        model: dict[str, Tensor] = {}
        memory: dict[str, Tensor] = {}
        for name, tensor in self.module.state_dict().items():
            (memory if name.startswith(MEMORY_PREFIXES) else model)[name] = tensor
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.module.named_parameters()}
        optimizer = {
            f"{names[parameter]}.{key}": value
            for parameter, entries in self.optimizer.state.items()
            for key, value in entries.items()
            if isinstance(value, Tensor)
        }
        return {"model": model, "memory": memory, "optimizer": optimizer}

    def _restore(self, start: checkpoint.Checkpoint) -> None:
        state = start.state
        self.step, self.begun, self.skips = state["step"], state["begun"], state["skips"]
        self.finished = state.get("finished", False)
        self.refused = {int(key): reason for key, reason in state["refused"].items()}
        self.changed = state.get("changed")
        self.schedule = self._schedule(tuple(state.get("anchor", (0, 0))))
        self.window = Window(state["window"])
        self.warned = set(state["warned"])
        self.module.load_state_dict({**start.tensors["model"], **start.tensors["memory"]})
        self.optimizer = self._new_optimizer(self.schedule.phase_at(self.step)[0])
        if self.step > self.schedule.curve_at(self.step)[0]:  # else it is new
            parameters = dict(self.module.named_parameters())
            for key, value in start.tensors["optimizer"].items():
                name, _, entry = key.rpartition(".")
                where = "cpu" if entry == "step" else self.device  # AdamW counts its steps on the CPU
                self.optimizer.state[parameters[name]][entry] = value.to(where)

    def _schedule(self, anchor: tuple[int, int]) -> Schedule:
        steps_per_epoch, epochs = num_steps(len(self.manifest), self.batch_size), self.config.epochs
        assert epochs is not None
        return lay_out(self.method.phases(), steps_per_epoch, epochs, self.config.max_steps, anchor)

    def _take_in(self, changed: dict[str, int]) -> None:
        """Images came or went since the last step: let the method complete what it knows of them, once."""
        epoch, _ = self.schedule.place(self.step)
        told = self.method.complete(DataSurvey(self, epoch))
        self._write({"step": self.step, "epoch": epoch, "event": "images", **changed, **told})
        self.changed = None

    # One epoch, one step ------------------------------------------------------------

    def _epoch(self) -> None:
        epoch, position = self.schedule.place(self.step)
        steps = min(self.schedule.steps_per_epoch, self.schedule.total_steps - self.schedule.first_step(epoch))
        if not self.begun:
            self._begin_epoch(epoch)
        order = self.method.epoch_order(epoch)
        if order is None:
            replacement = self.config.optimiser.sampling == "replacement"
            order = epoch_order(self.config.seed, epoch, len(self.manifest), replacement)
        batches = [self.own_part(batch_ids(order, at, self.batch_size)) for at in range(position, steps)]
        asked = time.monotonic()
        for raw in self.loader.training(epoch, batches):
            self.waited += time.monotonic() - asked
            self.parts = self.exchange(raw)
            if min(map(len, self.parts)) > 1:  # batch norm needs two
                self._train_step(raw, epoch)
            self.images += sum(map(len, self.parts))
            self.step += 1
            if self.step == self.schedule.first_step(epoch + 1):
                check_agreement(self.ranks, self.module, self.step)
                self.method.end_epoch(epoch)
                self.begun = False
            if not self.begun or self.step == self.schedule.total_steps:
                self._record_sizes(epoch)
            if self.step % self.config.running.log_interval == 0 or self.step == self.schedule.total_steps:
                self._log(epoch)
            due = self.ranks.any(time.monotonic() - self.last_save > self.config.running.checkpoint_minutes * 60)
            if due and self.step < self.schedule.total_steps:  # the end is saved once it is complete
                self.save()
            self.poll()
            asked = time.monotonic()

    def own_part(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """What this rank loads of a batch."""
        return rank_slice(ids, self.ranks.rank, self.ranks.world_size)

    def exchange(self, raw: RawBatch) -> list[list[int]]:
        """Which images of the batch each rank has; those that any of them could not read are named."""
        if self.ranks.world_size == 1:
            self._refuse(raw.refused)
            return [raw.ids.tolist()]
        parts = self.ranks.share([raw.ids.tolist(), raw.refused])
        self._refuse((i, reason) for _, refused in parts for i, reason in refused)
        return [ids for ids, _ in parts]

    def poll(self) -> None:
        """Raise Interrupted, on all ranks, if a stop is wanted on any."""
        self.stop.wanted = self.ranks.any(self.stop.wanted)
        self.stop.poll()

    def _begin_epoch(self, epoch: int) -> None:
        if self.schedule.curve_at(self.step)[0] == self.step:
            self.optimizer = self._new_optimizer(self.schedule.phase_at(self.step)[0])
        began = time.monotonic()
        event = self.method.begin_epoch(epoch, DataSurvey(self, epoch))
        self.interval_start += time.monotonic() - began  # not a part of the training speed
        if event:
            self._write({"step": self.step, "epoch": epoch, "event": "clusters", **event})
        for parameter in self.method.renewed():
            self.optimizer.state.pop(parameter, None)
        self.begun = True

    def _train_step(self, raw: RawBatch, epoch: int) -> None:
        """Forward, backward, finite check, SGD step, memories: the one order in which it happens."""
        seed_torch(self.config.seed, Purpose.STEP, self.step, self.ranks.rank)
        alone = self.ranks.world_size == 1
        batch = Batch(
            raw.ids.to(self.device, non_blocking=True),
            to_network(raw.images, self.mean, self.std),
            epoch=epoch,
            step=self.step,
            everyone=None if alone else torch.tensor([i for part in self.parts for i in part], device=self.device),
            sizes=() if alone else tuple(map(len, self.parts)),
            ranks=self.ranks,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.lr(self.step) * group["scale"]
        running = [buffer for name, buffer in self.module.named_buffers() if not name.startswith(MEMORY_PREFIXES)]
        before = [buffer.clone() for buffer in running]  # batch-norm statistics: a forward pass changes them
        self.module.train()
        with self.autocast, self.ranks.talking():
            outcome = self.network(batch)
        self.optimizer.zero_grad(set_to_none=True)
        with self.ranks.talking():
            outcome.loss.backward()
        average_statistics(self.ranks, self.module)
        moved = [p.grad for p in self.module.parameters() if p.grad is not None]
        moved += [buffer for buffer in running if buffer.is_floating_point()]
        loss = outcome.loss.detach()
        # Finite only if all terms are: one question to the device. The rate, because a gradient times it may overflow.
        finite = loss + nn.utils.get_total_norm(moved) * max(1.0, self.schedule.lr(self.step))
        finite = finite if outcome.features is None else finite + outcome.features.sum()
        if not alone:  # each rank knows its own loss and features only
            loss, finite = self.ranks.sum(torch.stack([loss, finite])) / self.ranks.world_size
        if not torch.isfinite(finite):
            for buffer, old in zip(running, before, strict=True):
                buffer.copy_(old)
            self._skip(batch, float(loss))
            return
        self.optimizer.step()
        self.skips = 0
        with torch.no_grad():
            values = self.method.after_step(batch, outcome)
        self.window.add({"loss": loss, **values})

    def _skip(self, batch: Batch, loss: float) -> None:
        self.skips += 1
        self.window.add({"skipped": 1.0})
        if self.skips < MOST_SKIPS:
            self.console.warn(
                f"step {self.step}: the loss, a gradient or a feature is not finite; the step was left out"
            )
            return
        record = {
            "step": self.step,
            "epoch": batch.epoch,
            "seed": self.config.seed,
            "loss": str(loss),
            "lr": self.schedule.lr(self.step),
            "ids": batch.whole_ids.tolist(),
            "paths": [self.manifest.paths[i] for i in batch.whole_ids.tolist()],
        }
        folder = self.run_directory.path / "diverged"
        if self.ranks.is_first:
            folder.mkdir(exist_ok=True)
            write_atomically(folder / f"step-{self.step:08d}.json", json.dumps(record, indent=1))
        raise Diverged(
            f"{MOST_SKIPS} steps in a row gave a non-finite loss or gradient (the last one, step {self.step}, is "
            f"described in {folder}; odcluster.replay.diverged_batch makes its batch again); train again with a lower "
            f"--lr than {self.schedule.lr(self.step):g}"
        )

    # What people and files are told ------------------------------------------------------------

    def _refuse(self, refused: Iterable[tuple[int, str]]) -> None:
        """Name unreadable images in bad_images.csv; stop when there are too many."""
        new = {i: reason for i, reason in refused if i not in self.refused}
        if not new:
            return
        self.refused.update(new)
        try:
            if self.ranks.is_first:
                self.run_directory.write_refused((i, self.manifest.paths[i], why) for i, why in self.refused.items())
        except OSError as error:
            self.console.warn(f"{self.run_directory.refused_file} could not be written ({error.strerror})")
        first, reason = next(iter(new.items()))
        others = f" and {len(new) - 1} more" if len(new) > 1 else ""
        self.console.warn(
            f"cannot use {printable(self.manifest.paths[first])} ({reason}){others}: left out, see bad_images.csv"
        )
        share, most = len(self.refused) / len(self.manifest), self.config.running.max_refused
        if share > most:
            raise DataError(
                f"{len(self.refused)} of {len(self.manifest)} images cannot be used ({share:.1%}, allowed {most:.1%}): "
                f"see {self.run_directory.refused_file}, repair or remove them, or raise --max-refused"
            )

    def _log(self, epoch: int) -> None:
        now = time.monotonic()
        seconds = now - self.interval_start
        timing = {
            "seconds": seconds,
            "images_per_second": self.images / seconds,
            "waiting": self.waited / seconds,
        }
        means = self.window.means()
        phase, _ = self.schedule.phase_at(self.step - 1)
        line: dict[str, Any] = {
            "step": self.step,
            "epoch": epoch,
            "phase": phase.name,
            "lr": self.schedule.lr(self.step - 1),
        }
        line |= {**means, **self.method.health(), "timing": timing}
        self._write(line)
        self.interval_start, self.images, self.waited = now, 0.0, 0.0
        detail = health.progress_line(line, self.config.epochs or 0, bool(self.config.fine_tuning.frozen))
        self.console.progress(f"training ({phase.name})", self.step, self.schedule.total_steps, detail)
        for kind, sentence in health.worries(line, self.schedule, len(self.manifest), self.config):
            if kind not in self.warned:
                self.warned.add(kind)
                self.console.warn(sentence)

    def _record_sizes(self, epoch: int) -> None:
        """The size of every cluster, for those who look at how they came about; epochs in between are left out."""
        assert self.config.epochs is not None
        first = self.schedule.phase_at(self.step - 1)[1] == self.schedule.first_step(epoch)
        last = self.step == self.schedule.total_steps
        if not first and not last and (epoch + 1) % -(-self.config.epochs // SIZE_RECORDS) != 0:
            return
        buffers = dict(self.module.named_buffers())
        counts = next((buffers[f"{name}counts"] for name in MEMORY_PREFIXES if f"{name}counts" in buffers), None)
        if counts is not None and len(counts) <= MOST_RECORDED and any(sizes := counts.tolist()):
            self._write({"step": self.step, "epoch": epoch, "event": "sizes", "sizes": sizes})

    def _write(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl; a full disk costs the line, not the run."""
        if not self.ranks.is_first:
            return
        try:
            self.metrics.write(line)
        except OSError as error:
            self.console.warn(f"a line of {self.run_directory.metrics_file} could not be written ({error.strerror})")

    def _new_optimizer(self, phase: Phase) -> torch.optim.Optimizer:
        """SGD, with a momentum of its own for the classifier, AdamW or Muon; layer decay slows early stages down."""
        options, scales = self.config.optimiser, dict[str, float]()
        if self.config.fine_tuning.layer_decay != 1:
            found = layer_lr_scales(cast(Backbone, self.method.backbone), self.config.fine_tuning.layer_decay)
            scales = {f"backbone.{name}": scale for name, scale in found.items()}
        groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
        for name, parameter in self.module.named_parameters():
            momentum = options.classifier_momentum if name.startswith("classifier.") else options.sgd_momentum
            matrix = options.algorithm == "muon" and parameter.ndim > 1 and not name.startswith("classifier.")
            groups.setdefault((momentum, scales.get(name, 1.0), matrix), []).append(parameter)
        described = [
            {"params": parameters, "momentum": momentum, "scale": scale, "matrices": matrix}
            for (momentum, scale, matrix), parameters in groups.items()
        ]
        if options.algorithm == "muon":
            half = self.config.running.precision == "bfloat16"
            return Muon(described, phase.lr, phase.weight_decay, torch.bfloat16 if half else torch.float32)
        if options.algorithm == "adamw":
            return torch.optim.AdamW(described, lr=phase.lr, weight_decay=phase.weight_decay)
        return torch.optim.SGD(described, lr=phase.lr, weight_decay=phase.weight_decay)


def printable(name: str) -> str:
    """A file name that cannot disturb a terminal."""
    return "".join(c if c.isprintable() else "?" for c in name)
