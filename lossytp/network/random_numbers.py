"""Counter-based random numbers: a stream for each thing to draw, and geometric gaps by inversion."""

import hashlib
import math

import numpy as np
from scipy.special import ndtri

Key = tuple[int | str, ...]
WORDS_PER_COUNTER = 4  # Philox 4x64 yields four words a counter value
EXPONENT_OF_ONE = np.float64(1.0).view(np.uint64)
NEVER = 2**62  # a packet index no run reaches
LONGEST_GAP = 2.0**45  # keeps the sum of a block of gaps inside int64 ...
RAREST = 1e-11  # ... and only rates below this can reach it, since log(2**-52) is -36
SMALLEST_BLOCK = 64  # gaps drawn at once: amortises numpy's call overhead over several messages
LARGEST_BLOCK = 2**13  # keeps the working set inside the processor's cache


class Stream:
    """Random numbers, read in order from the counter-based Philox stream that `key` names.

    Number n depends only on the key and n (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The
    class uses Philox's raw words, which numpy keeps stable across versions; its distributions are not.
    """

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
        """Return the next `count` numbers in [0, 1), float64 with 52 random bits, shape (count,)."""
        words = self._philox.random_raw(count)
        words >>= np.uint64(12)
        words |= EXPONENT_OF_ONE  # 52 random bits after the exponent of 1.0 make a float64 in [1, 2)
        numbers = words.view(np.float64)
        numbers -= 1.0
        return numbers


class Normals:
    """Standard normal numbers from the stream that `key` names, by inversion."""

    def __init__(self, key: Key, position: int = 0) -> None:
        self._stream, self.position = Stream(key), position
        self._stream.seek(position)

    def take(self, count: int) -> np.ndarray:
        """Return the next `count` numbers, float64, shape (count,)."""
        self.position += count
        uniforms = self._stream.uniforms(count)
        uniforms += 2.0**-53  # the middle of each of the 2**52 steps: neither 0 nor 1
        return np.asarray(ndtri(uniforms))


def geometric(probability: float, uniforms: np.ndarray) -> np.ndarray:
    """Return the trials up to and including the first success, by inversion: int64, at least 1, shape of `uniforms`.

    P(X > n) = (1 - p)^n, hence X = floor(log(1 - u) / log(1 - p)) + 1 (Devroye 1986, X.2).
    """
    if probability == 1:
        return np.ones(uniforms.shape, dtype=np.int64)
    trials = np.subtract(1.0, uniforms)
    np.log(trials, out=trials)
    trials *= 1 / math.log1p(-probability)
    if probability < RAREST:
        np.minimum(trials, LONGEST_GAP, out=trials)
    whole = trials.astype(np.int64)
    whole += 1
    return whole


def block_size(expected: float) -> int:
    """Return how many numbers to draw at once if about `expected` are needed."""
    return int(min(max(expected + 3 * math.sqrt(max(expected, 0)), SMALLEST_BLOCK), LARGEST_BLOCK))
