"""Collective algorithms, one a file, each by the name of its file: packet routes and nothing else.

A new algorithm is a new file here that defines `ALGORITHM`; nothing else has to know of it.
"""

import pkgutil
from importlib import import_module

from lossytp.network.checks import check_known
from lossytp.network.routes import Algorithm

ALGORITHMS: dict[str, Algorithm] = {
    module.name: import_module(f"{__name__}.{module.name}").ALGORITHM for module in pkgutil.iter_modules(__path__)
}


def algorithm_named(name: str) -> Algorithm:
    """The algorithm of this name; ValueError lists the names when there is none."""
    check_known("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]
