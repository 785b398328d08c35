"""Claims about pretraining under loss."""

from typing import Any

from lossytp.study.claims.claim import Claim, Results

LOST = ("losses on the way to a sum", 0.1)
ENDS = ("low", "high")


def pretraining_loses_nats(results: Results) -> Claim:
    """Require that 10 % loss on the way to a sum costs nats, evaluated with losses and without."""
    row = _arm(results, *LOST)
    lows = {name: row[f"{name}_low"] for name in ("clean", "lossy")}
    return Claim(min(lows.values()) > 0, lows)


def pretraining_wastes_tokens(results: Results) -> Claim:
    """Require that lossless training on half of the tokens does as well, within a factor of 1.25."""
    row = _arm(results, *LOST)
    numbers = {f"{name}, {end}": row[f"{name}_times_tokens_{end}"] for name in ("clean", "lossy") for end in ENDS}
    holds = all(number is not None for number in numbers.values())
    return Claim(holds and min(numbers.values()) > 2 / 1.25 and max(numbers.values()) < 2 * 1.25, numbers)


def waiting_beats_more_tokens(results: Results) -> Claim:
    """Require that waiting for retransmissions takes less time than so many more tokens, on each network."""
    row = _arm(results, *LOST)
    numbers = {name: row[name] for name in ("lossy_times_tokens_low", "price_of_waiting")}
    holds = numbers["lossy_times_tokens_low"] is not None
    return Claim(holds and numbers["lossy_times_tokens_low"] > numbers["price_of_waiting"], numbers)


def _arm(results: Results, arm: str, loss_rate: float) -> dict[str, Any]:
    (row,) = (row for row in results["pretraining"] if (row["arm"], row["loss_rate"]) == (arm, loss_rate))
    return dict(row)
