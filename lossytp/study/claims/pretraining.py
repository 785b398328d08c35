"""Claims about pretraining under loss."""

import math
from typing import Any

from lossytp.study.claims.claim import Claim, Results

LOST = ("losses on the way to a sum", 0.1)


def pretraining_loses_nats(results: Results) -> Claim:
    """Require that 10 % loss on the way to a sum costs nats, evaluated with losses and without."""
    row = _arm(results, *LOST)
    lows = {name: row[f"{name}_low"] for name in ("clean", "lossy")}
    return Claim(min(lows.values()) > 0, lows)


def pretraining_wastes_tokens(results: Results) -> Claim:
    """Require that lossless training on two thirds of the tokens, within a tenth, does as well without losses.

    Evaluated with losses, it needs no more.
    """
    row = _arm(results, *LOST)
    names = ("clean_times_tokens_low", "clean_times_tokens", "clean_times_tokens_high", "lossy_times_tokens")
    numbers = {name: row[name] or math.inf for name in names}  # null: beyond the lossless runs
    low, clean, high, lossy = numbers.values()
    return Claim(low > 1.5 / 1.1 and high < 1.5 * 1.1 and clean <= lossy < math.inf, numbers)


def waiting_beats_more_tokens(results: Results) -> Claim:
    """Require that retransmitting reaches the same cross-entropy sooner up to 1.25 MB in flight, and no further."""
    row = _arm(results, *LOST)
    return Claim(row["waiting_pays"] == 1250, {"kilobytes in flight": row["waiting_pays"]})


def _arm(results: Results, arm: str, loss_rate: float) -> dict[str, Any]:
    (row,) = (row for row in results["pretraining"] if (row["arm"], row["loss_rate"]) == (arm, loss_rate))
    return dict(row)
