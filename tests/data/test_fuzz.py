"""A share of tests/faults/fuzz_images.py, which flips bytes of image files."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from fuzz_images import damaged, formats, fuzz, seed_image

from odcluster.data.images import decode


def test_every_seed_is_a_good_image() -> None:
    assert {decode(seed_image(number)).shape[2] for number in range(len(formats()))} == {3}


def test_a_case_is_a_function_of_its_numbers() -> None:
    assert damaged(3, 7) == damaged(3, 7)
    assert damaged(3, 7) != damaged(3, 9)


def test_flipped_bytes_give_pixels_or_refusals_and_nothing_else() -> None:
    outcomes = fuzz(len(formats()), 60)
    assert set(outcomes) == {"pixels", "refused", "most MB"}
    assert outcomes["pixels"] + outcomes["refused"] == 60 * len(formats())
    assert min(outcomes["pixels"], outcomes["refused"]) > 100
