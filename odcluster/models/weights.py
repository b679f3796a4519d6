"""Weights in and out: foreign checkpoints into a backbone, and a backbone into files that others can load.

Reading is safe (`checkpoints.py`) and says what it found (`matching.py`). Loading is all or nothing: a file
that does not fit leaves the backbone as it was. Only `timm` and `timm:TAG` use the internet.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from odcluster.errors import DataError, UserError
from odcluster.models import compat
from odcluster.models.backbones import (
    IMAGENET_MEAN,
    OWN_NETWORKS,
    Backbone,
    create_backbone,
    timm_arguments,
    timm_normalisation,
)
from odcluster.models.checkpoints import locate_weights, printable, read_tensors
from odcluster.models.matching import MatchReport, match_tensors

__all__ = [
    "MatchReport",
    "export_backbone",
    "fetch_timm_weights",
    "load_backbone",
    "load_backbone_weights",
    "read_tensors",
]


PLAIN_RESNETS = {"resnet18", "resnet34", "resnet50", "resnet101", "resnet152"}
"""Networks of which a deeper one has every tensor of a shallower one, and more."""


class Checkpoint(NamedTuple):
    """Tensors from outside, and what is known of them."""

    tensors: dict[str, Tensor]
    origin: str
    architecture: str | None
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] | None
    """Mean and std of the images it was trained on."""


def load_backbone_weights(backbone: Backbone, source: str | Path, *, min_matched: float = 0.9) -> MatchReport:
    """Start a backbone from a run, an exported backbone, a .safetensors or .pth file, `timm` or `timm:TAG`.

    Refuses, and changes nothing, when less than `min_matched` of the backbone's tensors are found. Where the
    origin says how its images were normalised, the backbone takes that over.
    """
    checkpoint = _open(backbone, source)
    values, report = match_tensors(backbone, checkpoint.tensors, checkpoint.origin)
    deeper = {checkpoint.architecture, backbone.name.partition(".")[0]} <= PLAIN_RESNETS  # 34 holds all names of 18
    other = deeper and checkpoint.architecture != backbone.name.partition(".")[0]
    if report.matched == 0 or report.matched < min_matched * report.total or (other and min_matched > 0):
        raise DataError(_refusal(backbone, checkpoint, report))
    backbone.network.load_state_dict({**backbone.network.state_dict(), **values})
    if checkpoint.normalisation is not None:
        backbone.set_normalisation(*checkpoint.normalisation)
    elif len(backbone.mean) == 3 and backbone.mean != IMAGENET_MEAN:
        used = f"mean {backbone.mean}, std {backbone.std}"
        report.notes.append(f"images are normalised with {used}; the file does not name its own")
    return report


def _open(backbone: Backbone, source: str | Path) -> Checkpoint:
    if str(source) == "timm" or str(source).startswith("timm:"):
        return fetch_timm_weights(backbone.name, str(source)[5:] or None)
    tensors = read_tensors(source)
    if (settings := describe_weights(source)) is not None:
        return Checkpoint(tensors, str(source), settings["architecture"], (settings["mean"], settings["std"]))
    return Checkpoint(tensors, str(source), guess_architecture(tensors), None)


def _refusal(backbone: Backbone, checkpoint: Checkpoint, report: MatchReport) -> str:
    other = checkpoint.architecture
    if other is not None and other != backbone.name:
        reason = f"they look like {other}, so give --backbone {other}"
    else:
        reason = "they seem to be of another architecture, so give the --backbone they were made with"
    found = f"only {report.matched} of the {report.total} tensors of {backbone.name}"
    return printable(f"The weights {checkpoint.origin} hold {found}; {reason}.")


def guess_architecture(tensors: dict[str, Tensor]) -> str | None:
    """Guess from names and shapes which timm backbone a checkpoint is of, among the common ones."""
    convolution = re.compile(r"\blayer([1-4])\.(\d+)\.conv([123])\.weight$")
    blocks = {match.groups() for key in tensors if (match := convolution.search(key))}
    if blocks:
        depths = [len({block for layer, block, _ in blocks if layer == str(i)}) for i in range(1, 5)]
        plain = {"2-2-2-2": "resnet18", "3-4-6-3": "resnet34"}
        bottleneck = {"3-4-6-3": "resnet50", "3-4-23-3": "resnet101", "3-8-36-3": "resnet152"}
        names = bottleneck if any(number == "3" for _, _, number in blocks) else plain
        return names.get("-".join(map(str, depths)))
    widths = {192: "tiny", 384: "small", 768: "base", 1024: "large"}
    for key, tensor in tensors.items():
        is_patch = re.search(r"\b(?:patch_embed\.proj|patch_embed\.projection|conv_proj)\.weight$", key)
        if is_patch and tensor.ndim == 4 and tensor.shape[0] in widths:
            name = f"vit_{widths[tensor.shape[0]]}_patch{tensor.shape[-1]}"
            return next((n for n in (f"{name}_224", f"{name}_dinov2") if compat.timm.is_model(n)), None)
    return None


def fetch_timm_weights(name: str, tag: str | None) -> Checkpoint:
    """Download timm's weights of a backbone, those of its name's own tag or of its first if none is given."""
    architecture, _, own_tag = name.partition(".")
    known = [] if name in OWN_NETWORKS else compat.timm.list_pretrained(f"{architecture}.*")
    tags = [n.partition(".")[2] for n in known]
    tag = tag or own_tag
    if not known:
        raise UserError(f"timm has no weights for {architecture}; leave --weights out, or name a file.")
    if tag and tag not in tags:
        raise UserError(f"timm has no weights {tag} for {architecture}; it has {', '.join(tags)}.")
    full_name = f"{architecture}.{tag}" if tag else architecture
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a line per attempt says nothing that ours does not
    try:
        network = compat.timm.create_model(full_name, pretrained=True, num_classes=0)
    except Exception as error:  # no connection, no such file, no space, a gate: all end here
        reason = printable((str(error) or type(error).__name__).splitlines()[0][:200])
        raise DataError(
            f"timm's weights {full_name} could not be fetched ({reason}); check the connection, or download "
            "them elsewhere and give the file."
        ) from error
    return Checkpoint(network.state_dict(), f"timm's {full_name}", architecture, timm_normalisation(full_name))


def export_backbone(backbone: Backbone, directory: str | Path, *, provenance: dict[str, Any]) -> None:
    """Write model.safetensors, config.json and README.md, which plain timm or `load_backbone` can load.

    Each file appears whole or not at all. provenance: how the weights came about, in what JSON can hold.
    """
    directory = Path(directory).resolve()
    settings = {
        "format": "odcluster backbone 1",
        "architecture": backbone.name,
        "image_size": backbone.image_size,
        "in_channels": backbone.in_channels,
        "stem": backbone.stem,
        "num_features": backbone.num_features,
        "mean": list(backbone.mean),
        "std": list(backbone.std),
        "provenance": provenance,
    }
    partial = directory.with_name(f".{directory.name}.tmp-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save_file(_plain_tensors(backbone), partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "README.md").write_text(_model_card(backbone, settings), encoding="utf-8")
        (partial / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        directory.mkdir(exist_ok=True)
        for name in ("model.safetensors", "README.md", "config.json"):
            os.replace(partial / name, directory / name)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"The backbone cannot be written to {printable(directory)} ({getattr(error, 'strerror', None) or error}); "
            "make space there or choose another place."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _plain_tensors(backbone: Backbone) -> dict[str, Tensor]:
    plain = {}
    for name, tensor in backbone.network.state_dict().items():
        tensor = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)
        plain[name] = tensor.contiguous().clone()  # tensors that share memory cannot be saved
    return plain


def _model_card(backbone: Backbone, settings: dict[str, Any]) -> str:
    if backbone.name in OWN_NETWORKS or backbone.stem == "small":
        code = 'import odcluster\n\nbackbone = odcluster.load_backbone(".")  # this directory'
    else:
        arguments = timm_arguments(backbone.name, backbone.image_size, backbone.in_channels)
        listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        code = (
            "import timm\nfrom safetensors.torch import load_file\n\n"
            f"backbone = timm.create_model({listed})\n"
            'backbone.load_state_dict(load_file("model.safetensors"))\nbackbone.eval()'
        )
    gradients = ", the two Sobel gradients of a grey image" if backbone.in_channels == 2 else ""
    return f"""# {backbone.name}, trained by odcluster

Turns images into {backbone.num_features} features each.

```python
{code}
```

Input: {backbone.in_channels} channel(s){gradients}, {backbone.image_size} x {backbone.image_size} px;
pixels from 0 to 1, minus {settings["mean"]}, divided by {settings["std"]}.

## How it came about

```json
{json.dumps(settings["provenance"], indent=2)}
```
"""


def load_backbone(source: str | Path) -> Backbone:
    """Return the backbone of a run or of an exported directory, in evaluation mode."""
    description = locate_weights(source).with_name("config.json")
    if not description.is_file():
        raise DataError(
            f"{printable(source)} has no config.json beside its weights, as an exported backbone has; use it "
            "with --backbone and --weights instead."
        )
    settings = _read_description(description)
    backbone = create_backbone(
        settings["architecture"],
        image_size=settings["image_size"],
        in_channels=settings["in_channels"],
        stem="small" if settings["stem"] == "small" else "standard",
    )
    load_backbone_weights(backbone, source, min_matched=1.0)
    return backbone.eval()


def describe_weights(source: str | Path) -> dict[str, Any] | None:
    """What an exported backbone says of itself (architecture, stem, image_size, ...); None for any other file."""
    if str(source) == "timm" or str(source).startswith("timm:"):
        return None
    with contextlib.suppress(DataError):
        return _read_description(locate_weights(source).with_name("config.json"))
    return None


def _read_description(path: Path) -> dict[str, Any]:
    """Read and check the config.json of an exported backbone."""
    kinds = {
        "architecture": str,
        "image_size": int,
        "in_channels": int,
        "stem": str,
        "mean": list,
        "std": list,
    }
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(settings[key], kind) for key, kind in kinds.items()):
            raise TypeError("a value of the wrong kind")
        for key in ("mean", "std"):
            settings[key] = tuple(float(number) for number in settings[key])
            if len(settings[key]) not in (1, 3):
                raise ValueError(f"{key} has {len(settings[key])} entries")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{printable(path)} does not describe a backbone ({printable(error)}); export the backbone again."
        ) from error
    return settings
