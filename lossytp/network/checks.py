"""Checks whose messages name the value, the bound and the fix, in one line."""

import math
from numbers import Integral, Real


def check_probability(name: str, value: float) -> None:
    """Raise ValueError unless `value` lies in [0, 1]."""
    if not (isinstance(value, Real) and math.isfinite(value) and 0 <= value <= 1):
        raise ValueError(f"{name} = {value!r} is not in [0, 1]: give a fraction, such as 0.01 for 1 %")


def check_known(name: str, value: str, known: object) -> None:
    """Raise ValueError unless `value` is among the `known` names."""
    names = list(known)  # type: ignore[call-overload]
    if value not in names:
        raise ValueError(f"{name} = {value!r} is unknown: choose one of {', '.join(map(str, names))}")


def check_at_least(name: str, value: object, least: int) -> None:
    """Raise ValueError unless `value` is a whole number, and no smaller."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} = {value!r} is no whole number of at least {least}: give one")


def check_positive(name: str, value: float, unit: str) -> None:
    """Raise ValueError unless `value` is a finite number above 0."""
    if not (isinstance(value, Real) and math.isfinite(value) and value > 0):
        raise ValueError(f"{name} = {value!r} is not above 0: give a finite number of {unit}")
