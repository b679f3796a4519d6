"""The convolution by matrix product against PyTorch's: values to the bit, gradients to rounding."""

import pytest
import torch
from torch import Tensor, nn

from odcluster.models.convolution import Convolution, weight_gradient


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("height", "width"), [(3, 3), (8, 5), (9, 12)])
@pytest.mark.parametrize("channels_last", [True, False])
def test_the_gradient_of_the_weights_is_exact(stride: int, height: int, width: int, channels_last: bool) -> None:
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.randn(4, 16, height, width, dtype=torch.float64).contiguous(memory_format=layout)
    weight = torch.randn(5, 16, 3, 3, dtype=torch.float64, requires_grad=True)
    out = torch.conv2d(images, weight, stride=stride, padding=1)
    gradient = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, weight, gradient)
    torch.testing.assert_close(weight_gradient(images, gradient, stride), expected)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("in_channels", [3, 64])
def test_it_learns_as_a_plain_convolution_in_bfloat16(stride: int, in_channels: int) -> None:
    torch.manual_seed(0)
    own, plain = Convolution(in_channels, 24, stride), nn.Conv2d(in_channels, 24, 3, stride, 1, bias=False)
    plain.load_state_dict(own.state_dict())
    images = torch.randn(8, in_channels, 12, 12).contiguous(memory_format=torch.channels_last)

    def gradients(layer: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        x = images.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        out.float().square().sum().backward()
        assert x.grad is not None
        assert isinstance(layer.weight, nn.Parameter)
        assert layer.weight.grad is not None
        return out.detach(), x.grad, layer.weight.grad

    (out, of_images, of_weight), (expected, *expected_gradients) = gradients(own), gradients(plain)
    assert torch.equal(out, expected)
    assert of_weight.dtype == torch.float32
    for got, wanted in zip((of_images, of_weight), expected_gradients, strict=True):
        assert (got - wanted).norm() < 0.01 * wanted.norm()  # bfloat16 has 8 bits


def test_outside_training_it_is_the_plain_convolution() -> None:
    torch.manual_seed(0)
    layer = Convolution(16, 8, 1)
    images = torch.randn(2, 16, 6, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(images).dtype == torch.bfloat16
    out = layer(images)
    assert out.dtype == torch.float32
    assert torch.equal(out, torch.conv2d(images, layer.weight, padding=1))
    assert list(layer.state_dict()) == ["weight"]
