"""Claims about what predicts the cost: the error of a sum, inference, and the bytes that are lost together."""

import math

from lossytp.study.claims.claim import POINTS, Claim, Results, row_of, tasks


def one_law(results: Results) -> Claim:
    """Require that the law explains over 97 % of the variance, and predicts more than the share missing does."""
    shares = {task: law["r_squared"] for task, law in results["law"].items()}
    elsewhere = results["law_elsewhere"]
    better = all(each["squared_error"] > each["missing_share"] for each in elsewhere.values())
    numbers = {
        f"{task}, elsewhere by {name}": share for task, each in elsewhere.items() for name, share in each.items()
    }
    return Claim(better and all(share > 0.97 for share in shares.values()), shares | numbers)


def both_phases_cost_more(results: Results) -> Claim:
    """Require that four of five arms that lose in both phases cost more than the law says."""
    ratios = [ratio for each in results["law_both_phases"].values() for ratio in each]
    share = sum(ratio > 1 for ratio in ratios) / len(ratios)
    return Claim(share >= 0.8, {"share above the law": share, "largest ratio": max(ratios)})


def scatter_in_sst2(results: Results) -> Claim:
    """Require that arms scatter about the law as seeds do in docstrings (chi squared below 2), and more in SST-2."""
    infinite = math.inf  # which JSON lacks
    scatter = {
        task: infinite if law["chi_squared"] is None else law["chi_squared"] for task, law in results["law"].items()
    }
    return Claim(scatter["docstrings"] < 2 < scatter["sst2_held_out"], scatter)


def law_predicts_all_but_rings(results: Results) -> Claim:
    """Require that the law's intervals miss no network but rings, that four of five rings cost more than they allow."""
    rows = [row for row in results["predictions"] if row["predictor"] == "squared error"]
    rings = [row for row in rows if "ring" in row["arm"]]
    others = [row for row in rows if row not in rings]
    above = sum(row["measured"] > row["high"] for row in rings) / len(rings)
    held = sum(row["low"] <= row["measured"] <= row["high"] for row in others) / len(others)
    return Claim(held == 1 and above >= 0.8, {"others held": held, "rings above": above})


def inference_predicts_new_networks(results: Results) -> Claim:
    """Require that the intervals of the rise in inference hold nine of ten networks, with less error than the law's."""
    claim, law = _score(results, "inference rise"), _score(results, "squared error")
    return Claim(claim["share held"] >= 0.9 and claim["error, points"] < law["error, points"], claim)


def lossless_runs_explain_most_of_the_bias(results: Results) -> Claim:
    """Require that the new seeds' lossless runs were better than the headline's by half of each bias or more."""
    biases = {name: _score(results, name)["bias, points"] for name in ("squared error", "inference rise")}
    better = POINTS * results["lossless_of_new_seeds"]
    return Claim(all(0 < bias < 2 * better for bias in biases.values()), biases | {"lossless": better})


def bytes_lost_together_cost_more(results: Results) -> Claim:
    """Require that messages cost more than elements, with intervals apart, and that falls only rise in docstrings."""
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
    """Require that packets of 1500 bytes are shown to cost more than the smallest, in each task."""
    lows = {row["task"]: POINTS * row["low"] for row in results["packet_size"] if row["mtu_bytes"] == 1500}
    return Claim(len(lows) == len(tasks(results)) and all(low > 0 for low in lows.values()), lows)


def shared_losses_cost_more(results: Results) -> Claim:
    """Require that losses that strike all links at once cost more than each link's own, in each task."""
    rows = [row_of(results["comparisons"]["02_shared"], task, "losses all shared") for task in tasks(results)]
    return Claim(all(row["gain_high"] < 0 for row in rows), {row["task"]: POINTS * row["gain_high"] for row in rows})


def _score(results: Results, predictor: str) -> dict[str, float]:
    (row,) = (row for row in results["prediction_scores"] if (row["predictor"], row["kind"]) == (predictor, "all"))
    points = {f"{name}, points": POINTS * row[name] for name in ("error", "bias")}
    return {"share held": row["covered"] / row["arms"], **points}
