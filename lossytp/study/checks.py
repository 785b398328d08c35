"""Checks of notebooks' parameters: one line with value, bound and fix, as in `lossytp.network.checks`."""

import math
from numbers import Real


def check_filled(name: str, values: object) -> None:
    """Raise ValueError unless `values` is a list or a tuple that holds something."""
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(f"{name} = {values!r} is no list of at least one value: give one")


def check_not_negative(name: str, value: object, unit: str) -> None:
    """Raise ValueError unless `value` is a finite number of at least 0."""
    if not (isinstance(value, Real) and math.isfinite(value) and float(value) >= 0):
        raise ValueError(f"{name} = {value!r} is not from 0 on: give a finite number of {unit}")
