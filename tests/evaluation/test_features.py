"""Features on disk are those of a direct forward pass, whatever interrupted the extraction."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from small_features import ALL, Stopper, extract, hashes, small
from tiny_runs import make_images
from torch.nn import functional as F

from odcluster.data.sources import Source, open_source
from odcluster.data.views import evaluation_view, whole_view
from odcluster.errors import DataError, Interrupted, UserError
from odcluster.evaluation import features, store
from odcluster.evaluation.features import layer_outputs, pooling, weights_fingerprint
from odcluster.evaluation.linear import pool_stage
from odcluster.models.backbones import Backbone, create_backbone
from odcluster.models.sobel import Sobel


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(make_images(tmp_path_factory.mktemp("features") / "images", 43))


def direct(backbone: Backbone, images: list[np.ndarray], layer: str) -> np.ndarray:
    """The slow way: one forward pass over all images."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (backbone.mean, backbone.std))
    x = torch.stack([(torch.from_numpy(image).permute(2, 0, 1) / 255 - mean) / std for image in images])
    backbone.eval()
    with torch.no_grad():
        x = Sobel()(x) if backbone.in_channels == 2 else x
        if layer == "features":
            return backbone(x).numpy()
        return pool_stage(backbone.stages(x)[backbone.stage_names.index(layer)]).numpy()


# --- What the numbers are ---------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("in_channels", [2, 3])
def test_rows_are_those_of_a_direct_forward_pass(whole: bool, in_channels: int, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (11, 20, 28, 3), dtype=np.uint8)
    backbone = small(in_channels=in_channels)
    backbone.train()
    found = extract(backbone, open_source(pixels), tmp_path / "store", whole=whole)
    assert backbone.training, "left as it was found"
    view = whole_view if whole else evaluation_view
    for layer in ALL:
        rows = found.rows(layer)
        assert isinstance(rows, np.memmap)
        assert not rows.flags.writeable
        assert rows.dtype == np.float32
        expected = direct(backbone, [view(image, 16) for image in pixels], layer)
        np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5)
    assert found.layers == list(ALL)
    assert found.usable.all()
    assert found.num_bytes == sum(found.rows(layer).nbytes for layer in ALL)


@pytest.mark.parametrize("layers", [("features",), ("conv3",), ("features", "conv2"), ("conv5", "conv1")])
def test_any_choice_of_layers_gives_the_same_rows(layers: tuple[str, ...], source: Source, tmp_path: Path) -> None:
    everything = extract(small(), source, tmp_path / "all")
    some = extract(small(), source, tmp_path / "some", layers=layers)
    assert some.layers == list(layers)
    assert sorted(hashes(tmp_path / "some")) == sorted(f"{layer}.npy" for layer in layers)
    for layer in layers:
        assert np.array_equal(some.rows(layer), everything.rows(layer))


def test_a_choice_of_images_in_any_order(source: Source, tmp_path: Path) -> None:
    ids = np.array([40, 3, 3, 17, 0])
    everything = extract(small(), source, tmp_path / "all", layers=("conv4",), batch_size=1)
    some = extract(small(), source, tmp_path / "some", layers=("conv4",), batch_size=1, ids=ids)
    assert np.array_equal(some.rows("conv4"), everything.rows("conv4")[ids])
    assert np.array_equal(some.ids, ids)


@pytest.mark.parametrize(
    ("name", "dimensions", "published"),
    [
        ("resnet50", (9216, 9216, 8192, 9216, 8192), True),
        ("alexnet", (9600, 9216, 9600, 9600, 9216), True),
        ("resnet18", (9216, 9216, 8192, 9216, 8192), False),
    ],
)
def test_the_papers_pooling_gives_the_papers_dimensions(
    name: str, dimensions: tuple[int, ...], published: bool
) -> None:
    backbone = create_backbone(name).eval()
    pools = pooling(backbone, 224)
    assert list(pools) == backbone.stage_names
    assert all(pool.published == published for pool in pools.values())
    torch.manual_seed(0)
    image = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        rows = layer_outputs(backbone, [*backbone.stage_names, "features"])(image)
        maps = backbone.stages(image)
        assert torch.equal(rows["features"], backbone(image))
    if published:
        assert tuple(rows[stage].shape[1] for stage in backbone.stage_names) == dimensions
    for stage, feature_map in zip(backbone.stage_names, maps, strict=True):
        if not published:
            assert torch.equal(rows[stage], pool_stage(feature_map))
            continue
        kernel, stride, padding = features.PUBLISHED_POOLING[name][stage]
        padded = F.pad(feature_map, [padding] * 4)  # zeros, which count in the mean
        windows = padded.unfold(2, kernel, stride).unfold(3, kernel, stride)  # [1, C, rows, columns, k, k]
        torch.testing.assert_close(rows[stage], windows.mean(dim=(4, 5)).flatten(1))
        assert f"kernel {kernel}, stride {stride}" in pools[stage].description


def test_the_papers_pooling_is_only_for_the_papers_networks() -> None:
    resnet = create_backbone("resnet50", image_size=64, stem="standard")
    for name in ("resnet50", "resnet50.tv_in1k"):
        resnet.name = name
        assert all(pool.published for pool in pooling(resnet, 224).values())
    others = [pooling(resnet, 192), pooling(small(), 224), pooling(create_backbone("alexnet", image_size=64), 64)]
    resnet.name = "resnet50d"
    others.append(pooling(resnet, 224))
    others.append(pooling(create_backbone("resnet50", image_size=32), 224))  # whose stem is the small one
    for pools in others:
        assert not any(pool.published for pool in pools.values())
        assert all("largest square grid" in pool.description for pool in pools.values())


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "mobilenetv3_small_100"])
def test_stages_and_vector_together_are_those_of_each_alone(name: str) -> None:
    backbone = create_backbone(name, image_size=64).eval()
    image = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        both = layer_outputs(backbone, [*backbone.stage_names, "features"])(image)
        assert torch.equal(both["features"], backbone(image))
        for stage, feature_map in zip(backbone.stage_names, backbone.stages(image), strict=True):
            assert torch.equal(both[stage], pool_stage(feature_map))


def test_one_forward_pass_serves_stages_and_vector_of_a_resnet() -> None:
    backbone = create_backbone("resnet18", image_size=64).eval()
    outputs = layer_outputs(backbone, [*backbone.stage_names, "features"])
    passes = []
    backbone.network.conv1.register_forward_hook(lambda *_: passes.append(1))  # type: ignore[union-attr, operator]
    with torch.no_grad():
        outputs(torch.zeros(1, 3, 64, 64))
    assert len(passes) == 1


def test_the_fingerprint_is_of_every_value_and_of_nothing_else() -> None:
    backbone = small()
    before = weights_fingerprint(backbone)
    assert weights_fingerprint(small()) == before
    assert weights_fingerprint(small().half()) != before
    for name, tensor in backbone.state_dict().items():
        kept = tensor.clone()
        tensor.view(-1)[-1:].add_(1)
        assert weights_fingerprint(backbone) != before, name
        tensor.copy_(kept)
    assert weights_fingerprint(backbone) == before


# --- What cannot be done ----------------------------------------------------------------------------


def test_refused_images_are_rows_of_zeros(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "images", 20)
    whole = extract(small(), open_source(folder), tmp_path / "whole", batch_size=4)
    broken = [2, *range(8, 12), 19]  # among them a whole batch
    for number in broken:
        (folder / f"image{number:04d}.png").write_bytes(b"not an image")
    with pytest.raises(Interrupted):
        extract(small(), open_source(folder), tmp_path / "store", batch_size=4, progress=Stopper(2))
    found = extract(small(), open_source(folder), tmp_path / "store", batch_size=4)
    assert np.flatnonzero(~found.usable).tolist() == broken
    assert [path for path, _ in found.refused] == [f"image{number:04d}.png" for number in broken]
    assert all("not an image" in why for _, why in found.refused)
    for layer in ALL:
        assert not found.rows(layer)[broken].any()
        np.testing.assert_allclose(
            found.rows(layer)[found.usable], whole.rows(layer)[found.usable], rtol=1e-4, atol=1e-5
        )
    again = extract(small(), open_source(folder), tmp_path / "store", batch_size=4)
    assert again.refused == found.refused


def test_no_usable_image_is_one_sentence_each_time(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "images", 3)
    for path in folder.iterdir():
        path.write_bytes(b"%PDF")
    for _ in range(2):
        with pytest.raises(DataError, match=r"None of the 3 images .*image0000.png: not an image"):
            extract(small(), open_source(folder), tmp_path / "store")


def test_no_image_or_no_such_layer_is_one_sentence(source: Source, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no image"):
        extract(small(), source, tmp_path / "store", ids=np.array([], np.int64))
    with pytest.raises(UserError, match="no layer res9; choose from conv1, conv2"):
        extract(small(), source, tmp_path / "store", layers=("conv1", "res9"))
    with pytest.raises(UserError, match="choose from"):
        extract(small(), source, tmp_path / "store", layers=())
    assert not (tmp_path / "store").exists()


def test_weights_that_are_not_finite_name_the_layer(source: Source, tmp_path: Path) -> None:
    backbone = small()
    with torch.no_grad():
        backbone.network.layers[2][0].weight[0, 0, 0, 0] = torch.nan  # type: ignore[union-attr, index]
    with pytest.raises(DataError, match=r"layer conv3 are not finite for 8 of 8 images \(the first: image0000.png\)"):
        extract(backbone, source, tmp_path / "store")
    assert extract(backbone, source, tmp_path / "other", layers=("conv1", "conv2")).usable.all()


def test_too_little_space_says_how_many_bytes(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1_500_000

    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: Usage)
    needed = 4 * 43 * sum((32 * 256, 64 * 64, 128 * 16, 192 * 4, 192 * 4, 192))
    with pytest.raises(UserError, match=f"43 images take {needed:,} bytes and 1,500,000 are free"):
        extract(small(), source, tmp_path / "store")
    monkeypatch.undo()
    assert extract(small(), source, tmp_path / "store").usable.all()


def test_a_full_disk_is_one_sentence_and_can_be_resumed(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "SAVE_IMAGES", 8)
    saves = []

    def fsync(descriptor: int) -> None:
        saves.append(descriptor)
        if len(saves) > 30:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DataError, match=r"No space left on device\); correct that and repeat"):
        extract(small(), source, tmp_path / "store")
    monkeypatch.undo()
    stopper = Stopper(1000)
    extract(small(), source, tmp_path / "store", progress=stopper)
    assert ("features", 0, 43) not in stopper.told, "what was saved is used"
    extract(small(), source, tmp_path / "whole")
    assert hashes(tmp_path / "store") == hashes(tmp_path / "whole")


def test_files_of_another_origin_are_not_overwritten(source: Source, tmp_path: Path) -> None:
    (tmp_path / "features.npy").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"features.npy of another origin"):
        extract(small(), source, tmp_path)
    assert (tmp_path / "features.npy").read_bytes() == b"mine"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="choose another folder"):
        extract(small(), source, tmp_path / "file" / "store")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="how much memory the process holds")
def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path) -> None:
    """1,500 images with 15,872 numbers each are 95 MB on disk. VOC's 5,011 with 46,000 each are 920 MB, of which the
    process likewise holds no more than a batch: 32 images, 6 MB."""
    held = []

    def look(activity: str, done: int, total: int) -> None:
        held.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"))

    backbone = small()
    source = open_source(np.zeros((1500, 16, 16, 3), np.uint8))
    stages = backbone.stage_names
    extract(backbone, source, tmp_path / "warm", layers=stages, ids=np.arange(64), batch_size=32)
    found = extract(backbone, source, tmp_path / "all", layers=stages, batch_size=32, progress=look)
    assert found.num_bytes == 1500 * 15872 * 4
    assert len(held) > 40
    assert max(held) - held[0] < 0.3 * found.num_bytes
