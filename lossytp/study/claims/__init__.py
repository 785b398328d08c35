"""The paper's claims: each with the condition on the results under which its sentence is true.

A sentence stands in the paper as `#claim("name")[...]`. Typesetting stops if its condition does not hold, and names the
claim, its numbers and the sentence. Each public function of the modules listed here is a claim.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

from lossytp.study.claims import parallelisms, predictors, pretraining, real_model, repairs, sizes, tolerance
from lossytp.study.claims.claim import Claim, Results

CLAIMS: dict[str, Callable[[Results], Claim]] = {
    name: function
    for module in (tolerance, predictors, pretraining, sizes, real_model, repairs, parallelisms)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and not name.startswith("_")
}


def check_claims(results: Results) -> dict[str, dict[str, Any]]:
    """Return, for each claim, whether it `holds` and its `numbers`."""
    checked = {}
    for name, claim in CLAIMS.items():
        try:
            checked[name] = claim(results)
        except (LookupError, StopIteration, ArithmeticError, TypeError, ValueError) as error:
            raise ValueError(
                f"the claim {name} cannot be checked ({error!r}): its results are missing or have another form; run "
                "the experiment that it needs"
            ) from error
    return {name: {"holds": claim.holds, "numbers": _finite(claim.numbers)} for name, claim in checked.items()}


def _finite(numbers: dict[str, float]) -> dict[str, float | None]:
    """Return the numbers with null for infinity, which JSON lacks."""
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}
