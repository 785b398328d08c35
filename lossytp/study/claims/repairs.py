"""Claims about repairs of the small model."""

from lossytp.study.claims.claim import POINTS, Claim, Results, better, row_of, shown, tasks


def hadamard_helps_the_small_model(results: Results) -> Claim:
    """Require that Hadamard costs less than no repair on fresh seeds, after Holm's correction, in each task."""
    rows = [row_of(results["comparisons"]["06_repair_again"], task=task, arm="hadamard(64)") for task in tasks(results)]
    return Claim(all(better(row, "gain") for row in rows), {row["task"]: POINTS * row["gain"] for row in rows})


def hadamard_gains_little_in_small_packets(results: Results) -> Claim:
    """Require that with small packets a gain of Hadamard is not shown, and that two points or more are ruled out."""
    row = row_of(results["comparisons"]["06_repair_of_small_packets"], task="docstrings", arm="hadamard(64)")
    numbers = {name: POINTS * row[name] for name in ("gain", "gain_low", "gain_high")}
    return Claim(not shown(row["gain_p_holm"]) and numbers["gain_high"] < 2, numbers)


def protection_helps_with_small_packets(results: Results) -> Claim:
    """Require that with small packets protection with Hadamard costs less than no repair, after Holm's correction."""
    rows = results["comparisons"]["06_repair_of_small_packets"]
    row = row_of(rows, task="docstrings", arm="protect(0.1) + hadamard(64)")
    return Claim(better(row, "gain"), {"gain": POINTS * row["gain"]})


def stale_harms(results: Results) -> Claim:
    """Require that stale values cost more than zeros, after Holm's correction, in each task."""
    rows = [row_of(results["comparisons"]["06_repair"], task=task, arm="stale") for task in tasks(results)]
    return Claim(
        all(row["gain"] < 0 and shown(row["gain_p_holm"]) for row in rows),
        {row["task"]: POINTS * row["gain"] for row in rows},
    )


def rescaling_harms_both_phases(results: Results) -> Claim:
    """Require that rescaling is not shown to gain in the reduce phase, and loses in both, after Holm's correction."""
    arms = results["comparisons"]
    rows = [row_of(arms["06_repair_of_both_phases"], task=task, arm="rescale") for task in tasks(results)]
    once = [row_of(arms["06_repair"], task=task, arm="rescale") for task in tasks(results)]
    holds = all(row["gain"] < 0 and shown(row["gain_p_holm"]) for row in rows)
    holds &= not any(better(row, "gain") for row in once)
    return Claim(holds, {row["task"]: POINTS * row["gain"] for row in rows})


def retransmission_is_cheap(results: Results) -> Claim:
    """Require that selective repeat takes less than twice as long, up to 10 % loss and 125 kB in flight."""
    in_flight = 125
    prices = [
        row["price"]
        for row in results["price"]
        if row["transport"] == "selective repeat" and row["loss_rate"] <= 0.1 and row["kilobytes"] <= in_flight
    ]
    return Claim(max(prices) < 2, {"largest price": max(prices), "kilobytes in flight": in_flight})
