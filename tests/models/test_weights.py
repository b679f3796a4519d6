"""Foreign weights: every layout is found, nothing runs, nothing half-loads; exports load elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import re
import resource
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.storage
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from odcluster.errors import DataError, UserError
from odcluster.models import weights
from odcluster.models.backbones import Backbone, create_backbone
from odcluster.models.checkpoints import read_tensors
from odcluster.models.compat import timm, torchvision
from odcluster.models.matching import adapt_input_channels, match_tensors
from odcluster.models.weights import export_backbone, load_backbone, load_backbone_weights

State = dict[str, Tensor]


def donor(name: str = "test_resnet", seed: int = 1, **options: Any) -> nn.Module:
    """A plain timm network with weights and statistics unlike those of a fresh backbone."""
    torch.manual_seed(seed)
    network = timm.create_model(name, num_classes=7, **options)
    with torch.no_grad():
        for tensor in network.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.01, 0.2)
    return network


def fresh(name: str = "test_resnet", **options: Any) -> Backbone:
    return create_backbone(name, **{"image_size": 96, **options})


def prefixed(state: State, prefix: str) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def assert_holds(backbone: Backbone, state: State, except_for: tuple[str, ...] = ()) -> None:
    for name, tensor in backbone.network.state_dict().items():
        if name not in except_for:
            torch.testing.assert_close(tensor, state[name], msg=name)


def fingerprint(module: nn.Module) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in module.state_dict().values())


# Where published codes put a ResNet, and what else their files hold.
LAYOUTS: dict[str, Callable[[State, State], Any]] = {
    "timm, torchvision": lambda s, other: s,
    "timm training": lambda s, other: {"state_dict": other, "state_dict_ema": s, "epoch": 3},
    "DataParallel": lambda s, other: {"model": prefixed(s, "module.")},
    "torch.compile": lambda s, other: prefixed(s, "_orig_mod.module."),
    "MoCo v1, v2": lambda s, other: {
        "arch": "resnet50",
        "optimizer": {"state": {0: {"momentum_buffer": torch.zeros(3)}}, "param_groups": [{"lr": 0.03}]},
        "state_dict": {
            **prefixed(other, "module.encoder_k."),
            **prefixed(s, "module.encoder_q."),
            "module.queue": torch.zeros(128, 16),
        },
    },
    "MoCo v3": lambda s, other: {
        "state_dict": {
            **prefixed(other, "module.momentum_encoder."),
            **prefixed(s, "module.base_encoder."),
        }
    },
    "SimCLR": lambda s, other: {"state_dict": prefixed(s, "backbone."), "args": argparse.Namespace(lr=0.1)},
    "BYOL": lambda s, other: {**prefixed(other, "target_encoder.net."), **prefixed(s, "online_encoder.net.")},
    "BYOL, lightning": lambda s, other: {"state_dict": prefixed(s, "online_network.encoder.")},
    "SwAV": lambda s, other: {**prefixed(s, "module."), "module.prototypes.weight": torch.zeros(9, 8)},
    "DINO": lambda s, other: {
        "student": prefixed(other, "module.backbone."),
        "teacher": {**prefixed(s, "backbone."), "head.mlp.0.weight": torch.zeros(4, 4)},
        "args": argparse.Namespace(arch="resnet50"),
    },
    "OpenSelfSup ODC": lambda s, other: {
        "meta": {"epoch": 440},
        "state_dict": {
            **prefixed(s, "backbone."),
            "neck.fc0.weight": torch.zeros(8, 8),
            "head.fc_cls.weight": torch.zeros(8, 8),
            "memory_bank.feature_bank": torch.zeros(50, 8),
        },
    },
    "VISSL": lambda s, other: {
        "classy_state_dict": {"base_model": {"model": {"trunk": prefixed(s, "_feature_blocks.")}}}
    },
    "without counters": lambda s, other: {k: v for k, v in s.items() if "num_batches" not in k},
    "half precision": lambda s, other: {k: v.half() if v.is_floating_point() else v for k, v in s.items()},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resnet_layouts(layout: str, tmp_path: Path) -> None:
    state, other = donor(seed=1).state_dict(), donor(seed=2).state_dict()
    torch.save(LAYOUTS[layout](state, other), tmp_path / "weights.pth")
    backbone = fresh()
    report = load_backbone_weights(backbone, tmp_path / "weights.pth")
    assert (report.matched, report.missing, report.adapted) == (report.total, [], [])
    for name, tensor in backbone.network.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(tensor, state[name], rtol=1e-3, atol=1e-4, msg=name)
    assert "fc" in report.left_over
    assert f"{report.total} of {report.total} tensors" in report.text()


def test_the_report_says_where_and_what_was_left(tmp_path: Path) -> None:
    state, other = donor(seed=1).state_dict(), donor(seed=2).state_dict()
    torch.save(LAYOUTS["MoCo v1, v2"](state, other), tmp_path / "moco.pth")
    report = load_backbone_weights(fresh(), tmp_path / "moco.pth")
    assert "moco.pth, under state_dict.encoder_q. (also there: state_dict.encoder_k.)" in report.origin
    assert report.left_over["queue"] == report.left_over["optimizer"] == 1
    assert report.left_over["fc"] == 2
    assert report.left_over["encoder_k"] > 50


def test_numbered_children(tmp_path: Path) -> None:
    """nn.Sequential(*resnet.children()), as in the SimCLR and BYOL codes that many people copied."""
    network = donor()
    numbered = nn.Sequential(*list(network.children())[:-1]).state_dict()
    torch.save({"online_network_state_dict": prefixed(numbered, "encoder.")}, tmp_path / "byol.pth")
    backbone = fresh()
    report = load_backbone_weights(backbone, tmp_path / "byol.pth")
    assert report.matched == report.total
    assert_holds(backbone, network.state_dict())


def test_torchvision_resnet_computes_the_same(tmp_path: Path) -> None:
    network = torchvision.models.resnet18(weights=None).eval()
    torch.save(network.state_dict(), tmp_path / "tv.pth")
    backbone = create_backbone("resnet18", image_size=96).eval()
    load_backbone_weights(backbone, tmp_path / "tv.pth")
    network.fc = nn.Identity()
    images = torch.rand(2, 3, 96, 96)
    torch.testing.assert_close(backbone(images), network(images))


def test_torchvision_transformer_computes_the_same(tmp_path: Path) -> None:
    network = torchvision.models.VisionTransformer(64, 16, 12, 3, 192, 768).eval()
    torch.save(network.state_dict(), tmp_path / "tv.pth")
    backbone = create_backbone("vit_tiny_patch16_224", image_size=64).eval()
    report = load_backbone_weights(backbone, tmp_path / "tv.pth")
    assert report.matched == report.total
    network.heads = nn.Identity()
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(backbone(images), network(images), rtol=1e-4, atol=1e-4)


def test_mmselfsup_transformer(tmp_path: Path) -> None:
    state = donor("test_vit", img_size=96).state_dict()
    theirs = {}
    for name, tensor in state.items():
        name = name.replace("patch_embed.proj.", "patch_embed.projection.").replace("norm.", "ln1.")
        name = re.sub(r"norm(\d)\.", r"ln\1.", name).replace("blocks.", "layers.")
        name = name.replace("mlp.fc1.", "ffn.layers.0.0.").replace("mlp.fc2.", "ffn.layers.1.")
        theirs["backbone." + name] = tensor
    torch.save({"state_dict": theirs}, tmp_path / "mae.pth")
    backbone = fresh("test_vit")
    report = load_backbone_weights(backbone, tmp_path / "mae.pth")
    assert report.matched == report.total
    assert_holds(backbone, state)


@pytest.mark.parametrize("chunked", [False, True])
def test_dino_transformer_at_another_size(chunked: bool, tmp_path: Path) -> None:
    """A teacher of 160 px goes into a backbone of 96 px: the 10 x 10 positions become 6 x 6."""
    state = donor("test_vit", img_size=160).state_dict()
    names = {n: re.sub(r"^blocks\.(\d)", r"blocks.0.\1", n) if chunked else n for n in state}
    theirs = {f"backbone.{names[n]}": t for n, t in state.items()}
    theirs["backbone.mask_token"] = torch.zeros(1, 64)
    torch.save({"teacher": theirs}, tmp_path / "dino.pth")
    backbone = fresh("test_vit")
    report = load_backbone_weights(backbone, tmp_path / "dino.pth")
    assert report.matched == report.total
    assert any("10x10 to 6x6" in text for text in report.adapted)
    assert report.left_over["mask_token"] == 1
    assert_holds(backbone, state, except_for=("pos_embed",))
    positions = backbone.network.state_dict()["pos_embed"]
    assert state["pos_embed"].min() - 0.05 < positions.min() < positions.max() < state["pos_embed"].max() + 0.05


def test_dinov2_with_registers(tmp_path: Path) -> None:
    """timm keeps the class token's position inside the class token; Meta's files do not."""
    name = "vit_small_patch14_reg4_dinov2"
    state = donor(name, img_size=56).state_dict()
    position = torch.full((1, 1, 384), 0.5)
    theirs = {re.sub(r"^blocks\.(\d+)", r"blocks.0.\1", n): t for n, t in state.items()}
    theirs["register_tokens"] = theirs.pop("reg_token")
    theirs["cls_token"] = state["cls_token"] - position
    theirs["pos_embed"] = torch.cat([position, state["pos_embed"]], dim=1)
    save_file(theirs, tmp_path / "dinov2.safetensors")
    backbone = create_backbone(name, image_size=56)
    report = load_backbone_weights(backbone, tmp_path / "dinov2.safetensors")
    assert report.matched == report.total
    assert any("cls_token" in text for text in report.adapted)
    assert_holds(backbone, state)


def test_deepcluster_alexnet_with_sobel() -> None:
    source = create_backbone("alexnet", image_size=64, in_channels=2).network.state_dict()
    theirs = {n.replace("features.", "state_dict.features.module."): t for n, t in source.items()}
    theirs = {n if n.startswith("state") else f"state_dict.{n}": t for n, t in theirs.items()}
    theirs |= {"state_dict.top_layer.weight": torch.zeros(10, 4096), "state_dict.sobel.0.weight": torch.zeros(1)}
    values, report = match_tensors(create_backbone("alexnet", image_size=64), theirs, "deepcluster.pth.tar")
    assert report.matched == report.total
    assert report.adapted == ["features.0.weight: from 2 to 3 input channel(s)"]
    assert set(report.left_over) == {"top_layer", "sobel"}
    assert all(torch.equal(values[n], source[n]) for n in source if n != "features.0.weight")


@pytest.mark.parametrize(("theirs", "ours"), [(3, 1), (1, 3), (3, 2), (2, 3)])
def test_other_input_channels_are_adapted_and_said(theirs: int, ours: int, tmp_path: Path) -> None:
    network = donor(in_chans=theirs)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    backbone = fresh(in_channels=ours)
    report = load_backbone_weights(backbone, tmp_path / "weights.pth")
    assert report.adapted == [f"conv1.0.weight: from {theirs} to {ours} input channel(s)"]
    weight = network.state_dict()["conv1.0.weight"]
    grey = torch.rand(1, 1, 8, 8)
    before = nn.functional.conv2d(grey.expand(-1, theirs, -1, -1), weight)
    after = nn.functional.conv2d(grey.expand(-1, ours, -1, -1), adapt_input_channels(weight, ours))
    torch.testing.assert_close(before, after)


def test_the_small_stem_is_left_out_and_said(tmp_path: Path) -> None:
    torch.save(timm.create_model("resnet18").state_dict(), tmp_path / "weights.pth")
    report = load_backbone_weights(create_backbone("resnet18", image_size=32), tmp_path / "weights.pth")
    assert report.total - report.matched == 1
    ((name, why),) = report.missing
    assert name == "conv1.weight"
    assert "64x3x7x7 in the file, 64x3x3x3 here; the small-image stem" in why
    assert why in report.text()


@pytest.mark.parametrize(
    ("other", "guess"),
    [
        ("resnet50", "resnet50"),
        ("vit_tiny_patch16_224", "vit_tiny_patch16_224"),
        ("test_convnext", "another"),
    ],
)
def test_another_architecture_is_refused_and_nothing_changes(other: str, guess: str, tmp_path: Path) -> None:
    torch.save({"state_dict": timm.create_model(other).state_dict()}, tmp_path / "weights.pth")
    backbone = fresh("resnet18")
    before = fingerprint(backbone)
    with pytest.raises(DataError, match=rf"only \d+ of the \d+ tensors of resnet18; they .*{guess}"):
        load_backbone_weights(backbone, tmp_path / "weights.pth")
    assert fingerprint(backbone) == before


def test_how_much_must_match_can_be_told(tmp_path: Path) -> None:
    state = {n: t for n, t in donor().state_dict().items() if not n.startswith("layer4")}
    torch.save(state, tmp_path / "weights.pth")
    backbone = fresh()
    with pytest.raises(DataError, match="only"):
        load_backbone_weights(backbone, tmp_path / "weights.pth")
    report = load_backbone_weights(backbone, tmp_path / "weights.pth", min_matched=0.5)
    assert report.matched < report.total
    assert all(name.startswith("layer4") and why == "not in the file" for name, why in report.missing)
    assert f"and {len(report.missing) - 10} more" in report.text()


def test_nan_weights_are_refused(tmp_path: Path) -> None:
    state = donor().state_dict()
    state["layer1.0.conv1.weight"][0, 0, 0, 0] = float("nan")
    torch.save(state, tmp_path / "weights.pth")
    backbone = fresh()
    before = fingerprint(backbone)
    with pytest.raises(DataError, match=r"NaN .* layer1.0.conv1.weight"):
        load_backbone_weights(backbone, tmp_path / "weights.pth")
    assert fingerprint(backbone) == before


# Nothing that is read executes code.


class Call:
    """Pickles to a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def malicious(kind: str, marker: Path) -> bytes:
    touch = Call(os.system, f"touch '{marker}'")
    python = Call(eval, f"open({str(marker)!r}, 'w').close()")
    buffer = io.BytesIO()
    if kind == "system":
        torch.save({"state_dict": {"a": torch.zeros(1), "b": touch}}, buffer)
    elif kind == "eval":
        torch.save({"a": [python]}, buffer)
    elif kind == "nested":
        inner = io.BytesIO()
        torch.save(touch, inner)
        torch.save({"a": Call(torch.storage._load_from_bytes, inner.getvalue())}, buffer)
    elif kind == "legacy":
        torch.save({"a": touch}, buffer, _use_new_zipfile_serialization=False)
    elif kind == "raw":
        buffer.write(pickle.dumps({"a": touch}))
    elif kind == "raw2":
        buffer.write(pickle.dumps({"a": python}, protocol=2))
    elif kind == "protocol4":
        torch.save({"a": touch}, buffer, pickle_protocol=4)
    return buffer.getvalue()


SYSTEM = f"{os.system.__module__}.system"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("system", SYSTEM),
        ("eval", "eval"),
        ("nested", "torch.storage._load_from_bytes"),
        ("legacy", SYSTEM),
        ("raw", SYSTEM),
        ("raw2", "eval"),
        ("protocol4", SYSTEM),
    ],
)
@pytest.mark.parametrize("file_name", ["weights.pth", "weights.safetensors"])
def test_payloads_do_not_run_and_are_named(kind: str, name: str, file_name: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = tmp_path / file_name
    path.write_bytes(malicious(kind, marker))
    with pytest.raises(DataError) as caught:
        load_backbone_weights(fresh(), path)
    assert name in str(caught.value)
    assert not marker.exists()
    assert os.listdir(tmp_path) == [file_name], "nothing may be written either"


def test_a_whole_module_is_refused_by_name(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "model.pth")
    with pytest.raises(DataError, match=r"torch\.nn\.modules\.linear\.Linear"):
        read_tensors(tmp_path / "model.pth")


def test_no_source_file_reads_unsafely() -> None:
    for path in Path(weights.__file__).parent.glob("*.py"):
        source = path.read_text()
        assert "import pickle" not in source
        assert "weights_only=False" not in source
        assert len(re.findall(r"torch\.load\(", source)) == source.count('map_location="cpu", weights_only=True)')


# Files that are not what they should be: one sentence each.


def safetensors_bytes(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def saved(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def zipped(name: str, content: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


def scripted() -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but such files exist
        torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), buffer)
    return buffer.getvalue()


WHOLE = saved({"a": torch.zeros(1000)})
OLD = saved({"a": torch.zeros(1000)}, _use_new_zipfile_serialization=False)
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "text": (b"hello, these are weights\n", "text file"),
    "umlauts": ("schöne Gewichte".encode(), "text file"),
    "html": (b"\n<!DOCTYPE html>\n<html></html>", "web page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    "gzip": (b"\x1f\x8b\x08\x00\x00\x00", "neither a safetensors nor a PyTorch file"),
    "one byte": (b"\x00", "neither a safetensors nor a PyTorch file"),
    "half a zip": (WHOLE[: len(WHOLE) // 2], "cut short or damaged"),
    "half an old file": (OLD[: len(OLD) // 2], "cut short or damaged"),
    "old header": (OLD[:30], "cut short or damaged"),
    "other zip": (zipped("a.txt", b"hello"), "not PyTorch's"),
    "zip bomb": (zipped("archive/data.pkl", bytes(10**7), zipfile.ZIP_DEFLATED), "compressed"),
    "script": (scripted(), "TorchScript"),
    "no tensors": (saved({"epoch": 3}), "no tensors"),
    "huge view": (saved({"a": torch.zeros(1).expand(10**12)}), "larger than its data"),
    "header too long": (safetensors_bytes({"a": {}}, length=2**40), "cut short or damaged"),
    "header too long, short file": (safetensors_bytes(b"{", length=2**63), "cut short or damaged"),
    "half a safetensors": (safetensors_bytes({"a": entry([4], 0, 16)}, bytes(8)), "cut short or damaged"),
    "overlap": (
        safetensors_bytes({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
        "cut short or damaged",
    ),
    "huge shape": (safetensors_bytes({"a": entry([2**40], 0, 8)}, bytes(8)), "cut short or damaged"),
    "overflow": (safetensors_bytes({"a": entry([2**62, 2**62], 0, 8)}, bytes(8)), "cut short or damaged"),
    "deep header": (safetensors_bytes(b'{"a":' + b"[" * 10**5), "cut short or damaged"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files_are_one_sentence(kind: str, tmp_path: Path) -> None:
    content, expected = BAD_FILES[kind]
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=expected) as caught:
        read_tensors(path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 50_000, "more than 50 MB"


@pytest.mark.parametrize("whole", [WHOLE, OLD])
def test_files_cut_anywhere_never_do_worse(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    for length in range(0, len(whole) - 1, 97):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            read_tensors(path)


def test_bytes_flipped_anywhere_never_do_worse(tmp_path: Path) -> None:
    small = saved({"a": torch.zeros(3)})
    path = tmp_path / "weights.pth"
    for position in range(0, len(small), 11):
        path.write_bytes(small[:position] + bytes([small[position] ^ 0xFF]) + small[position + 1 :])
        with contextlib.suppress(DataError):  # anything else fails the test
            read_tensors(path)


def test_content_decides_not_the_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.pth")
    torch.save({"a": torch.ones(2)}, tmp_path / "b.safetensors")
    torch.save({"a": torch.ones(2)}, tmp_path / "c.ckpt", _use_new_zipfile_serialization=False)
    for name in ("a.pth", "b.safetensors", "c.ckpt"):
        assert torch.equal(read_tensors(tmp_path / name)["a"], torch.ones(2))


def test_nested_content_is_flattened_once(tmp_path: Path) -> None:
    content: dict[Any, Any] = {"state": [{"x": torch.zeros(1)}, (torch.ones(2),)], 3: torch.zeros(3)}
    content["itself"] = content
    torch.save(content, tmp_path / "a.pth")
    assert {n: len(t) for n, t in read_tensors(tmp_path / "a.pth").items()} == {
        "state.0.x": 1,
        "state.1.0": 2,
        "3": 3,
    }


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    state = prefixed(donor().state_dict(), "\x1b[2J\nfake.")
    torch.save({**state, "\x1b[31mred.x": torch.zeros(1)}, tmp_path / "a.pth")
    report = load_backbone_weights(fresh(), tmp_path / "a.pth")
    assert "\x1b" not in report.text()
    assert len(report.text().splitlines()) == 4


def test_missing_and_special_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="do not exist"):
        read_tensors(tmp_path / "nothing.pth")
    with pytest.raises(DataError, match=r"backbone/model\.safetensors"):
        read_tensors(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not an ordinary file"):
        read_tensors(tmp_path / "pipe")


# Backbones in files that others can load.


def run_card(directory: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Execute the README's own snippet, in the directory it speaks of."""
    (code,) = re.findall(r"```python\n(.*?)```", (directory / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(directory)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["backbone"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("test_resnet", {"image_size": 96}),
        ("test_resnet", {"image_size": 96, "in_channels": 1}),
        ("test_resnet", {"image_size": 32}),  # small stem
        ("test_vit", {"image_size": 64}),
        ("test_vit.r160_in1k", {"image_size": 160}),
        ("smallconv", {"image_size": 24, "in_channels": 2}),
    ],
)
def test_exported_backbones_load_as_their_card_says(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = create_backbone(name, **options)
    images = torch.rand(4, backbone.in_channels, backbone.image_size, backbone.image_size)
    backbone(images)  # moves the batch statistics
    export_backbone(backbone, tmp_path / "out", provenance={"method": "odc", "seed": 0})
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == ["README.md", "config.json", "model.safetensors"]
    expected = backbone.eval()(images)
    loaded = load_backbone(tmp_path / "out")
    assert torch.equal(loaded(images), expected)
    for attribute in (
        "name",
        "stem",
        "image_size",
        "in_channels",
        "num_features",
        "mean",
        "std",
        "stage_names",
    ):
        assert getattr(loaded, attribute) == getattr(backbone, attribute)
    assert torch.equal(run_card(tmp_path / "out", monkeypatch)(images), expected)
    text = (tmp_path / "out" / "config.json").read_text() + (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in text, "no path of this machine in what is passed on"


def test_a_run_directory_is_a_starting_point(tmp_path: Path) -> None:
    source = create_backbone("smallconv", image_size=16)
    source.set_normalisation((0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")  # the run's own, not the backbone's
    export_backbone(source, tmp_path / "run" / "backbone", provenance={})
    backbone = create_backbone("smallconv", image_size=24)
    report = load_backbone_weights(backbone, tmp_path / "run")
    assert report.matched == report.total
    assert backbone.mean == (0.1, 0.2, 0.3)
    assert fingerprint(backbone) == fingerprint(load_backbone(tmp_path / "run")) == fingerprint(source)
    with pytest.raises(DataError, match="--backbone smallconv"):
        load_backbone_weights(fresh(), tmp_path / "run")


def test_export_replaces_an_older_one(tmp_path: Path) -> None:
    for seed in (0, 1):
        torch.manual_seed(seed)
        backbone = create_backbone("smallconv", image_size=16)
        export_backbone(backbone, tmp_path / "out", provenance={"seed": seed})
    assert fingerprint(load_backbone(tmp_path / "out")) == fingerprint(backbone)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["provenance"] == {"seed": 1}


def test_export_to_an_impossible_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        export_backbone(create_backbone("smallconv", image_size=16), tmp_path / "file" / "x", provenance={})


@pytest.mark.parametrize(
    "settings",
    ["", "[]", "{}", '{"architecture": 3}', "\x00", '{"architecture": "smallconv", "mean": "abc"}'],
)
def test_a_damaged_description_is_one_sentence(settings: str, tmp_path: Path) -> None:
    export_backbone(create_backbone("smallconv", image_size=16), tmp_path / "out", provenance={})
    (tmp_path / "out" / "config.json").write_text(settings)
    with pytest.raises(DataError, match="does not describe a backbone") as caught:
        load_backbone(tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_description_of_another_network_is_refused(tmp_path: Path) -> None:
    export_backbone(create_backbone("smallconv", image_size=16), tmp_path / "out", provenance={})
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    settings["architecture"] = "test_resnet"
    (tmp_path / "out" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="only"):
        load_backbone(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors"), "untouched"


# timm's own weights: only the parts that need no connection.


def test_timm_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    network = donor("test_resnet")
    asked: list[str] = []

    def create_model(name: str, **options: Any) -> nn.Module:
        asked.append(name)
        return network

    backbone = fresh()
    monkeypatch.setattr(timm, "create_model", create_model)
    for source in ("timm", "timm:r160_in1k"):
        report = load_backbone_weights(backbone, source)
        assert report.matched == report.total
    assert asked == ["test_resnet", "test_resnet.r160_in1k"]
    assert "timm's test_resnet.r160_in1k" in report.origin


def test_timm_weights_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="it has r160_in1k"):
        load_backbone_weights(fresh(), "timm:nonsense")
    with pytest.raises(UserError, match="timm has no weights for smallconv"):
        load_backbone_weights(create_backbone("smallconv", image_size=16), "timm")
    backbone = fresh()

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("Name or service not known\nand more")

    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(DataError, match=r"could not be fetched \(Name or service not known\)"):
        load_backbone_weights(backbone, "timm")


def test_a_deeper_resnet_is_not_taken_for_a_shallower_one(tmp_path: Path) -> None:
    torch.save({"state_dict": timm.create_model("resnet34", num_classes=0).state_dict()}, tmp_path / "deeper.pth")
    with pytest.raises(DataError, match="resnet34"):
        load_backbone_weights(create_backbone("resnet18", image_size=64, stem="standard"), tmp_path / "deeper.pth")
