"""Claims about a model's size, and about how long it is pretrained."""

import math
from itertools import pairwise
from typing import Any

from lossytp.study.claims.claim import POINTS, Claim, Results, real_row, row_of, rows_of


def rises_shrink_with_size(results: Results) -> Claim:
    """Require that the exponent of the rise at 10 % is below 0 with its interval, in packets of both kinds.

    The two largest models must differ by more than the others. At 30 % the exponents must be closer to 0, with
    intervals below it. At 3 % both intervals must hold 0.
    """
    costs = ("rise", "rise, whole packets")
    numbers = {cost: _exponent(results, "parameters", cost, 0.1)["high"] for cost in costs}
    at_30 = {cost: _exponent(results, "parameters", cost, 0.3) for cost in costs}
    smaller = all(_exponent(results, "parameters", cost, 0.1)["value"] < at_30[cost]["value"] for cost in costs)
    below = smaller and all(row["high"] < 0 for row in at_30.values())
    at_3 = [_exponent(results, "parameters", cost, 0.03) for cost in costs]
    uncertain = all(row["low"] <= 0 <= row["high"] for row in at_3)
    shared = results["sizes"]["tokens"]
    rows = [row for row in _small_packets(results) if row["tokens"] == shared]
    first, *_, last_but_one, last = (row["rise"] for row in sorted(rows, key=lambda row: row["parameters"]))
    holds = max(numbers.values()) < 0 and last_but_one - last > first - last_but_one > 0 and below and uncertain
    return Claim(holds, numbers | {"smallest": first, "last but one": last_but_one, "largest": last})


def falls_shrink_with_size(results: Results) -> Claim:
    """Require that mean falls after fine-tuning shrink from size to size, to a power below 0 with its interval."""
    row = _exponent(results, "parameters", "fall", 0.3)
    rows = rows_of(results["sizes"]["falls"], tokens=results["sizes"]["tokens"])
    falls = [each["fall"] for each in sorted(rows, key=lambda each: each["parameters"])]
    shrink = falls == sorted(falls, reverse=True)
    return Claim(shrink and row["high"] < 0, {end: row[end] for end in ("value", "low", "high")})


def rises_grow_with_tokens(results: Results) -> Claim:
    """Require that the rise at 10 % grows with the tokens to a power above 1, in packets of both kinds.

    The power's interval must lie above 1. Each step to more tokens must multiply the rise by less than the last one.
    """
    numbers = {cost: _exponent(results, "tokens", cost, 0.1)["low"] for cost in ("rise", "rise, whole packets")}
    usual = _usual(results)["model_name"]
    rows = sorted((row for row in _small_packets(results) if row["model_name"] == usual), key=lambda row: row["tokens"])
    growth = [later["rise"] / earlier["rise"] for earlier, later in pairwise(rows)]
    holds = min(numbers.values()) > 1 and growth == sorted(growth, reverse=True)
    return Claim(holds, numbers | {"first growth": growth[0], "last growth": growth[-1]})


def falls_are_not_shown_to_grow_with_tokens(results: Results) -> Claim:
    """Require that mean falls after fine-tuning grow with the tokens, but that the exponent's interval holds 0."""
    row = _exponent(results, "tokens", "fall", 0.3)
    usual = _usual(results)["model_name"]
    rows = sorted((each["tokens"], each["fall"]) for each in results["sizes"]["falls"] if each["model_name"] == usual)
    falls = [fall for _, fall in rows]
    numbers = {end: row[end] for end in ("value", "low", "high")} | {"least": falls[0], "most": falls[-1]}
    return Claim(row["low"] <= 0 < row["high"] and falls == sorted(falls), numbers)


def the_longest_trained_falls_most(results: Results) -> Claim:
    """Require that the study's usual model falls more than its shape after the tokens that all sizes saw."""
    usual, shared = _usual(results), results["sizes"]["tokens"]
    fewer = row_of(results["sizes"]["falls"], model_name=usual["model_name"], tokens=shared)["high"]
    numbers = {"usual model, low": -POINTS * usual["high"], "fewer tokens, high": POINTS * fewer}
    return Claim(-usual["high"] > fewer, numbers)


def size_does_not_explain_the_real_model(results: Results) -> Claim:
    """Require that the real model's median block rises at least four times as much as any size, at 3 % loss.

    Packets have 1500 bytes in both.
    """
    real = real_row(results, repair="zero", loss_rate=0.03)["median"]
    most = max(row["rise"] for row in rows_of(results["sizes"]["rises"], whole_packets=True, loss_rate=0.03))
    return Claim(real > 4 * most, {"real model": real, "any size": most})


def _usual(results: Results) -> dict[str, Any]:
    """Return what 30 % loss costs the study's usual model, in packets of a third of a token."""
    rows = results["comparisons"]["01_tolerance_of_small_packets"]
    return row_of(rows, task="docstrings", arm="packets of 216 bytes", loss_rate=0.3)


def _small_packets(results: Results) -> list[dict[str, Any]]:
    """Return the rises at 10 % in packets of a third of a token."""
    return rows_of(results["sizes"]["rises"], whole_packets=False, loss_rate=0.1)


def _exponent(results: Results, against: str, cost: str, loss_rate: float) -> dict[str, Any]:
    row = row_of(results["sizes"]["exponents"], against=against, cost=cost, loss_rate=loss_rate)
    return {name: math.nan if value is None else value for name, value in row.items()}  # no claim holds of nan
