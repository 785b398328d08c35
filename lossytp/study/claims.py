"""The paper's claims: each with the condition on the results under which its sentence is true.

A sentence stands in the paper as `#claim("name")[...]`. Typesetting stops if its condition does not hold, and names the
claim, its numbers and the sentence. Falls are in points of accuracy, rises in nats a token.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lossytp.study.analysis.real_model import COLLAPSE_NATS, USUAL
from lossytp.study.statistics import CONFIDENCE, ONE_POINT

POINTS = 100
Results = dict[str, Any]


class Claim(NamedTuple):
    """Whether a claim's sentence is true, and the numbers that decide."""

    holds: bool
    numbers: dict[str, float]


def small_losses_cost_nothing(results: Results) -> Claim:
    """Require that no fall is shown up to 1 % loss, and that its interval ends below one point there, in each task."""
    rows = [row for row in results["tolerance_contrasts"] if 0 < row["loss_rate"] <= 0.01]
    numbers = {f"{row['task']} at {row['loss_rate']:g}": -POINTS * row["low"] for row in rows}
    holds = all(not _shown(row["p_holm"]) and -row["low"] < ONE_POINT for row in rows)
    return Claim(holds and {row["task"] for row in rows} == set(_tasks(results)), numbers)


def both_phases_cost_more(results: Results) -> Claim:
    """Require that four of five arms that lose in both phases cost more than the law says."""
    ratios = [ratio for each in results["law_both_phases"].values() for ratio in each]
    share = sum(ratio > 1 for ratio in ratios) / len(ratios)
    return Claim(share >= 0.8, {"share above the law": share, "largest ratio": max(ratios)})


def one_law(results: Results) -> Claim:
    """Require that the law explains over 97 % of the variance, and predicts more than the share missing does."""
    shares = {task: law["r_squared"] for task, law in results["law"].items()}
    elsewhere = results["law_elsewhere"]
    better = all(each["squared_error"] > each["missing_share"] for each in elsewhere.values())
    numbers = {
        f"{task}, elsewhere by {name}": share for task, each in elsewhere.items() for name, share in each.items()
    }
    return Claim(better and all(share > 0.97 for share in shares.values()), shares | numbers)


def law_predicts_new_networks(results: Results) -> Claim:
    """Require that the law's intervals hold nine of ten networks that were predicted beforehand."""
    return _predicts(results, "squared error")


def inference_predicts_new_networks(results: Results) -> Claim:
    """Require the same of the rise in inference, with an error at most half a point above the law's."""
    claim, law = _predicts(results, "inference rise"), _predicts(results, "squared error")
    as_good = claim.numbers["error, points"] <= law.numbers["error, points"] + 0.5
    return Claim(claim.holds and as_good, claim.numbers)


def _predicts(results: Results, predictor: str) -> Claim:
    (row,) = (row for row in results["prediction_scores"] if (row["predictor"], row["kind"]) == (predictor, "all"))
    numbers = {"share held": row["covered"] / row["arms"], "error, points": POINTS * row["error"]}
    return Claim(numbers["share held"] >= 0.9, numbers)


def bytes_lost_together_cost_more(results: Results) -> Claim:
    """Require that messages cost more than elements, with intervals apart, and that falls only rise in docstrings."""
    numbers: dict[str, float] = {}
    holds = True
    for task in _tasks(results):
        rows = sorted((row for row in results["together"] if row["task"] == task), key=lambda row: row["bytes"])
        holds &= rows[-1]["low"] > rows[0]["high"]
        falls = [row["fall"] for row in rows]
        holds &= task != "docstrings" or falls == sorted(falls)
        numbers |= {
            f"{task}, most of the least": POINTS * rows[0]["high"],
            f"{task}, least of the most": POINTS * rows[-1]["low"],
        }
    return Claim(holds, numbers)


def packet_size_matters(results: Results) -> Claim:
    """Require that packets of 1500 bytes are shown to cost more than the smallest, in each task."""
    lows = {row["task"]: POINTS * row["low"] for row in results["packet_size"] if row["mtu_bytes"] == 1500}
    return Claim(len(lows) == len(_tasks(results)) and all(low > 0 for low in lows.values()), lows)


def longer_training_regains(results: Results) -> Claim:
    """Require that the longest training regains about half of the fall in docstrings, and is not shown to in SST-2."""
    lows = {row["task"]: POINTS * row["gain"]["low"] for row in results["regained"]}
    gain = next(row["gain"]["value"] for row in results["regained"] if row["task"] == "docstrings")
    steps = min(row["max_steps"] for row in results["lengths"])
    (before,) = (
        row["fall"]
        for row in results["lengths"]
        if (row["task"], row["network"], row["max_steps"]) == ("docstrings", "30 %, one phase", steps)
    )
    holds = lows["docstrings"] > 0 >= lows["sst2_held_out"] and 0.4 < gain / before < 0.6
    return Claim(holds, lows | {"share regained in docstrings": gain / before})


def a_fall_remains(results: Results) -> Claim:
    """Require that docstrings still falls by over a point after the longest training, at 30 %, or 10 % both ways."""
    rows = [row for row in results["lengths"] if row["task"] == "docstrings" and row["max_steps"] == 600]
    lows = {
        row["network"]: POINTS * row["low"]
        for row in rows
        if row["network"] in ("30 %, one phase", "10 %, both phases")
    }
    return Claim(len(lows) == 2 and all(low > POINTS * ONE_POINT for low in lows.values()), lows)


def hadamard_helps_the_small_model(results: Results) -> Claim:
    """Require that Hadamard costs less than no repair on fresh seeds, after Holm's correction, in each task."""
    rows = [_row(results["comparisons"]["06_repair_again"], task, "hadamard(64)") for task in _tasks(results)]
    return Claim(all(_better(row, "gain") for row in rows), {row["task"]: POINTS * row["gain"] for row in rows})


def hadamard_does_not_help_the_real_model(results: Results) -> Claim:
    """Require that Hadamard raises the median block more than no repair does, and its mean is not shown to be lower."""
    numbers: dict[str, float] = {}
    holds = True
    ratios = []
    for rate, by_repair in _real(results):
        hadamard, none = by_repair["hadamard(64)"], by_repair["zero"]
        holds &= hadamard["high"] >= none["low"] and hadamard["median"] > none["median"]
        ratios.append(hadamard["median"] / none["median"])
        numbers |= {f"hadamard at {rate:g}": hadamard["rise"], f"none at {rate:g}": none["rise"]}
    return Claim(holds, numbers | {"least ratio of medians": min(ratios)})


def protection_ends_the_collapse(results: Results) -> Claim:
    """Require that blocks collapse without a repair, and none does with protection, alone or with Hadamard."""
    numbers: dict[str, float] = {}
    holds = True
    for rate, by_repair in _real(results):
        none = by_repair["zero"]
        for repair in ("protect(0.01)", "protect(0.01) + hadamard(64)"):
            holds &= by_repair[repair]["collapsed"] == 0 and by_repair[repair]["rise"] < none["rise"]
        numbers[f"collapsed at {rate:g}"] = none["collapsed"]
    return Claim(holds and min(numbers.values()) > 0, numbers)


def random_protection_is_not_enough(results: Results) -> Claim:
    """Require that, at the highest rate, blocks collapse and rise more if as many packets are protected at random."""
    *_, (_, by_repair) = _real(results)
    control, protected = by_repair["protect(0.01, 'random')"], by_repair["protect(0.01)"]
    numbers = {"collapsed": control["collapsed"], "least rise": control["low"], "protected": protected["high"]}
    return Claim(control["collapsed"] > 0 and control["low"] > protected["high"], numbers)


def single_packets_destroy_blocks(results: Results) -> Claim:
    """Require that the strongest packet, lost alone, collapses every block, and that no usual packet costs 0.1 nats."""
    packet = results["strongest_packet"]
    numbers = {name: packet[name] for name in ("norm", "usual_norm", "least_rise", "usual_rise")}
    return Claim(packet["least_rise"] > COLLAPSE_NATS and packet["usual_rise"] < 0.1, numbers)


def forward_losses_hurt(results: Results) -> Claim:
    """Require that the backward pass alone is not shown to cost anything, and costs less than the forward pass."""
    arms = results["comparisons"]["04_where"]
    numbers: dict[str, float] = {}
    holds = True
    for task in _tasks(results):
        forward, backward = _row(arms, task, "forward only"), _row(arms, task, "backward only")
        holds &= not _shown(backward["p_holm"]) and backward["difference"] > forward["high"]
        numbers |= {
            f"{task}, backward": -POINTS * backward["difference"],
            f"{task}, forward": -POINTS * forward["high"],
        }
    return Claim(holds, numbers)


def first_layer_costs_most(results: Results) -> Claim:
    """Require that the first layer's interval lies above every later layer's mean, in docstrings."""
    rows = [row for row in results["comparisons"]["04_where"] if row["task"] == "docstrings"]
    first, *later = (row for row in rows if row["arm"].startswith("layers"))
    highest = max(-row["difference"] for row in later)
    return Claim(-first["high"] > highest, {"first": -POINTS * first["high"], "later": POINTS * highest})


def evaluation_alone_costs_less(results: Results) -> Claim:
    """Require that losses in evaluation alone cost less than in training and evaluation, in docstrings, at 30 %."""
    (alone,) = (
        row
        for row in results["sensitivity"]
        if (row["task"], row["trained_at"], row["evaluated_at"]) == ("docstrings", 0.0, 0.3)
    )
    both = _row(results["tolerance_contrasts"], "docstrings", loss_rate=0.3)
    numbers = {"evaluation": -POINTS * alone["mean_low"], "training too": -POINTS * both["high"]}
    return Claim(numbers["evaluation"] < numbers["training too"], numbers)


def shared_losses_cost_more(results: Results) -> Claim:
    """Require that losses that strike all links at once cost more than each link's own, in each task."""
    rows = [_row(results["comparisons"]["02_shared"], task, "losses all shared") for task in _tasks(results)]
    return Claim(all(row["gain_high"] < 0 for row in rows), {row["task"]: POINTS * row["gain_high"] for row in rows})


def stale_harms(results: Results) -> Claim:
    """Require that stale values cost more than zeros, after Holm's correction, in each task."""
    rows = [_row(results["comparisons"]["06_repair"], task, "stale") for task in _tasks(results)]
    return Claim(
        all(row["gain"] < 0 and _shown(row["gain_p_holm"]) for row in rows),
        {row["task"]: POINTS * row["gain"] for row in rows},
    )


def pipelines_collapse(results: Results) -> Claim:
    """Require that a pipeline falls by over a point at 1 % loss, and by less with the exact adjoint, in each task."""
    arms = results["comparisons"]["07_parallelisms"]
    numbers: dict[str, float] = {}
    holds = True
    for task in _tasks(results):
        plain, exact = (_row(arms, task, f"{arm}, zero", 0.01) for arm in ("pp 2", "pp 2 exact adjoint"))
        holds &= plain["high"] < min(-ONE_POINT, exact["low"])
        numbers[task] = -POINTS * plain["high"]
    return Claim(holds, numbers)


def data_parallelism_bears_more(results: Results) -> Claim:
    """Require that at 10 % loss DDP keeps more accuracy in docstrings, after Holm's correction."""
    row = _against_tensor_parallelism(results, "ddp 2", "docstrings")
    return Claim(row["difference"] > 0 and _shown(row["p_holm"]), {row["task"]: POINTS * row["difference"]})


def sharded_data_parallelism_bears_less(results: Results) -> Claim:
    """Require that at 10 % loss FSDP keeps less accuracy, after Holm's correction, in each task."""
    rows = [_against_tensor_parallelism(results, "fsdp 2", task) for task in _tasks(results)]
    holds = all(row["difference"] < 0 and _shown(row["p_holm"]) for row in rows)
    return Claim(holds, {row["task"]: POINTS * row["difference"] for row in rows})


def bias_before_the_sum_costs_more(results: Results) -> Claim:
    """Require that layers that add biases before the sum keep less, with equal losses, after Holm's correction."""
    before, after = (
        _row(results["comparisons"]["07_implementations"], "docstrings", a) for a in ("dtensor", "megatron")
    )
    holds = before["lost_a_step"] == after["lost_a_step"] and before["gain"] < 0 and _shown(before["gain_p_holm"])
    return Claim(holds, {"docstrings": -POINTS * before["gain"]})


def rescaling_harms_both_phases(results: Results) -> Claim:
    """Require that rescaling is not shown to gain in one phase, and loses in both, after Holm's correction."""
    arms = results["comparisons"]
    rows = [_row(arms["06_repair_of_both_phases"], task, "rescale") for task in _tasks(results)]
    once = [_row(arms["06_repair"], task, "rescale") for task in _tasks(results)]
    holds = all(row["gain"] < 0 and _shown(row["gain_p_holm"]) for row in rows)
    holds &= not any(_better(row, "gain") for row in once)
    return Claim(holds, {row["task"]: POINTS * row["gain"] for row in rows})


def scatter_in_sst2(results: Results) -> Claim:
    """Require that arms scatter about the law as seeds do in docstrings (chi squared below 2), and more in SST-2."""
    infinite = math.inf  # which JSON lacks
    scatter = {
        task: infinite if law["chi_squared"] is None else law["chi_squared"] for task, law in results["law"].items()
    }
    return Claim(scatter["docstrings"] < 2 < scatter["sst2_held_out"], scatter)


def training_with_loss_does_not_pay(results: Results) -> Claim:
    """Require that training with losses never shows a gain, and does show less sensitivity to loss."""
    better = [row for row in results["robustness"] if _shown(row["p_holm"])]
    best = max((row["difference"] for row in better), default=0.0)
    (less_sensitive,) = (
        row
        for row in results["sensitivity"]
        if (row["task"], row["trained_at"], row["evaluated_at"]) == ("docstrings", 0.3, 0.3)
    )
    holds = best <= 0 and less_sensitive["difference"] > 0 and _shown(less_sensitive["p_holm"])
    return Claim(holds, {"largest difference that is shown": POINTS * best})


def retransmission_is_cheap(results: Results) -> Claim:
    """Require that selective repeat takes less than twice as long, up to 10 % loss and 125 kB in flight."""
    in_flight = 125
    prices = [
        row["price"]
        for row in results["price"]
        if row["transport"] == "selective repeat"
        and row["loss_rate"] <= 0.1
        and row["bandwidth_gbits"] * row["round_trip_us"] / 8 <= in_flight
    ]
    return Claim(max(prices) < 2, {"largest price": max(prices), "kilobytes in flight": in_flight})


CLAIMS: dict[str, Callable[[Results], Claim]] = {
    claim.__name__: claim
    for claim in (
        small_losses_cost_nothing,
        both_phases_cost_more,
        one_law,
        law_predicts_new_networks,
        inference_predicts_new_networks,
        bytes_lost_together_cost_more,
        packet_size_matters,
        longer_training_regains,
        a_fall_remains,
        hadamard_helps_the_small_model,
        hadamard_does_not_help_the_real_model,
        protection_ends_the_collapse,
        random_protection_is_not_enough,
        single_packets_destroy_blocks,
        forward_losses_hurt,
        first_layer_costs_most,
        evaluation_alone_costs_less,
        shared_losses_cost_more,
        stale_harms,
        pipelines_collapse,
        data_parallelism_bears_more,
        sharded_data_parallelism_bears_less,
        bias_before_the_sum_costs_more,
        rescaling_harms_both_phases,
        scatter_in_sst2,
        training_with_loss_does_not_pay,
        retransmission_is_cheap,
    )
}


def check_claims(results: Results) -> dict[str, dict[str, Any]]:
    """Return, for each claim, whether it `holds` and its `numbers`."""
    checked = {name: claim(results) for name, claim in CLAIMS.items()}
    return {name: {"holds": claim.holds, "numbers": _finite(claim.numbers)} for name, claim in checked.items()}


def _finite(numbers: dict[str, float]) -> dict[str, float | None]:
    """Return the numbers with null for infinity, which JSON lacks."""
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


def _tasks(results: Results) -> list[str]:
    return list(results["tasks"])


def _row(
    rows: list[dict[str, Any]], task: str, arm: str | None = None, loss_rate: float | None = None
) -> dict[str, Any]:
    """Return the row of a task and, if given, arm and loss rate.

    Raises:
        ValueError: if there is not exactly one.
    """
    found = [
        row
        for row in rows
        if row["task"] == task and arm in (None, row["arm"]) and loss_rate in (None, row["loss_rate"])
    ]
    if len(found) != 1:
        raise ValueError(
            f"{len(found)} rows of {task} are of arm {arm!r} and loss rate {loss_rate}: give one that is there"
        )
    return found[0]


def _against_tensor_parallelism(results: Results, arm: str, task: str) -> dict[str, Any]:
    """Return how a parallelism differs from tensor parallelism at 10 % loss, with zeros for what is lost."""
    wanted = (arm, "zero", 0.1, task)
    keys = ("arm", "repair", "loss_rate", "task")
    (row,) = (row for row in results["parallelisms"] if tuple(row[key] for key in keys) == wanted)
    return dict(row)


def _real(results: Results) -> Iterator[tuple[float, dict[str, dict[str, Any]]]]:
    """Yield each loss rate at which repairs were tried on the real model's usual network, with its rows by repair."""
    rows = [row for row in results["real_model"] if {name: row[name] for name in USUAL} == USUAL]
    for rate in sorted({row["loss_rate"] for row in rows if row["repair"] != "zero"}):
        yield rate, {row["repair"]: row for row in rows if row["loss_rate"] == rate}


def _better(row: dict[str, Any], name: str) -> bool:
    return bool(row[name] > 0 and _shown(row[f"{name}_p_holm"]))


def _shown(p: float | None) -> bool:
    """Return whether a corrected p-value shows a difference; null stands for a test that was not possible."""
    return p is not None and p < 1 - CONFIDENCE
