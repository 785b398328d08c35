"""Claims about pretraining under loss."""

import math
from typing import Any

from lossytp.study.analysis.pretraining import AXES, EVALUATIONS
from lossytp.study.claims.claim import Claim, Results, row_of, rows_of

LOST = ("losses on the way to a sum", 0.1)
BOTH = "losses on both ways"
SPREAD = "losses on the way to a sum with Hadamard"
BOTH_SPREAD = "losses on both ways with Hadamard"
BOTH_SHARDED = "losses on both ways of a sharded stream"
WASTED = {"clean": 1 / 3, "lossy": 2 / 5}  # share of the tokens, by evaluation
PAYS_UP_TO = 125.0  # kilobytes in flight
PAYS_FROM = 1250.0
FAILED = 0.1  # nats of training loss
GUESSED = {0.01: (0.005, 0.04), 0.03: (0.03, 0.10)}  # nats by loss rate, from predictions/fixed_beforehand.csv


def pretraining_loses_nats(results: Results) -> Claim:
    """Require that 10 % loss on the way to a sum costs nats, evaluated with losses and without."""
    row = _arm(results, *LOST)
    lows = {name: row[f"{name}_low"] for name in ("clean", "lossy")}
    return Claim(min(lows.values()) > 0, lows)


def pretraining_wastes_tokens(results: Results) -> Claim:
    """Require that about a third of the tokens is wasted without losses in evaluation, and about two fifths with them.

    Means must lie within 0.05 of these shares, and intervals within 0.1.
    """
    row = _arm(results, *LOST)
    numbers: dict[str, float] = {}
    holds = True
    for evaluation, wasted in WASTED.items():
        name = f"{evaluation}_times_tokens"
        low, value, high = (1 - 1 / (row[name + end] or math.inf) for end in ("_low", "", "_high"))  # null: beyond
        holds &= abs(value - wasted) < 0.05 and wasted - 0.1 < low and high < wasted + 0.1
        numbers |= {f"{evaluation}, low": low, evaluation: value, f"{evaluation}, high": high}
    return Claim(holds, numbers)


def pretraining_fails_over_both_phases(results: Results) -> Claim:
    """Require that pretraining fails at 3 and 10 % loss in both phases.

    It must end over a nat higher, and higher than half of the lossless tokens. The intervals must lie above both, and
    so above what was predicted for 10 %.
    """
    (half,) = rows_of(results["pretraining"], arm="no loss in half the steps")
    rows = {rate: _arm(results, BOTH, rate) for rate in (0.03, 0.1)}
    least = max(1.0, half["clean_high"])
    holds = all(row["clean_low"] > least and row["clean_times_tokens"] is None for row in rows.values())
    holds &= all(_fails(_turns(results, rate)) for rate in rows)
    numbers = {f"at least, {rate:g}": row["clean_low"] for rate, row in rows.items()}
    return Claim(holds, numbers | {"half of the tokens": half["clean_high"]})


def one_per_cent_over_both_phases_wastes_half(results: Results) -> Claim:
    """Require that 1 % loss in both phases does not fail, and ends higher than half of the lossless tokens.

    The intervals must be apart.
    """
    (half,) = rows_of(results["pretraining"], arm="no loss in half the steps")
    row = _arm(results, BOTH, 0.01)
    numbers = {"at least": row["clean_low"], "half of the tokens": half["clean_high"]}
    return Claim(row["clean_low"] > half["clean_high"] and _succeeds(_turns(results, 0.01)), numbers)


def training_diverges_as_the_rate_rises(results: Results) -> Claim:
    """Require that over 10 % loss in both phases each seed's training loss is least before the end of the warm-up.

    It must end higher than that.
    """
    rows = _turns(results, 0.1)
    holds = len(rows) >= 3 and all(row["step"] <= row["warmup_steps"] and row["last"] > row["least"] for row in rows)
    return Claim(holds, {f"seed {row['seed']}, least at step": row["step"] for row in rows})


def hadamard_softens_the_failure(results: Results) -> Claim:
    """Require that over 10 % loss in both phases, Hadamard lowers the rise, with intervals apart.

    It must not fail. The mean rise must be above that of half of the lossless tokens, with its interval, but the
    interval of the rise must reach below.
    """
    (half,) = rows_of(results["pretraining"], arm="no loss in half the steps")
    bare, spread = _arm(results, BOTH, 0.1), _arm(results, BOTH_SPREAD, 0.1)
    holds = half["clean_high"] < spread["clean"] and spread["clean_high"] < bare["clean_low"]
    holds &= spread["clean_low"] < half["clean"] and _succeeds(_turns(results, 0.1, repair="hadamard(64)"))
    numbers = {"rise": spread["clean"], "at most": spread["clean_high"], "half of the tokens": half["clean_high"]}
    return Claim(holds, numbers | {"bare, at least": bare["clean_low"]})


def a_sharded_stream_trains(results: Results) -> Claim:
    """Require that over 10 % loss in both phases a sharded stream does not fail, and costs as the reduce phase does.

    Its mean must lie in the interval of the reduce phase, within 0.05 nats of its mean. It must end lower than half of
    the lossless tokens, and than ranks with their own streams, with Hadamard and without. All these
    intervals must be apart. At 1 % it must end lower still. That rise must be shown only if evaluation loses packets.
    """
    (half,) = rows_of(results["pretraining"], arm="no loss in half the steps")
    rare, often = (_arm(results, BOTH_SHARDED, rate) for rate in (0.01, 0.1))
    others = [_arm(results, BOTH, 0.1), _arm(results, BOTH_SPREAD, 0.1)]
    least = min(half["clean_low"], *(row["clean_low"] for row in others))
    holds = rare["clean_low"] < 0 and rare["clean_high"] < often["clean_low"] and often["clean_high"] < least
    reduce, rarely_reduced = (_arm(results, LOST[0], rate) for rate in (0.1, 0.01))
    holds &= rare["lossy_low"] > 0
    holds &= abs(rare["clean"] - rarely_reduced["clean"]) < 0.01
    holds &= reduce["clean_low"] < often["clean"] < reduce["clean_high"]
    holds &= abs(often["clean"] - reduce["clean"]) < 0.05
    turns = _turns(results, 0.1, sharded=True)
    holds &= _succeeds(turns) and not any(map(_rises, turns))
    numbers = {"1 %, at most": rare["clean_high"], "10 %, at least": often["clean_low"]}
    return Claim(holds, numbers | {"10 %, at most": often["clean_high"], "others, at least": least})


def the_shape_of_gpt2_fails_too(results: Results) -> Claim:
    """Require that 10 % loss in both phases costs GPT-2's shape over half a nat, with its interval, and that it fails.

    Each of three seeds must depart from lossless training within 25 steps of step 300.
    """
    row = row_of(results["pretraining_gpt2"]["arms"], arm=BOTH, loss_rate=0.1)
    steps = _departures(results, "no repair")
    holds = row["clean_low"] > 0.5 and _fails(rows_of(results["pretraining_gpt2"]["turns"], mtu_bytes=1500))
    holds &= len(steps) >= 3 and all(abs((step or math.inf) - 300) <= 25 for step in steps)
    return Claim(holds, {"at least": row["clean_low"], "seeds": len(steps)})


def larger_packets_fail_sooner(results: Results) -> Claim:
    """Require that over packets of 9000 bytes both seeds depart from lossless training in less than half the steps.

    Both must end more than half a nat higher than the lossless run.
    """
    usual, large = (_departures(results, network) for network in ("no repair", "jumbo packets"))
    rises = [row["clean"] for row in rows_of(results["pretraining_gpt2"]["rises"], arm=f"{BOTH} in jumbo packets")]
    latest, earliest = max(step or math.inf for step in large), min(step or math.inf for step in usual)
    holds = len(large) >= 2 and latest < earliest / 2 and min(rises) > 0.5
    return Claim(holds, {"usual, earliest": earliest, "large, latest": latest, "rise, at least": min(rises)})


def sharding_helps_less_in_fine_tuning(results: Results) -> Claim:
    """Require that with sequence parallelism, losses in both phases cost more than in the reduce phase, in both tasks.

    The intervals must be apart.
    """
    falls = results["comparisons"]["03_algorithms"]
    pairs = [
        (sharded["high"], reduce["low"])  # differences of accuracy, so falls are negative
        for sharded in rows_of(falls, arm="sequence-parallel, both phases")
        for reduce in rows_of(falls, arm="direct, 4 ranks", task=sharded["task"])
    ]
    margins = [reduce - sharded for sharded, reduce in pairs]
    return Claim(len(margins) == 2 and min(margins) > 0, {"least margin": min(margins)})


def hadamard_recovers_some_in_pretraining(results: Results) -> Claim:
    """Require that Hadamard lowers the rise at 10 % loss by less than half, with intervals apart."""
    bare, spread = _arm(results, *LOST), _arm(results, SPREAD, LOST[1])
    share = 1 - spread["clean"] / bare["clean"]
    holds = spread["clean_high"] < bare["clean_low"] and 0 < share < 0.5
    return Claim(holds, {"share recovered": share, "bare, at least": bare["clean_low"], "spread": spread["clean_high"]})


def lower_rates_waste_fewer_tokens(results: Results) -> Claim:
    """Require that 3 and 1 % loss cost nats, with means within the guesses, and waste fewer tokens the lower the rate.

    The intervals of all rates must lie above 0.
    """
    rows = {rate: _arm(results, LOST[0], rate) for rate in (0.01, 0.03, 0.1)}
    holds = all(least < rows[rate]["clean"] < most for rate, (least, most) in GUESSED.items())
    holds &= all(row["clean_low"] > 0 for row in rows.values())
    wasted = {f"wasted at {rate:g}": 1 - 1 / row["clean_times_tokens"] for rate, row in rows.items()}
    return Claim(holds and [*wasted.values()] == sorted(wasted.values()), wasted)


def losing_pays_at_low_rates(results: Results) -> Claim:
    """Require that at 1 and 3 % loss and 1.25 MB in flight, waiting costs more than the most tokens in any interval.

    Waiting is timed for steps that are all communication. The share of communication from which losing pays must lie
    between a half and three quarters of a step at 3 % loss, and be smaller at 1 %.
    """
    numbers: dict[str, float] = {}
    for rate, name in ((0.01, "low"), (0.03, "higher")):
        row = _arm(results, LOST[0], rate)
        most = max(_times_tokens(row, "_high", beyond=math.inf))
        waiting = next(each["times"] for each in row["waiting"] if each["kilobytes"] == PAYS_FROM)
        numbers |= {f"tokens, at most, {rate:g}": most, f"waiting, {rate:g}": waiting}
        numbers[f"margin, {rate:g}"] = waiting - most
        mean = max(_times_tokens(row, beyond=math.inf))
        numbers[f"share at most, {name}"] = (most - 1) / (waiting - 1)
        numbers[f"share, {name}"] = (mean - 1) / (waiting - 1)  # of communication in a step, where both cost the same
    holds = all(value > 0 for name, value in numbers.items() if name.startswith("margin"))
    return Claim(holds and max(0.5, numbers["share, low"]) < numbers["share, higher"] < 0.75, numbers)


def waiting_beats_more_tokens(results: Results) -> Claim:
    """Require that up to 125 kB in flight waiting is cheaper than the wasted tokens, and that it is open beyond.

    It must be so with and without losses in evaluation, and on both axes of tokens. With most in flight, waiting must
    cost more than each estimate of the tokens.
    """
    row = _arm(results, *LOST)
    least = min(_times_tokens(row, "_low", beyond=1.0))
    numbers = {f"at {each['kilobytes']:g} kB": each["times"] for each in row["waiting"]}
    below = [each["times"] for each in row["waiting"] if each["kilobytes"] <= PAYS_UP_TO]
    above = [each["times"] for each in row["waiting"] if each["kilobytes"] > PAYS_UP_TO]
    most = max(_times_tokens(row, beyond=math.inf))
    holds = max(below) < least <= min(above, default=0) and max(above) > most
    return Claim(holds, numbers | {"least of tokens": least, "up to": PAYS_UP_TO})


def _times_tokens(row: dict[str, Any], end: str = "", *, beyond: float) -> list[float]:
    """Return how many times the tokens an arm takes, or an end of the interval, by evaluation and axis of tokens.

    `beyond` replaces what lies beyond the lossless lengths, null in the results.
    """
    return [row[f"{evaluation}_times_tokens{axis}{end}"] or beyond for evaluation in EVALUATIONS for axis in AXES]


def _arm(results: Results, arm: str, loss_rate: float) -> dict[str, Any]:
    return row_of(results["pretraining"], arm=arm, loss_rate=loss_rate)


def _departures(results: Results, network: str) -> list[int | None]:
    """Return the steps at which the seeds of GPT-2's shape depart from lossless training; None if one does not."""
    return [row["step"] for row in rows_of(results["pretraining_gpt2"]["departures"], network=network)]


def _turns(results: Results, loss_rate: float, *, repair: str = "zero", sharded: bool = False) -> list[dict[str, Any]]:
    """Return where the training loss of the small model turned, for each seed, in both phases."""
    rows = rows_of(results["pretraining_turns"], loss_rate=loss_rate, repair=repair, mtu_bytes=1500)
    return [row for row in rows if row["sequence_parallel"] == sharded]


def _fails(turns: list[dict[str, Any]]) -> bool:
    """Return whether pretraining fails, as the paper defines it: the training loss of each of three seeds rises."""
    return len(turns) >= 3 and all(map(_rises, turns))


def _succeeds(turns: list[dict[str, Any]]) -> bool:
    """Return whether there are three seeds, and pretraining does not fail."""
    return len(turns) >= 3 and not all(map(_rises, turns))


def _rises(turn: dict[str, Any]) -> bool:
    """Return whether a seed's training loss ends more than `FAILED` above its least value.

    Lossless training must rise by at least as much less between these two steps.
    """
    rise = turn["last"] - turn["least"]
    return bool(rise > FAILED and rise - turn["lossless_rise"] > FAILED)
