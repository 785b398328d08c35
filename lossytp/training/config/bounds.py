"""Bounds of settings, declared at the field, as in `batch_size: Count = 32`."""

import math
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

Count = Annotated[int, Ge(1)]
CountFromZero = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
FASTEST = Le(1e37)  # Adam's first step is ten times its learning rate, in float32
LearningRate = Annotated[NotNegative, FASTEST]


def check_bounds(name: str, value: float, bounds: tuple[Any, ...]) -> None:
    """Raise ValueError, with the value, the bound and the fix, unless `value` is finite and within `bounds`."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} = {value} is not finite: give a finite number")
    shown = f"{name} = {value}"
    for bound in bounds:
        match bound:
            case Ge(least) if value < least:  # type: ignore[operator]
                raise ValueError(f"{shown} is below {least:g}: give {least:g} or more")
            case Gt(least) if value <= least:  # type: ignore[operator]
                raise ValueError(f"{shown} is not above {least:g}: give a larger number, or leave it out")
            case Le(most) if value > most:  # type: ignore[operator]
                raise ValueError(f"{shown} is above {most:g}: give {most:g} or less")
            case Lt(most) if value >= most:  # type: ignore[operator]
                raise ValueError(f"{shown} is not below {most}: give a smaller number")
