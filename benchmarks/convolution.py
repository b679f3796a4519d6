"""Forward and backward pass of `smallconv` in bfloat16: weight gradients by one matrix product, beside PyTorch's own.

    python benchmarks/convolution.py --json convolution.json

256 views of 24 px, as a step of the default recipe on 32 px images has. The two take turns; medians are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import report
import torch
from torch import Tensor

from odcluster.models import convolution
from odcluster.models.backbones import Backbone, create_backbone
from odcluster.training.devices import has_bfloat16

NEVER = 1 << 30


def seconds(backbone: Backbone, images: Tensor, fewest_channels: int, passes: int) -> float:
    """Of one pass forward and back."""
    convolution.FEWEST_CHANNELS = fewest_channels
    began = time.perf_counter()
    for _ in range(passes):
        with torch.autocast("cpu", torch.bfloat16):
            features = backbone(images)
        features.float().square().mean().backward()
    return (time.perf_counter() - began) / passes


def compare(threads: int, rounds: int, passes: int) -> report.Row:
    torch.set_num_threads(threads)
    backbone = create_backbone("smallconv", image_size=32).to(memory_format=torch.channels_last)
    images = torch.randn(256, 3, 24, 24).contiguous(memory_format=torch.channels_last)
    contenders = {"ours": convolution.FEWEST_CHANNELS, "torch": NEVER}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):  # the first ones warm up
        for name, fewest in contenders.items():
            times[name].append(1000 * seconds(backbone, images, fewest, passes))
    convolution.FEWEST_CHANNELS = contenders["ours"]
    ours, torchs = (statistics.median(times[name][1:]) for name in contenders)
    what = f"smallconv forward and back, 256 views of 24 px, bfloat16, {threads} thread{'s' * (threads > 1)}"
    return report.Row(what, ours, torchs, "ms", ours / torchs, "", None, "the alternative is PyTorch's convolution")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rounds, all_threads = 2 if given.quick else given.rounds, torch.get_num_threads()
    if has_bfloat16(torch.device("cpu")):
        rows = [compare(threads, rounds, passes=10) for threads in sorted({1, all_threads})]
    else:
        rows = [report.not_run("smallconv forward and back, bfloat16", "this CPU does not compute bfloat16")]
    report.show(rows)
    if given.json:
        report.write(given.json, "convolution", rows)


if __name__ == "__main__":
    main()
