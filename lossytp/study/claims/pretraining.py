"""Claims about pretraining under loss."""

from typing import Any

from lossytp.study.claims.claim import Claim, Results

LOST = ("losses on the way to a sum", 0.1)


def pretraining_loses_nats(results: Results) -> Claim:
    """Require that 10 % loss on the way to a sum costs nats, evaluated with losses and without."""
    row = _arm(results, *LOST)
    lows = {name: row[f"{name}_low"] for name in ("clean", "lossy")}
    return Claim(min(lows.values()) > 0, lows)


def _arm(results: Results, arm: str, loss_rate: float) -> dict[str, Any]:
    (row,) = (row for row in results["pretraining"] if (row["arm"], row["loss_rate"]) == (arm, loss_rate))
    return dict(row)
