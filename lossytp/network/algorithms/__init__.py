"""Collect the collective algorithms. Each has a file of packet routes that bears its name.

To add an algorithm, add a file here that defines `ALGORITHM`. Nothing else has to change.
"""

import pkgutil
from importlib import import_module

from lossytp.network.checks import check_known
from lossytp.network.routes import Algorithm

ALGORITHMS: dict[str, Algorithm] = {
    module.name: import_module(f"{__name__}.{module.name}").ALGORITHM for module in pkgutil.iter_modules(__path__)
}


def algorithm_named(name: str) -> Algorithm:
    """Return the algorithm of this name.

    Raises:
        ValueError: if no algorithm has this name; the message lists the names.
    """
    check_known("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]
