"""Weight gradients by shares of the batch: torch's own, up to rounding, and always the same bits."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from odcluster.models import convolutions
from odcluster.models.backbones import create_backbone
from odcluster.models.convolutions import SharedConv2d, share_weight_gradients


@pytest.fixture(params=[2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def gradients(layer: nn.Module, x: Tensor, dtype: torch.dtype | None = torch.bfloat16) -> dict[str, Tensor]:
    """Of the images and of every parameter, under autocast or (None) in float64."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        out = layer(x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    (out * weights).sum().backward()
    assert x.grad is not None
    return {"images": x.grad} | {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(6, 8, 3, padding=1),
        nn.Conv2d(6, 8, 3, stride=2, padding=(1, 0), bias=False),
        nn.Conv2d(6, 12, 3, padding=2, dilation=2),
        nn.Conv2d(6, 8, (1, 5), bias=False),
    ],
    ids=["plain", "strided", "dilated", "not square"],
)
@pytest.mark.parametrize("batch", [1, 5, 8])
def test_gradients_are_those_of_torch(layer, batch, threads):
    torch.manual_seed(batch)
    x, shared = torch.randn(batch, 6, 9, 9), copy.deepcopy(layer)
    share_weight_gradients(shared)
    assert type(shared) is SharedConv2d
    exact = gradients(copy.deepcopy(layer).double(), x.double(), dtype=None)
    usual, ours = gradients(layer, x), gradients(shared, x)
    assert exact.keys() == usual.keys() == ours.keys()
    for name, value in exact.items():
        scale = value.abs().max()
        ours_off, usual_off = ((found[name] - value).abs().max() / scale for found in (ours, usual))
        assert ours_off <= max(1.5 * float(usual_off), 0.01), name
        assert ours[name].dtype == torch.float32
    again = gradients(shared, x)
    assert all(torch.equal(again[name], ours[name]) for name in ours)


def test_the_output_is_that_of_torch(threads):
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(4, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        usual = layer(x)
        share_weight_gradients(layer)
        assert torch.equal(layer(x), usual)
    assert torch.equal(layer(x), nn.functional.conv2d(x, layer.weight, layer.bias)), "float32 is left alone"


def test_frozen_weights_and_images_get_no_gradient(threads):
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(4, 3, 8, 8)
    share_weight_gradients(layer)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).float().sum().backward()
        assert layer.weight.grad is not None
        layer.requires_grad_(False)
        assert not layer(x).requires_grad


def test_other_convolutions_are_left_alone():
    others = nn.Sequential(
        nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(3, 3, 3, padding="same"),
        nn.Conv1d(3, 3, 3),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.Conv2d(6, 6, 1),
        nn.Conv2d(256, 256, 3),
    )
    share_weight_gradients(others)
    assert not any(isinstance(layer, SharedConv2d) for layer in others)


def test_a_network_keeps_its_names_and_learns_the_same(threads):
    torch.manual_seed(0)
    plain = create_backbone("smallconv", image_size=16)
    shared = copy.deepcopy(plain)
    share_weight_gradients(shared)
    assert list(plain.state_dict()) == list(shared.state_dict())
    x = torch.randn(16, 3, 16, 16)
    usual, ours = gradients(plain, x), gradients(shared, x)
    for name in usual:
        assert torch.nn.functional.cosine_similarity(usual[name].flatten(), ours[name].flatten(), dim=0) > 0.99, name


def test_the_number_of_threads_stays(threads):
    layer = nn.Conv2d(3, 4, 3)
    share_weight_gradients(layer)
    gradients(layer, torch.randn(8, 3, 8, 8))
    assert torch.get_num_threads() == threads
    assert convolutions._crew(threads).submit(torch.get_num_threads).result() == 1, "each of them computes alone"


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_a_forked_child_has_threads_of_its_own():
    convolutions._crew(2).submit(int).result()
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    child = fork.Process(target=_threads_in_a_child, args=(queue,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == 7


def _threads_in_a_child(queue: multiprocessing.SimpleQueue) -> None:
    queue.put(convolutions._crew(2).submit(lambda: 7).result(timeout=30))
