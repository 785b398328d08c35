"""Claims about a model's size."""

from typing import Any

from lossytp.study.claims.claim import POINTS, Claim, Results, real_row, row_of


def rises_shrink_with_size(results: Results) -> Claim:
    """Require that the exponent of the rise at 10 % and at 30 % is negative, with intervals below 0, and above -1/4.

    At 3 % the interval must contain 0.
    """
    rows = {rate: _exponent(results, "parameters", "rise", rate) for rate in (0.03, 0.1, 0.3)}
    numbers = {f"{end} at {rate:g}": row[end] for rate, row in rows.items() for end in ("value", "low", "high")}
    holds = all(rows[rate]["high"] < 0 and rows[rate]["value"] > -0.25 for rate in (0.1, 0.3))
    return Claim(holds and rows[0.03]["low"] < 0 < rows[0.03]["high"], numbers)


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
