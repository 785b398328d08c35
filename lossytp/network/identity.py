"""The settings of a network as text, to check that a saved state belongs to the network that loads it."""

from dataclasses import fields, is_dataclass
from hashlib import blake2b
from numbers import Real

import numpy as np

from lossytp.network.loss_process import LossProcess


def described(value: object) -> str:
    """Return one line that describes settings, the same in every run, and for numpy's and Python's numbers.

    It gives a dataclass's fields and an array's hash. Of anything else, such as a function, it gives only the type.
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
    """Return one line that describes a loss process. Its rate tells functions apart; `described` does not."""
    return f"{described(process)} of loss rate {process.loss_rate:.6g}"
