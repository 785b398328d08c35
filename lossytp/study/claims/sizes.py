"""Claims about a model's size."""

from typing import Any

from lossytp.study.claims.claim import POINTS, Claim, Results, real_row, row_of


def rises_shrink_with_size(results: Results) -> Claim:
    """Require that the exponent of the rise at 10 % is below 0 with its interval, in packets of both kinds.

    The two largest models must differ by more than the others.
    """
    numbers = {cost: _exponent(results, "parameters", cost, 0.1)["high"] for cost in ("rise", "rise, whole packets")}
    rows = [row for row in results["sizes"]["rises"] if not row["whole_packets"] and row["loss_rate"] == 0.1]
    first, *_, last_but_one, last = (row["rise"] for row in sorted(rows, key=lambda row: row["parameters"]))
    holds = max(numbers.values()) < 0 and last_but_one - last > first - last_but_one > 0
    return Claim(holds, numbers | {"smallest": first, "last but one": last_but_one, "largest": last})


def falls_shrink_with_size(results: Results) -> Claim:
    """Require that the exponent of the fall after fine-tuning is below 0 with its interval."""
    row = _exponent(results, "parameters", "fall", 0.3)
    return Claim(row["high"] < 0, {end: row[end] for end in ("value", "low", "high")})


def the_longest_trained_falls_most(results: Results) -> Claim:
    """Require that the study's usual model, which saw most tokens, falls more than the same shape in sizes does."""
    usual = row_of(results["comparisons"]["01_tolerance_of_small_packets"], "docstrings", "packets of 216 bytes", 0.3)
    most = max(row["high"] for row in results["sizes"]["falls"] if row["model_name"] == usual["model_name"])
    numbers = {"usual model, low": -POINTS * usual["high"], "fewer tokens, high": POINTS * most}
    return Claim(-usual["high"] > most, numbers)


def size_does_not_explain_the_real_model(results: Results) -> Claim:
    """Require that the real model's median block rises at least five times as much as any size, at 3 % loss.

    Packets have 1500 bytes in both.
    """
    real = real_row(results, repair="zero", loss_rate=0.03)["median"]
    most = max(row["rise"] for row in results["sizes"]["rises"] if row["whole_packets"] and row["loss_rate"] == 0.03)
    return Claim(real > 5 * most, {"real model": real, "any size": most})


def _exponent(results: Results, against: str, cost: str, loss_rate: float) -> dict[str, Any]:
    wanted = (against, cost, loss_rate)
    rows = results["sizes"]["exponents"]
    (row,) = (row for row in rows if (row["against"], row["cost"], row["loss_rate"]) == wanted)
    return dict(row)
