"""Moves the state of torch's CPU generator forward without drawing: MT19937 jumps over any number of draws at once.

Matsumoto and Nishimura, "Mersenne Twister", 1998: the generator is a linear recurrence over bits, of order 19937. Haramoto et al.,
"Efficient jump ahead for F2-linear random number generators", 2008: N steps are the polynomial x^N modulo the characteristic
polynomial of the recurrence, applied to the state.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORDS = 624
_SHIFT_WORDS = 397
_ORDER = 19937
_TWIST = 0x9908B0DF
_UPPER = 0x80000000
_LOWER = 0x7FFFFFFF

_JUMP_FROM = 2**24
"""Draws from which a jump is faster than drawing."""

_LEFT = slice(8, 12)
_NEXT = slice(16, 24)
_KEY = slice(24, 24 + 8 * WORDS)
"""Where torch keeps, in the bytes of a state, the draws left before the next twist, the next word, and the words."""


def skip(state: Tensor, draws: int) -> Tensor:
    """Return the generator state (as of torch.get_rng_state) that `draws` draws of 32 bits after `state` give.

    The cost does not depend on `draws`. Equal states draw equal numbers; bytes that no draw ever uses may differ.
    """
    raw = state.numpy().copy()
    left, following, stored = raw[_LEFT].view(np.int32), raw[_NEXT].view(np.uint64), raw[_KEY].view(np.uint64)
    used = WORDS if int(left[0]) == 1 else int(following[0])
    key, position = stored.astype(np.uint32), used
    if draws > _JUMP_FROM:
        # Only whole blocks of words can be jumped over; what is left is drawn.
        blocks = (used + draws) // WORDS - 1
        key, position, draws = _jump(key, blocks), WORDS, used + draws - (blocks + 1) * WORDS
    key, position = _drawn(key, position, draws)
    stored[:] = key
    left[0], following[0] = WORDS + 1 - position, position
    return torch.from_numpy(raw)


def _drawn(key: NDArray[np.uint32], position: int, draws: int) -> tuple[NDArray[np.uint32], int]:
    """Return words and position after `draws` draws, made one after the other by numpy's generator, which is the same one."""
    generator = np.random.MT19937(0)
    generator.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": position}}
    generator.random_raw(draws, output=False)
    state = generator.state["state"]
    return state["key"], int(state["pos"])


def _jump(key: NDArray[np.uint32], blocks: int) -> NDArray[np.uint32]:
    """Return the words after `blocks` twists: a sum, modulo 2, of the words that the next _ORDER steps give."""
    polynomial = _power_of_x(blocks * WORDS)
    bits = np.unpackbits(np.frombuffer(polynomial.to_bytes(_ORDER // 8 + 1, "little"), dtype=np.uint8), bitorder="little")
    words = _sequence(key, _ORDER // WORDS + 2)
    result = np.zeros(WORDS, dtype=np.uint32)
    for start in np.flatnonzero(bits):
        result ^= words[start : start + WORDS]
    return result


def _sequence(key: NDArray[np.uint32], blocks: int) -> NDArray[np.uint32]:
    """Return `key` and the words of the next `blocks` twists (before tempering)."""
    words = np.empty((blocks + 1) * WORDS, dtype=np.uint32)
    words[:WORDS] = key
    gap = WORDS - _SHIFT_WORDS
    for start in range(WORDS, len(words), gap):
        # A word depends on those 624, 623 and 227 before it: 227 at a time can be made from words that are there.
        stop = min(start + gap, len(words))
        old, beside = words[start - WORDS : stop - WORDS], words[start - WORDS + 1 : stop - WORDS + 1]
        mixed = (old & np.uint32(_UPPER)) | (beside & np.uint32(_LOWER))
        twist = np.where(beside & np.uint32(1), np.uint32(_TWIST), np.uint32(0))
        words[start:stop] = words[start - gap : stop - gap] ^ (mixed >> np.uint32(1)) ^ twist
    return words


def _power_of_x(exponent: int) -> int:
    """Return x^exponent modulo the characteristic polynomial; bit i of a polynomial is its coefficient of x^i."""
    power = 1
    for digit in bin(exponent)[2:]:
        power = _reduced(_squared(power) << int(digit))
    return power


def _squared(polynomial: int) -> int:
    # Squaring over GF(2) puts a zero between any two bits.
    raw = np.frombuffer(polynomial.to_bytes(polynomial.bit_length() // 8 + 1, "little"), dtype=np.uint8)
    bits = np.unpackbits(raw, bitorder="little")
    spread = np.zeros(2 * len(bits), dtype=np.uint8)
    spread[::2] = bits
    return int.from_bytes(np.packbits(spread, bitorder="little").tobytes(), "little")


def _reduced(polynomial: int) -> int:
    mask = (1 << _ORDER) - 1
    while high := polynomial >> _ORDER:
        polynomial &= mask
        for exponent in _lower_terms():
            polynomial ^= high << exponent
    return polynomial


@lru_cache(maxsize=1)
def _lower_terms() -> tuple[int, ...]:
    """Return the exponents of the characteristic polynomial's terms below x^19937.

    Found by the Berlekamp-Massey algorithm from one bit of 2 x 19937 successive words, whatever they start from.
    """
    seed = np.arange(1, WORDS + 1, dtype=np.uint32)
    words = _sequence(seed, 2 * _ORDER // WORDS + 2)[WORDS : WORDS + 2 * _ORDER]
    connection, previous, length, gap, window = 1, 1, 0, 1, 0
    for position, bit in enumerate((words & np.uint32(1)).tolist()):
        window = (window << 1) | bit
        if not (connection & window).bit_count() & 1:
            gap += 1
            continue
        kept = connection
        connection ^= previous << gap
        if 2 * length <= position:
            length, previous, gap = position + 1 - length, kept, 1
        else:
            gap += 1
    # The connection polynomial has the coefficients of the characteristic one in reverse.
    return tuple(length - exponent for exponent in range(1, length + 1) if connection >> exponent & 1)
