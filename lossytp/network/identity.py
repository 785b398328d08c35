"""The settings of a network as text, which match a saved state with the network that loads it."""

from dataclasses import fields, is_dataclass
from hashlib import blake2b
from numbers import Real

import numpy as np

from lossytp.network.loss_process import LossProcess


def described(value: object) -> str:
    """Return one line that names settings, the same in every run and for numpy's and Python's numbers.

    A dataclass is named with its fields, an array by a hash. All else, such as a function, is named by its type alone.
    """
    if isinstance(value, Real):
        return f"{float(value):.12g}"
    if value is None or isinstance(value, str):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(described, value))})"
    if isinstance(value, np.ndarray):
        return blake2b(value.tobytes(), digest_size=4).hexdigest()
    if is_dataclass(value):
        inside = ", ".join(f"{field.name}={described(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({inside})"
    return type(value).__name__


def process_described(process: LossProcess) -> str:
    """Return one line that names a loss process and its rate; the rate tells apart what `described` cannot name."""
    return f"{described(process)} of loss rate {process.loss_rate:.6g}"
