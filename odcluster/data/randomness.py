"""Randomness as a function, not a state.

Every random number of a run is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3") of what it is for: key = seed, counter = (sample id, epoch, purpose and view, block). Nothing has to
be saved in a checkpoint, and neither workers, nor ranks, nor a stop in the middle of an epoch change a draw.

Written out here because numpy promises no stable stream for its Generator methods between versions; this one
is pinned by the known-answer vectors of Random123. One draw costs 0.2 ms, so draw for a whole batch.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]


class Purpose(IntEnum):
    """What a draw is for; different purposes are independent. Never renumber: it changes every run."""

    ORDER = 1
    REPLACEMENT = 2
    CLUSTERS = 3
    VIEW = 4
    KMEANS = 5
    SPLIT = 6
    STEP = 7
    WEIGHTS = 8
    PRETEXT = 9
    NEIGHBOUR = 10
    SUBSET = 20


_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_COUNTERS_AT_ONCE = 1 << 15  # a few MB, whatever the number of ids: a million at once would take 200 MB


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32 with 10 rounds of counters [..., 4] under one key; same shape."""
    low = np.uint64(_LOW)
    first, second = np.uint64(_MULTIPLIERS[0]), np.uint64(_MULTIPLIERS[1])
    half = np.uint64(32)
    a, b, c, d = (counter[..., i].astype(np.uint64) for i in range(4))
    k, l = key
    for _ in range(10):
        left, right = a * first, c * second  # 32 x 32 -> 64 bits
        a, c = (right >> half) ^ b ^ np.uint64(k), (left >> half) ^ d ^ np.uint64(l)
        b, d = right & low, left & low
        k, l = (k + _KEY_STEPS[0]) & _LOW, (l + _KEY_STEPS[1]) & _LOW
    return np.stack((a, b, c, d), axis=-1).astype(np.uint32)


def _draws(seed: int, purpose: int, epoch: int, ids: NDArray[np.int64], view: int, num: int) -> NDArray[np.uint64]:
    """64-bit draws [len(ids), num]; each block of four words gives two of them."""
    assert 0 <= purpose < 2**16, purpose
    assert 0 <= view < 2**16, view
    assert 0 <= epoch < 2**32, epoch
    assert len(ids) == 0 or (ids.min() >= 0 and ids.max() < 2**32), "sample ids are 32-bit counters"
    num_blocks = (num + 1) // 2
    seed %= 2**64  # a negative seed is its two's complement
    draws = np.empty((len(ids), num), np.uint64)
    for start in range(0, len(ids), chunk := max(1, _COUNTERS_AT_ONCE // num_blocks)):
        some = ids[start : start + chunk]
        counter = np.empty((len(some), num_blocks, 4), np.uint32)
        counter[..., 0] = some[:, None]
        counter[..., 1] = epoch
        counter[..., 2] = purpose << 16 | view
        counter[..., 3] = np.arange(num_blocks)
        words = philox(counter, (seed & _LOW, seed >> 32)).astype(np.uint64)
        pairs = words[..., 0::2] << np.uint64(32) | words[..., 1::2]  # [len(some), num_blocks, 2]
        draws[start : start + chunk] = pairs.reshape(len(some), 2 * num_blocks)[:, :num]
    return draws


def uniforms(seed: int, purpose: int, epoch: int, ids: NDArray[np.int64], view: int, num: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), [len(ids), num]. Row i depends on ids[i], not on the batch it came in."""
    draws = _draws(seed, purpose, epoch, np.asarray(ids, np.int64), view, num)
    return (draws >> np.uint64(11)).astype(np.float64) * 2.0**-53


def integers(seed: int, purpose: int, epoch: int, high: int, num: int) -> NDArray[np.int64]:
    """num integers in [0, high), with replacement."""
    draws = uniforms(seed, purpose, epoch, np.arange(num), 0, 1)[:, 0]
    return np.floor(draws * high).astype(np.int64)


def permutation(seed: int, epoch: int, num: int, purpose: int = Purpose.ORDER) -> NDArray[np.int64]:
    """A random order of 0 .. num - 1: the ids sorted by one 64-bit draw each; a stable sort settles ties."""
    draws = _draws(seed, purpose, epoch, np.arange(num), 0, 1)[:, 0]
    return np.argsort(draws, kind="stable").astype(np.int64)
