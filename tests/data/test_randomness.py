"""Draws are Philox4x32-10, uniform, and functions of their arguments alone."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from odcluster.data.randomness import Purpose, integers, permutation, philox, uniforms

# Random123's kat_vectors, philox4x32 10: counter, key, result.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def distance_to_uniform(draws: NDArray[np.float64]) -> float:
    """Kolmogorov-Smirnov distance in units where uniform draws exceed 1.95 with probability 0.001."""
    draws = np.sort(draws.ravel())
    steps = np.arange(len(draws) + 1) / len(draws)
    largest = max(np.max(steps[1:] - draws), np.max(draws - steps[:-1]))
    return float(largest * np.sqrt(len(draws)))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox(np.array(counter, np.uint32), key).tolist() == list(expected)


def test_philox_is_vectorised_over_counters() -> None:
    counters = np.arange(24, dtype=np.uint32).reshape(2, 3, 4)
    together = philox(counters, (1, 2))
    assert together.dtype == np.uint32
    for index in np.ndindex(2, 3):
        np.testing.assert_array_equal(together[index], philox(counters[index], (1, 2)))


def test_uniforms_come_from_the_documented_words() -> None:
    seed, epoch, sample, view = 0x0123456789ABCDEF, 7, 41, 3
    block = np.array([sample, epoch, Purpose.VIEW << 16 | view, 1], np.uint32)
    words = philox(block, (0x89ABCDEF, 0x01234567)).tolist()
    expected = [(words[0] << 32 | words[1]) >> 11, (words[2] << 32 | words[3]) >> 11]
    drawn = uniforms(seed, Purpose.VIEW, epoch, np.array([sample]), view, 4)[0, 2:]
    np.testing.assert_array_equal(drawn, np.array(expected) / 2**53)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 + 5])
def test_uniforms_are_uniform(seed: int) -> None:
    draws = uniforms(seed, Purpose.VIEW, 0, np.arange(10_000), 0, 5)
    assert draws.shape == (10_000, 5)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert distance_to_uniform(draws) < 2.5  # by chance once in 100,000
    correlation = np.corrcoef(draws, rowvar=False) - np.eye(5)
    assert np.abs(correlation).max() < 0.05  # 5 standard errors of 1 / sqrt(10,000)


def test_uniforms_do_not_depend_on_the_batch() -> None:
    ids = np.random.default_rng(0).integers(0, 2**32, 200)
    together = uniforms(5, Purpose.VIEW, 3, ids, 1, 7)
    for part in np.array_split(np.arange(200), 13):
        np.testing.assert_array_equal(uniforms(5, Purpose.VIEW, 3, ids[part], 1, 7), together[part])
    np.testing.assert_array_equal(uniforms(5, Purpose.VIEW, 3, ids, 1, 3), together[:, :3])
    assert uniforms(5, Purpose.VIEW, 3, ids[:0], 1, 7).shape == (0, 7)


def test_every_argument_matters() -> None:
    ids = np.arange(50)
    base = uniforms(0, Purpose.VIEW, 0, ids, 0, 4)
    others = [
        uniforms(1, Purpose.VIEW, 0, ids, 0, 4),
        uniforms(2**32, Purpose.VIEW, 0, ids, 0, 4),
        uniforms(0, Purpose.ORDER, 0, ids, 0, 4),
        uniforms(0, Purpose.VIEW, 1, ids, 0, 4),
        uniforms(0, Purpose.VIEW, 0, ids + 50, 0, 4),
        uniforms(0, Purpose.VIEW, 0, ids, 1, 4),
    ]
    everything = np.stack([base, *others])
    assert len(np.unique(everything)) == everything.size  # two equal draws of 53 bits: chance 1e-10


def test_ids_that_do_not_fit_the_counter_are_noticed() -> None:
    for bad in (-1, 2**32):
        with pytest.raises(AssertionError, match="32-bit"):
            uniforms(0, Purpose.VIEW, 0, np.array([bad]), 0, 1)


@pytest.mark.parametrize("num", [0, 1, 2, 1000])
def test_permutation_holds_every_id_once(num: int) -> None:
    order = permutation(3, 0, num)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(num))


def test_permutations_are_evenly_distributed() -> None:
    num_epochs = 3000
    orders = np.array([permutation(9, epoch, 3) for epoch in range(num_epochs)])
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 6
    chi_square = float(np.sum((counts - num_epochs / 6) ** 2) / (num_epochs / 6))
    assert chi_square < 30.9  # 5 degrees of freedom: by chance once in 100,000


def test_integers_cover_their_range_evenly() -> None:
    draws = integers(4, Purpose.REPLACEMENT, 2, 7, 70_000)
    assert draws.dtype == np.int64
    counts = np.bincount(draws, minlength=7)
    assert len(counts) == 7
    assert np.abs(counts - 10_000).max() < 5 * np.sqrt(10_000 * 6 / 7)  # 5 standard errors
