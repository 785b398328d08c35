"""Claims about what predicts the cost: the error of a sum, inference, and the bytes that are lost together."""

import math

from lossytp.study.claims.claim import POINTS, Claim, Results, row_of, rows_of, shown, tasks


def one_law(results: Results) -> Claim:
    """Require that the law explains over 97 % of the variance, and predicts more than the share missing does.

    The costliest arm of each task must be a ring of eight ranks.
    """
    shares = {task: law["r_squared"] for task, law in results["law"].items()}
    elsewhere = results["law_elsewhere"]
    better = all(each["squared_error"] > each["missing_share"] for each in elsewhere.values())
    numbers = {
        f"{task}, elsewhere by {name}": share for task, each in elsewhere.items() for name, share in each.items()
    }
    reduced = [row for row in results["law_arms"] if not row["both_phases"]]
    costliest = [
        max((row for row in reduced if row["task"] == task), key=lambda row: row["squared_error"])
        for task in tasks(results)
    ]
    rings = all((row["algorithm"], row["ranks"]) == ("ring", 8) for row in costliest)
    return Claim(better and rings and all(share > 0.97 for share in shares.values()), shares | numbers)


def both_phases_cost_more(results: Results) -> Claim:
    """Require that arms that lose in both phases cost more than the law says: all in docstrings, not all in SST-2.

    Arms count if the law expects a fall of more than two standard errors.
    """
    ratios = results["law_both_phases"]
    shares = {task: sum(ratio > 1 for ratio in each) / len(each) for task, each in ratios.items()}
    holds = shares["docstrings"] == 1 and 0.25 < min(shares.values()) < 0.75
    return Claim(holds, {f"share above the law, {task}": share for task, share in shares.items()})


def arms_scatter_as_seeds_do(results: Results) -> Claim:
    """Require that arms deviate from the law by at most twice what seeds alone make, squared."""
    infinite = math.inf  # which JSON lacks
    scatter = {
        task: infinite if law["chi_squared"] is None else law["chi_squared"] for task, law in results["law"].items()
    }
    return Claim(max(scatter.values()) < 2, scatter)


def law_misses_rings(results: Results) -> Claim:
    """Require that the law's intervals miss all rings of the reduce phase, from below, and no other network."""
    rows = rows_of(results["predictions"], predictor="squared error")
    missed = [row for row in rows if not row["low"] <= row["measured"] <= row["high"]]
    reduced = [row for row in rows if row["kind"] == "reduce phase"]
    rings = [row for row in reduced if "ring" in row["arm"]]
    times = [row["measured"] / row["fall"] for row in rings]
    numbers = {"missed": len(missed), "rings": len(rings), "reduce phase": len(reduced)}
    return Claim(missed == rings and min(times) > 1, numbers | {"least": min(times), "most": max(times)})


def inference_predicts_new_networks(results: Results) -> Claim:
    """Require that the intervals of the rise in inference hold nine of ten networks.

    On the networks that both predict, its error must be at most the law's.
    """
    row = row_of(results["prediction_scores"], predictor="inference rise", kind="all")
    errors = {name: POINTS * error for name, error in results["shared_prediction_errors"].items()}
    held = row["covered"] / row["arms"]
    return Claim(held >= 0.9 and errors["inference rise"] <= errors["squared error"], {"share held": held, **errors})


def falls_exceed_predictions(results: Results) -> Claim:
    """Require that falls exceed predictions on average, and that the new lossless runs are better than others."""
    numbers = {row["predictor"]: POINTS * row["bias"] for row in results["prediction_scores"] if row["kind"] == "all"}
    numbers["lossless"] = POINTS * results["lossless_of_new_seeds"]
    return Claim(min(numbers.values()) > 0, numbers)


def bytes_lost_together_cost_more(results: Results) -> Claim:
    """Require that messages cost more than elements, with intervals apart.

    In docstrings no fall may shrink as the bytes grow.
    """
    numbers: dict[str, float] = {}
    holds = True
    for task in tasks(results):
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
    """Require in each task that packets of 1500 bytes cost more than the smallest; the largest are not shown to."""
    lows = {row["task"]: POINTS * row["low"] for row in rows_of(results["packet_size"], mtu_bytes=1500)}
    planned = rows_of(results["comparisons"]["10_packets_again"], arm="packets of 9000 bytes")
    holds = len(lows) == len(planned) == len(tasks(results)) and not any(shown(row["gain_p_holm"]) for row in planned)
    return Claim(holds and min(lows.values()) > 0, lows)


def law_holds_for_small_packets(results: Results) -> Claim:
    """Require that the intervals of all new falls without repair, with small packets, hold the prediction.

    At 30 % loss the interval must not hold the law of the usual packets.
    """
    new = rows_of(results["small_packets"], known=False, repair="zero")
    holds = len(new) == 3 and all(row["low"] <= row["predicted"] <= row["high"] for row in new)
    law, most = results["law"]["docstrings"], row_of(new, loss_rate=0.3)
    unscaled = law["scale"] * most["squared_error"] ** law["exponent"]
    numbers = {f"at {row['loss_rate']:g}, less predicted": POINTS * (row["fall"] - row["predicted"]) for row in new}
    numbers["most at 0.3"], numbers["usual packets"] = POINTS * most["high"], POINTS * unscaled
    return Claim(holds and unscaled > most["high"], numbers)


def shared_losses_cost_more(results: Results) -> Claim:
    """Require that losses that strike all links at once cost more than each link's own, in each task."""
    rows = [row_of(results["comparisons"]["02_shared"], task=task, arm="losses all shared") for task in tasks(results)]
    return Claim(all(row["gain_high"] < 0 for row in rows), {row["task"]: POINTS * row["gain_high"] for row in rows})
