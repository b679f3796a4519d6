"""Which tensor of a foreign checkpoint is which tensor of a backbone.

Checkpoints keep the backbone somewhere inside (`state_dict.module.encoder_q.`, `teacher.backbone.`, ...) and
some spell its layers in their own way. No list of methods is needed: every spelling is tried, every prefix
under which names and shapes agree is counted, and the one with most tensors wins. Nothing here changes the
backbone.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from odcluster.errors import DataError
from odcluster.models import compat
from odcluster.models.backbones import Backbone
from odcluster.models.checkpoints import printable

# Components that wrappers (DataParallel, torch.compile, FSDP) put into names.
WRAPPERS = re.compile(r"(?<![^.])(?:module|_orig_mod|_fsdp_wrapped_module)\.")

# Other spellings of timm's names, as substitutions that are applied one after the other.
SPELLINGS: dict[str, list[tuple[str, str]]] = {
    "timm": [],
    "DINOv2": [
        (r"\bblocks\.\d+\.(\d+)\.", r"blocks.\1."),  # blocks in chunks
        (r"\bregister_tokens$", "reg_token"),
        (r"\bmlp\.w12\.", "mlp.fc1."),
        (r"\bmlp\.w3\.", "mlp.fc2."),
    ],
    "MMSelfSup transformer": [
        (r"\bpatch_embed\.projection\.", "patch_embed.proj."),
        (r"\blayers\.(\d+)\.ln(\d)\.", r"blocks.\1.norm\2."),
        (r"\blayers\.(\d+)\.ffn\.layers\.0\.0\.", r"blocks.\1.mlp.fc1."),
        (r"\blayers\.(\d+)\.ffn\.layers\.1\.", r"blocks.\1.mlp.fc2."),
        (r"\blayers\.(\d+)\.attn\.", r"blocks.\1.attn."),
        (r"\bln1\.", "norm."),
    ],
    "torchvision transformer": [
        (r"\bclass_token$", "cls_token"),
        (r"\bconv_proj\.", "patch_embed.proj."),
        (r"\bencoder\.pos_embedding$", "pos_embed"),
        (r"\bencoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
        (r"\bln_(\d)\.", r"norm\1."),
        (r"\bself_attention\.in_proj_", "attn.qkv."),
        (r"\bself_attention\.out_proj\.", "attn.proj."),
        (r"\bmlp\.(?:0|linear_1)\.", "mlp.fc1."),
        (r"\bmlp\.(?:3|linear_2)\.", "mlp.fc2."),
        (r"\bencoder\.ln\.", "norm."),
    ],
}

# Where a file holds a network twice, the one that its method evaluates.
PREFERRED = {"teacher", "ema", "online", "q"}
AVOIDED = {"student", "target", "momentum", "k", "key"}


@dataclass(frozen=True, kw_only=True)
class MatchReport:
    """What became of every tensor, of the backbone's and of the file's. Batch counters are not counted."""

    origin: str
    """The file, and where in it the backbone was found."""
    matched: int
    total: int
    """Number of tensors of the backbone."""
    missing: list[tuple[str, str]]
    """Tensors that stay as they were, each with the reason."""
    left_over: dict[str, int]
    """Number of the file's tensors that were not used, by part (head, queue, optimizer)."""
    adapted: list[str]
    """Tensors that were changed to fit, each with how."""
    notes: list[str] = field(default_factory=list)
    """Anything else worth knowing."""

    def text(self, limit: int = 10) -> str:
        """Return the report as lines for people; long lists end with "and n more"."""
        rows = [("weights", self.origin), ("matched", f"{self.matched} of {self.total} tensors")]
        rows += [("adapted", text) for text in self.adapted] + [("note", text) for text in self.notes]
        rows += [("not matched", f"{name}: {why}") for name, why in self.missing[:limit]]
        if len(self.missing) > limit:
            rows.append(("", f"and {len(self.missing) - limit} more"))
        if self.left_over:
            parts = sorted(self.left_over.items(), key=lambda item: -item[1])
            text = ", ".join(f"{name} ({count})" for name, count in parts[:limit])
            rows.append(("left over", text + (", ..." if len(parts) > limit else "")))
        return "\n".join(f"{label:<12} {printable(text)}" for label, text in rows)


class Place(NamedTuple):
    """One way to read a checkpoint: how its names are spelled, and the prefix the backbone lies under."""

    spelling: str
    prefix: str

    def __str__(self) -> str:
        where = f"under {self.prefix}" if self.prefix else "at the top"
        return where if self.spelling == "timm" else f"{where} in the spelling of {self.spelling}"


class Matched(NamedTuple):
    """New values for the backbone's tensors, and the report."""

    values: dict[str, Tensor]
    report: MatchReport


def match_tensors(backbone: Backbone, tensors: dict[str, Tensor], origin: str) -> Matched:
    """Find the backbone inside a checkpoint's tensors and fit each of them to the backbone's shapes."""
    wanted: dict[str, Tensor] = backbone.network.state_dict()
    foreign = {spelling: _respell(tensors, rules) for spelling, rules in SPELLINGS.items()}
    names = {spelling: {name: name for name in wanted} for spelling in SPELLINGS}
    # nn.Sequential(*network.children()), as in SimCLR's and BYOL's common codes: numbers instead of names
    foreign["nn.Sequential"], names["nn.Sequential"] = foreign["timm"], _numbered(backbone, wanted)

    votes: Counter[Place] = Counter()
    for spelling, keys in foreign.items():
        votes.update(_vote(backbone, spelling, names[spelling], keys, tensors, wanted))
    places = sorted(votes, key=lambda place: (-votes[place], *_reluctance(place)))
    place = places[0] if places else Place("timm", "")
    equals = [p.prefix for p in places[1:4] if votes[p] == votes[place] and p.spelling == place.spelling]
    also = f" (also there: {', '.join(equals)})" if equals else ""

    found: dict[str, str] = {}  # name in the backbone -> name in the file
    for alias, name in names[place.spelling].items():
        if place.prefix + alias in foreign[place.spelling]:
            found[name] = foreign[place.spelling][place.prefix + alias]
    values, missing, adapted = _fit(backbone, {name: tensors[key] for name, key in found.items()}, wanted)
    used = {found[name] for name in values}
    report = MatchReport(
        origin=f"{origin}, {place}{also}",
        matched=sum(_counts(name) for name in values),
        total=sum(_counts(name) for name in wanted),
        missing=missing,
        left_over=dict(Counter(_part(key, place.prefix) for key in tensors if key not in used and _counts(key))),
        adapted=adapted,
    )
    return Matched(values, report)


def _counts(name: str) -> bool:
    return not name.endswith("num_batches_tracked")  # old files lack them and nothing depends on them


def _respell(tensors: dict[str, Tensor], rules: list[tuple[str, str]]) -> dict[str, str]:
    """Map timm's spelling of every name to the name in the file."""
    respelled: dict[str, str] = {}
    for key in tensors:
        name = WRAPPERS.sub("", key)
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        respelled.setdefault(name, key)
    return respelled


def _numbered(backbone: Backbone, wanted: dict[str, Tensor]) -> dict[str, str]:
    """Map names whose first component is the position of the child module to the real names."""
    position = {name: str(i) for i, (name, _) in enumerate(backbone.network.named_children())}
    numbered = {}
    for name in wanted:
        child, _, rest = name.partition(".")
        if child in position:
            numbered[f"{position[child]}.{rest}"] = name
    return numbered


def _vote(
    backbone: Backbone,
    spelling: str,
    names: dict[str, str],
    keys: dict[str, str],
    tensors: dict[str, Tensor],
    wanted: dict[str, Tensor],
) -> Counter[Place]:
    """Count, for every prefix, the tensors under it with a name of the backbone's and a shape that fits."""
    votes: Counter[Place] = Counter()
    for key, original in keys.items():
        if not _counts(key):
            continue
        start = 0
        while start >= 0:
            name = names.get(key[start:])
            if name is not None and _fits(backbone, name, tensors[original], wanted):
                votes[Place(spelling, key[:start])] += 1
            start = key.find(".", start) + 1 or -1
    return votes


def _reluctance(place: Place) -> tuple[Any, ...]:
    words = set(re.split(r"[._]", place.prefix))
    taste = bool(words & AVOIDED) - bool(words & PREFERRED)
    return place.spelling != "timm", taste, len(place.prefix), place


def _part(key: str, prefix: str) -> str:
    """Name the part of the file that a tensor belongs to: its first component that is not the prefix's."""
    components, shared = WRAPPERS.sub("", key).split("."), prefix.split(".")[:-1]
    depth = 0
    while depth < min(len(shared), len(components) - 1) and components[depth] == shared[depth]:
        depth += 1
    return components[depth]


def _first_convolution(wanted: dict[str, Tensor]) -> str | None:
    return next((name for name, tensor in wanted.items() if tensor.ndim == 4), None)


def _fits(backbone: Backbone, name: str, tensor: Tensor, wanted: dict[str, Tensor]) -> bool:
    here, there = wanted[name].shape, tensor.shape
    if here == there:
        return tensor.is_floating_point() == wanted[name].is_floating_point()
    if not tensor.is_floating_point() or 0 in there:
        return False
    if name == _first_convolution(wanted):
        return len(there) == 4 and here[0] == there[0] and here[2:] == there[2:]
    return name == "pos_embed" and _position_grid(backbone, here, there) is not None


def _fit(
    backbone: Backbone, found: dict[str, Tensor], wanted: dict[str, Tensor]
) -> tuple[dict[str, Tensor], list[tuple[str, str]], list[str]]:
    """Return the values that fit, the names that have none with the reason, and what was adapted."""
    values: dict[str, Tensor] = {}
    missing: list[tuple[str, str]] = []
    adapted: list[str] = []
    for name, own in wanted.items():
        tensor = found.get(name)
        if tensor is None:
            if _counts(name):
                missing.append((name, "not in the file"))
        elif not _fits(backbone, name, tensor, wanted):
            stem = "; the small-image stem has its own" if backbone.stem == "small" and own.ndim == 4 else ""
            theirs, ours = (tensor.shape, own.shape) if tensor.shape != own.shape else (tensor.dtype, own.dtype)
            missing.append((name, f"{_brief(theirs)} in the file, {_brief(ours)} here{stem}"))
        else:
            values[name] = tensor
    for name in [n for n in values if values[n].shape != wanted[n].shape]:
        if name == "pos_embed":
            adapted += _adapt_positions(backbone, values, wanted)
        else:
            values[name] = adapt_input_channels(values[name], wanted[name].shape[1])
            adapted.append(f"{name}: from {found[name].shape[1]} to {wanted[name].shape[1]} input channel(s)")
    for name, tensor in values.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise DataError(f"The weights hold NaN or infinite numbers in {name}; take an earlier checkpoint.")
        values[name] = tensor.to(wanted[name].dtype)
    return values, missing, adapted


def _brief(what: torch.Size | torch.dtype) -> str:
    return str(what) if isinstance(what, torch.dtype) else "x".join(map(str, what)) or "one number"


def adapt_input_channels(weight: Tensor, in_channels: int) -> Tensor:
    """Spread a convolution's weights [O, I, h, w] evenly over another number of input channels.

    The sum over the channels stays, hence so does the response to an image that is equal in all of them.
    """
    return (weight.float().sum(dim=1, keepdim=True) / in_channels).expand(-1, in_channels, -1, -1)


def _position_grid(backbone: Backbone, here: torch.Size, there: torch.Size) -> tuple[int, int] | None:
    """Return how many tokens precede the grid in the position tables (ours, theirs), None if hopeless."""
    network: Any = backbone.network
    grid = getattr(getattr(network, "patch_embed", None), "grid_size", None)
    if grid is None or len(here) != 3 or len(there) != 3 or here[0] != there[0] or here[2] != there[2]:
        return None
    own = here[1] - grid[0] * grid[1]
    for count in (own, 0, 1, 2):  # none, class token, class and distillation token
        if there[1] > count and math.isqrt(there[1] - count) ** 2 == there[1] - count:
            return (own, count) if count == own or own == 0 else None
    return None


def _adapt_positions(backbone: Backbone, values: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Resample `pos_embed` to the backbone's grid, in place in `values`; return what was done."""
    table = values["pos_embed"].float()
    counts = _position_grid(backbone, wanted["pos_embed"].shape, table.shape)
    assert counts is not None
    own, count = counts
    notes = []
    if own == 0 and count > 0:  # DINOv2 with registers: timm has no position for the class token, but adds it
        if "cls_token" in values:
            values["cls_token"] = values["cls_token"].float() + table[:, :1]
            notes.append("cls_token: its position was added to it")
        table = table[:, count:]
    side = math.isqrt(table.shape[1] - own)
    network: Any = backbone.network
    grid = list(network.patch_embed.grid_size)
    if [side, side] != grid:
        table = compat.timm.layers.resample_abs_pos_embed(table, grid, num_prefix_tokens=own)
        notes.append(f"pos_embed: resampled from {side}x{side} to {grid[0]}x{grid[1]} positions (bicubic)")
    values["pos_embed"] = table
    return notes
