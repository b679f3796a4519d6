"""Backbones behind one face: ours, the paper's AlexNet, and every network of timm, by name.

A `Backbone` gives one vector per image (`forward`) and the feature maps of its stages (`stages`, for probes).
The inner network keeps its own tensor names under `backbone.network`, so that exported weights load into
plain timm. Weights start random and nothing is downloaded: existing weights are the business of `weights.py`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from odcluster.errors import UserError
from odcluster.models import compat
from odcluster.models.networks import OWN_STAGES, AlexNet, SmallConv

Stem = Literal["standard", "small"]

OWN_NETWORKS: dict[str, type[SmallConv] | type[AlexNet]] = {"smallconv": SmallConv, "alexnet": AlexNet}
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SMALL_IMAGE = 64
"""Up to this side a ResNet's 7x7 convolution of stride 2 and its pooling throw most of the image away."""
MAX_IMAGE = 4096
MAX_CHANNELS = 64

# What torchvision calls differently. Its other names are timm's too, or have no counterpart.
TORCHVISION_NAMES = {
    "efficientnet_v2_s": "tf_efficientnetv2_s",
    "efficientnet_v2_m": "tf_efficientnetv2_m",
    "mnasnet1_0": "mnasnet_100",
    "mobilenet_v2": "mobilenetv2_100",
    "mobilenet_v3_large": "mobilenetv3_large_100",
    "mobilenet_v3_small": "mobilenetv3_small_100",
    "regnet_x_400mf": "regnetx_004",
    "regnet_y_400mf": "regnety_004",
    "swin_b": "swin_base_patch4_window7_224",
    "swin_s": "swin_small_patch4_window7_224",
    "swin_t": "swin_tiny_patch4_window7_224",
    "vit_b_16": "vit_base_patch16_224",
    "vit_b_32": "vit_base_patch32_224",
    "vit_l_16": "vit_large_patch16_224",
}


class Backbone(nn.Module):
    """A network that turns images [B, in_channels, H, W] into features [B, num_features].

    `mean` and `std` normalise pixels in 0..1. They have one entry for 1-channel networks and three otherwise
    (a 2-channel network sees the Sobel gradients of a normalised RGB image). Parameters that need no gradient
    are frozen: modules that hold no others stay in evaluation mode, so that their batch statistics stay too.
    """

    def __init__(
        self,
        name: str,
        network: nn.Module,
        *,
        image_size: int,
        in_channels: int,
        stem: Stem,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        self.name = name
        self.network = network
        self.image_size = image_size
        self.in_channels = in_channels
        self.stem = stem
        self.set_normalisation(mean, std)
        self.num_features, num_stages = self._try_one_image()
        if isinstance(network, SmallConv | AlexNet):
            self.stage_names = list(OWN_STAGES)
        elif is_resnet(network):
            self.stage_names = ["conv1", "res2", "res3", "res4", "res5"]
        else:
            self.stage_names = [f"stage{i + 1}" for i in range(num_stages)]
        assert len(self.stage_names) == num_stages

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def stages(self, x: Tensor) -> list[Tensor]:
        """Return one map [B, C, H, W] per entry of `stage_names`. A transformer's stages are its blocks."""
        network: Any = self.network
        if isinstance(network, SmallConv | AlexNet):
            return network.stages(x)
        if hasattr(network, "forward_intermediates"):
            return network.forward_intermediates(x, intermediates_only=True, output_fmt="NCHW")
        return _maps_of_modules(network, self._stage_modules, x)

    def set_normalisation(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """Take over a mean and std made for one or three channels."""
        single = self.in_channels == 1
        self.mean, self.std = (
            (sum(values) / len(values),) if single else values * 3 if len(values) == 1 else values
            for values in (mean, std)
        )

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        for module in self.network.modules():
            parameters = list(module.parameters())
            if parameters and not any(p.requires_grad for p in parameters):
                module.eval()
        return self

    def blank_image(self, image_size: int | None = None) -> Tensor:
        """Return one all-zero image of the size, device and type that the network takes."""
        side = image_size or self.image_size
        like = next(self.network.parameters())
        return torch.zeros(1, self.in_channels, side, side, device=like.device, dtype=like.dtype)

    @torch.no_grad()
    def _try_one_image(self) -> tuple[int, int]:
        self.eval()
        image = self.blank_image()
        if not (isinstance(self.network, SmallConv | AlexNet) or hasattr(self.network, "forward_intermediates")):
            self._stage_modules = _declared_stages(self.network, image)
        features, maps = self(image), self.stages(image)
        self.train()
        if features.ndim != 2 or any(m.ndim != 4 for m in maps):
            raise ValueError("it does not give one feature vector per image")
        return features.shape[1], len(maps)


def create_backbone(
    name: str,
    *,
    image_size: int = 224,
    in_channels: int = 3,
    stem: Literal["auto", "standard", "small"] = "auto",
) -> Backbone:
    """Build a randomly initialised backbone: `smallconv`, `alexnet` or any timm name, with or without a tag.

    stem: "small" gives a ResNet a 3x3 convolution of stride 1 and no max pooling; "auto" does so up to 64 px.
    """
    if not 1 <= image_size <= MAX_IMAGE or not 1 <= in_channels <= MAX_CHANNELS:
        raise UserError(
            f"A backbone for {image_size} px and {in_channels} channel(s) cannot be built; choose an "
            f"--image-size up to {MAX_IMAGE} and up to {MAX_CHANNELS} channels."
        )
    build = _builder(name, image_size, in_channels)
    try:
        network, mean, std = build()
        if stem == "small" and not is_resnet(network):
            raise UserError(
                f"Only ResNets have a small-image stem, which these weights have; {name} cannot start from them."
            )
        small = is_resnet(network) and (stem == "small" or (stem == "auto" and image_size <= SMALL_IMAGE))
        if small:
            _shrink_stem(network, in_channels)
        return Backbone(
            name,
            network,
            image_size=image_size,
            in_channels=in_channels,
            stem="small" if small else "standard",
            mean=mean,
            std=std,
        )
    except UserError:
        raise
    except Exception as error:  # hundreds of networks, each with its own way to fail on a size it was not made for
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"The backbone {name} cannot take images of {image_size} px with {in_channels} channel(s) "
            f"({reason}); choose another --image-size or another --backbone."
        ) from error


def is_resnet(network: nn.Module) -> bool:
    """Whether it is one of timm's; to ask this of our own networks does not import timm."""
    return not isinstance(network, SmallConv | AlexNet) and isinstance(network, compat.timm.models.ResNet)


def _builder(
    name: str, image_size: int, in_channels: int
) -> Callable[[], tuple[nn.Module, tuple[float, ...], tuple[float, ...]]]:
    """Check the name, and return what builds the network and its mean and std."""
    if name in OWN_NETWORKS:
        return lambda: (OWN_NETWORKS[name](in_channels), IMAGENET_MEAN, IMAGENET_STD)
    architecture, _, tag = name.partition(".")
    if not compat.timm.is_model(architecture):
        raise UserError(_unknown_name(name))
    if tag and name not in compat.timm.list_pretrained(f"{architecture}.*"):
        known = [n.partition(".")[2] for n in compat.timm.list_pretrained(f"{architecture}.*")]
        raise UserError(f"timm's {architecture} has no tag {tag}; it has {', '.join(known) or 'none'}.")
    arguments = timm_arguments(name, image_size, in_channels)
    mean, std = timm_normalisation(name)
    return lambda: (compat.timm.create_model(pretrained=False, **arguments), mean, std)


def timm_arguments(name: str, image_size: int, in_channels: int) -> dict[str, Any]:
    """Return the arguments with which timm.create_model builds exactly this network."""
    arguments: dict[str, Any] = {"model_name": name, "num_classes": 0}
    if in_channels != 3:
        arguments["in_chans"] = in_channels
    settings = compat.timm.get_pretrained_cfg(name)
    if settings is not None and settings.fixed_input_size and settings.input_size[-1] != image_size:
        arguments["img_size"] = image_size  # transformers: their position tables depend on it
    return arguments


def timm_normalisation(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and std with which timm's weights of this name were made."""
    settings = compat.timm.get_pretrained_cfg(name)
    if settings is None:
        return IMAGENET_MEAN, IMAGENET_STD
    return tuple(settings.mean), tuple(settings.std)


def _unknown_name(name: str) -> str:
    if name in TORCHVISION_NAMES:
        return f"{name} is torchvision's name; timm calls this backbone {TORCHVISION_NAMES[name]}: use that."
    known = [*OWN_NETWORKS, *compat.timm.list_models()]
    nearest = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.0)
    return f"There is no backbone named {name}; the nearest names are {', '.join(nearest)}."


def _shrink_stem(network: Any, in_channels: int) -> None:
    """Give a timm ResNet a 3x3 first convolution of stride 1 and take away its max pooling."""
    if isinstance(network.conv1, nn.Conv2d):
        network.conv1 = nn.Conv2d(in_channels, network.conv1.out_channels, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    else:  # a "deep" stem of three 3x3 convolutions: only the first has a stride
        network.conv1[0].stride = (1, 1)
    network.maxpool = nn.Identity()


def _declared_stages(network: Any, image: Tensor) -> list[str]:
    """Names of the modules that timm declares to be the stages; [""], the network itself, for want of any."""
    declared = getattr(network, "feature_info", None) or []
    entries = declared if isinstance(declared, list) else declared.info
    channels = {entry.get("module"): entry["num_chs"] for entry in entries}
    if not channels or not channels.keys() <= {name for name, _ in network.named_modules()}:
        return [""]
    maps = _maps_of_modules(network, list(channels), image)
    fits = [m.ndim == 4 and m.shape[1] == c for m, c in zip(maps, channels.values(), strict=False)]
    return list(channels) if len(fits) == len(channels) and all(fits) else [""]


def _maps_of_modules(network: nn.Module, names: list[str], x: Tensor) -> list[Tensor]:
    outputs: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append(output.clone())  # a later in-place ReLU would overwrite the map itself

    handles = [network.get_submodule(name).register_forward_hook(keep) for name in names]
    try:
        network(x)
    finally:
        for handle in handles:
            handle.remove()
    return [m if m.ndim > 2 else m[:, :, None, None] for m in outputs]


def count_macs(backbone: Backbone, image_size: int | None = None) -> int:
    """Count one image's multiply-adds in convolutions and linear layers (attention products are left out)."""
    total = 0

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        weight = cast(Tensor, module.weight)
        total += output.numel() * weight[0].numel()  # outputs x inputs that each of them sums over

    layers = [m for m in backbone.network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    handles = [layer.register_forward_hook(add) for layer in layers]
    training = backbone.training
    try:
        with torch.no_grad():
            backbone.eval()(backbone.blank_image(image_size))
    finally:
        backbone.train(training)
        for handle in handles:
            handle.remove()
    return total


def stage_of_parameter(backbone: Backbone) -> dict[str, int]:
    """Return, for every name of `backbone.named_parameters()`, the first stage whose map depends on it.

    Parameters that are only used behind the last stage get `len(stage_names)`. Read off the autograd graph of
    one image, hence right for any network, whatever its layers are called.
    """
    names = {id(p): name for name, p in backbone.named_parameters()}
    needed_gradient = {p: p.requires_grad for p in backbone.parameters()}
    training = backbone.training
    backbone.requires_grad_(True).eval()
    try:
        with torch.enable_grad():
            maps = backbone.stages(backbone.blank_image())
    finally:
        for parameter, needed in needed_gradient.items():
            parameter.requires_grad_(needed)
        backbone.train(training)
    stage_of = dict.fromkeys(names.values(), len(maps))
    seen: set[Any] = set()
    for stage, feature_map in enumerate(maps):
        nodes: list[Any] = [feature_map.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable") and id(node.variable) in names:
                stage_of[names[id(node.variable)]] = stage
            nodes.extend(following for following, _ in node.next_functions)
    return stage_of


def check_takes(backbone: Backbone, image_size: int) -> None:
    """Refuse a size of training crops that this backbone cannot take."""
    training = backbone.training
    try:
        with torch.no_grad():
            backbone.eval()(backbone.blank_image(image_size))
    except Exception as error:  # hundreds of networks, each with its own way to fail
        raise UserError(
            f"{backbone.name}, built for {backbone.image_size} px, cannot take training crops of {image_size} px; "
            f"use --crop-size {backbone.image_size}"
        ) from error
    finally:
        backbone.train(training)


def fixed_size_step(name: str) -> int | None:
    """The patch size of a transformer, which is built for one image size; None for networks that take any."""
    settings = None if name in OWN_NETWORKS else compat.timm.get_pretrained_cfg(name)
    if settings is None or not settings.fixed_input_size:
        return None
    patch = re.search(r"patch(\d+)", name)
    return int(patch[1]) if patch else 32


def usual_image_size(name: str) -> int:
    """The side at which timm's weights of that name were trained; 0 where it does not say."""
    settings = None if name in OWN_NETWORKS else compat.timm.get_pretrained_cfg(name)
    return 0 if settings is None else int(settings.input_size[-1])


def freeze_stages(backbone: Backbone, num_stages: int) -> None:
    """Freeze the first `num_stages` stages: no gradient, and evaluation mode even while the rest trains."""
    if num_stages == 0:
        return
    if not 0 <= num_stages <= len(backbone.stage_names):
        raise UserError(
            f"{num_stages} stages cannot be frozen: {backbone.name} has {len(backbone.stage_names)}, "
            f"{backbone.stage_names[0]} to {backbone.stage_names[-1]}."
        )
    stage_of = stage_of_parameter(backbone)
    for name, parameter in backbone.named_parameters():
        if stage_of[name] < num_stages:
            parameter.requires_grad_(False)
    backbone.train(backbone.training)


def layer_lr_scales(backbone: Backbone, decay: float) -> dict[str, float]:
    """Return the factor of each parameter's learning rate: `decay` to the power of the stages behind it."""
    num_stages = len(backbone.stage_names)
    return {name: decay ** (num_stages - stage) for name, stage in stage_of_parameter(backbone).items()}
