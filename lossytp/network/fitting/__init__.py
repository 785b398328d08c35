"""Fit loss processes to recorded losses: maximum likelihood, choice by BIC, intervals, goodness of fit.

`fit` returns one `Fit` per family, the best first. `intervals` and `goodness` tell how far to trust it.
"""

from lossytp.network.fitting.families import FAMILIES, Family
from lossytp.network.fitting.fit import Fit, applicable, fit, fit_family
from lossytp.network.fitting.goodness import Comparison, Goodness, goodness
from lossytp.network.fitting.intervals import Interval, intervals

__all__ = [
    "FAMILIES",
    "Comparison",
    "Family",
    "Fit",
    "Goodness",
    "Interval",
    "applicable",
    "fit",
    "fit_family",
    "goodness",
    "intervals",
]
