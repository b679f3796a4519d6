"""The backbone of a run for other programs: plain timm, or any runtime that reads ONNX. Both are checked before they
are handed over: what was written is loaded again and must give the features that the backbone gives.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from odcluster.errors import DataError, UserError
from odcluster.explore.export import replacing
from odcluster.explore.folders import new_folder
from odcluster.models import compat
from odcluster.models.backbones import OWN_NETWORKS, Backbone, timm_arguments
from odcluster.models.sobel import represent
from odcluster.models.weights import describe_weights, export_backbone, load_backbone

TOLERANCE = 1e-3
"""Largest difference of a feature, as a share of the largest feature, that another program's rounding may cause."""


def backbone_of(run: Path) -> Backbone:
    """The exported backbone of a finished run, or of a folder that holds one."""
    if (run / "config.json").is_file() and (run / "manifest.csv").is_file() and not (run / "backbone").is_dir():
        raise DataError(f"{run} is not finished and has no backbone/ yet; `odcluster resume {run}` goes on with it")
    return load_backbone(run)


# --- timm -------------------------------------------------------------------------------------------


def export_timm(run: Path, out: Path, *, replace: bool = False) -> list[str]:
    """model.safetensors under timm's own names, and a README.md whose snippet loads it."""
    backbone = backbone_of(run)
    if backbone.name in OWN_NETWORKS:
        raise UserError(
            f"{backbone.name} is not one of timm's networks; load it with `odcluster.load_backbone({str(run)!r})`, or "
            "use --to onnx"
        )
    described = describe_weights(run) or {}
    with new_folder(out, replace=replace) as folder:
        export_backbone(backbone, folder, provenance=described.get("provenance") or {})
        (folder / "README.md").write_text(timm_card(backbone), encoding="utf-8")
        difference = largest_difference(backbone, timm_network(backbone, folder / "model.safetensors"))
        if difference > 0:
            raise DataError(
                f"timm {compat.timm.__version__} loads other weights than were written; this is a bug, report it"
            )
    return [f"{backbone.name} for timm: {out}", f"README.md there has the lines that load it: {out / 'README.md'}"]


def timm_network(backbone: Backbone, weights: Path) -> nn.Module:
    """What the snippet of the README makes."""
    network: Any = compat.timm.create_model(
        pretrained=False, **timm_arguments(backbone.name, backbone.image_size, backbone.in_channels)
    )
    if backbone.stem == "small":
        if isinstance(network.conv1, nn.Conv2d):
            network.conv1 = nn.Conv2d(backbone.in_channels, network.conv1.out_channels, 3, padding=1, bias=False)
        else:
            network.conv1[0].stride = (1, 1)
        network.maxpool = nn.Identity()
    network.load_state_dict(load_file(weights))
    return network.eval()


def timm_card(backbone: Backbone) -> str:
    arguments = timm_arguments(backbone.name, backbone.image_size, backbone.in_channels)
    listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    lines = ["import timm", "import torch", "from safetensors.torch import load_file", ""]
    lines.append(f"backbone = timm.create_model({listed})")
    if backbone.stem == "small":
        conv: Any = backbone.network.conv1
        if isinstance(conv, nn.Conv2d):
            made = f"torch.nn.Conv2d({backbone.in_channels}, {conv.out_channels}, 3, padding=1, bias=False)"
            lines.append(f"backbone.conv1 = {made}  # the stem for small images")
        else:
            lines.append("backbone.conv1[0].stride = (1, 1)  # the stem for small images")
        lines.append("backbone.maxpool = torch.nn.Identity()")
    lines += ['backbone.load_state_dict(load_file("model.safetensors"))', "backbone.eval()"]
    code = "\n".join(lines)
    size, channels = backbone.image_size, backbone.in_channels
    return f"""# {backbone.name}, trained without labels by odcluster

{backbone.num_features} features of an image of {size} x {size} px:

```python
{code}
features = backbone(torch.zeros(1, {channels}, {size}, {size}))  # [1, {backbone.num_features}]
```

{describe_input(backbone)}
config.json says the same to programs, and how the weights came about. `odcluster embed` and `odcluster train --weights`
take this folder too.
"""


def describe_input(backbone: Backbone) -> str:
    mean, std = list(backbone.mean), list(backbone.std)
    text = f"Input: RGB, pixels from 0 to 1, minus {mean}, divided by {std}."
    if backbone.in_channels == 2:
        text += " Of that, the two Sobel gradients of the mean of the channels (`odcluster.models.sobel.Sobel`)."
    return text


# --- ONNX -------------------------------------------------------------------------------------------


class FromPixels(nn.Module):
    """RGB images with pixels from 0 to 1 to features: normalisation, and the Sobel filter of a run that has one, are
    part of the graph.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(backbone.mean)[:, None, None])
        self.register_buffer("std", torch.tensor(backbone.std)[:, None, None])
        features = represent(backbone)
        assert isinstance(features, nn.Module)
        self.features = features

    def forward(self, images: Tensor) -> Tensor:
        return self.features((images - self.mean) / self.std)


def export_onnx(run: Path, out: Path) -> list[str]:
    """One .onnx file for batches of any size, compared with torch before it is put in place."""
    runtime = import_onnx()
    if out.suffix.lower() != ".onnx":
        raise UserError(f"{out} does not end in .onnx; give --out such a name")
    backbone = backbone_of(run)
    model = FromPixels(backbone).eval()
    size = backbone.image_size
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as partial:
        with quiet():
            program = torch.onnx.export(
                model,
                (torch.rand(2, 3, size, size),),
                dynamo=True,
                input_names=["images"],
                output_names=["features"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                external_data=False,
                verbose=False,
            )
            assert program is not None
            for node in program.model.graph.all_nodes():  # where on this machine the code lies is nobody's business
                node.metadata_props.clear()
            program.save(os.fspath(partial), external_data=False)
        session = runtime.InferenceSession(os.fspath(partial), providers=["CPUExecutionProvider"])
        difference, largest = compare(model, session, size)
        if not difference <= TOLERANCE * largest:
            raise DataError(
                f"onnxruntime's features differ from torch's by {difference:.2g} (the largest is {largest:.2g}), so "
                "nothing was written; report this with the name of the backbone"
            )
    return [
        f"{backbone.name}: {out}",
        f"input `images` [batch, 3, {size}, {size}]: RGB, pixels from 0 to 1; normalisation is in the graph",
        f"output `features` [batch, {backbone.num_features}]: differs from torch by at most {difference:.1e}",
    ]


@torch.no_grad()
def compare(model: nn.Module, session: Any, size: int) -> tuple[float, float]:
    """Largest difference between the two, and largest feature, over batches of 1, 2 and 5 random images."""
    difference, largest = 0.0, 0.0
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 2, 5):
        images = torch.rand(batch, 3, size, size, generator=generator)
        expected = model(images).numpy()
        (found,) = session.run(None, {"images": images.numpy()})
        difference = max(difference, float(np.abs(found - expected).max()))
        largest = max(largest, float(np.abs(expected).max()))
    return difference, largest


def import_onnx() -> Any:
    """onnxruntime; the exporter's own needs are checked with it.

    It would tell its makers about its use (1.31: an id in ~/.cache, events over HTTPS); it is told not to.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--to onnx needs onnx, onnxscript and onnxruntime, with which the file is checked ({error}): "
            "`pip install 'odcluster[onnx]'`"
        ) from error
    return onnxruntime


@contextlib.contextmanager
def quiet() -> Any:
    """The exporter talks a lot; what matters is compared afterwards."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@torch.no_grad()
def largest_difference(one: nn.Module, other: nn.Module) -> float:
    assert isinstance(one, Backbone)
    image = torch.rand(one.blank_image().shape, generator=torch.Generator().manual_seed(0))
    return float((one(image) - other(image)).abs().max())
