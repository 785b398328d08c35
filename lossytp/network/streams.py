"""Counter-based random numbers: one Philox stream for each thing to draw.

A key such as ``(seed, "training", "tp", src, dst, "gaps")`` names a stream. Its n-th number depends only on the key and
n. So every rank of a group computes the same losses without a message, in any process layout, on any device, and after
a resume. The module uses only Philox's raw words: numpy keeps these stable across versions, but not its distributions.

Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import hashlib

import numpy as np
from scipy.special import ndtri

Key = tuple[int | str, ...]
WORDS_PER_COUNTER = 4  # Philox 4x64 yields four words a counter value
EXPONENT_OF_ONE = np.float64(1.0).view(np.uint64)


class Stream:
    """Uniform numbers in [0, 1), read in order from the Philox stream that `key` names."""

    def __init__(self, key: Key) -> None:
        digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
        self._key = np.frombuffer(digest, dtype=np.uint64)
        self.seek(0)

    def seek(self, position: int) -> None:
        """Make number `position` (counted from 0) the next one read."""
        self._philox = np.random.Philox(key=self._key)
        self._philox.advance(position // WORDS_PER_COUNTER)
        self._philox.random_raw(position % WORDS_PER_COUNTER)

    def uniforms(self, count: int) -> np.ndarray:
        """Return the next `count` numbers, float64 with 52 random bits, shape (count,)."""
        words = self._philox.random_raw(count)
        words >>= np.uint64(12)
        words |= EXPONENT_OF_ONE  # 52 random bits after the exponent of 1.0 make a float64 in [1, 2)
        numbers = words.view(np.float64)
        numbers -= 1.0
        return numbers


class Normals:
    """Standard normal numbers, read in order from the Philox stream that `key` names, by inversion."""

    def __init__(self, key: Key, position: int = 0) -> None:
        self._stream = Stream(key)
        self._stream.seek(position)
        self.position = position

    def take(self, count: int) -> np.ndarray:
        """Return the next `count` numbers, float64, shape (count,)."""
        self.position += count
        uniforms = self._stream.uniforms(count)
        uniforms += 2.0**-53  # the middle of each of the 2**52 steps: neither 0 nor 1
        return np.asarray(ndtri(uniforms))
