"""Claims about other parallelisms and implementations."""

from typing import Any

from lossytp.study.claims.claim import POINTS, Claim, Results, row_of, rows_of, shown, tasks
from lossytp.study.statistics import ONE_POINT


def pipelines_collapse(results: Results) -> Claim:
    """Require that a pipeline falls by over a point at 1 % loss, and by less with the exact adjoint, in each task."""
    arms = rows_of(results["comparisons"]["07_parallelisms"], loss_rate=0.01)
    numbers: dict[str, float] = {}
    holds = True
    for task in tasks(results):
        plain, exact = (row_of(arms, task=task, arm=f"{arm}, zero") for arm in ("pp 2", "pp 2 exact adjoint"))
        holds &= plain["high"] < min(-ONE_POINT, exact["low"])
        numbers[task] = -POINTS * plain["high"]
    return Claim(holds, numbers)


def data_parallelism_bears_more(results: Results) -> Claim:
    """Require that at 10 % loss DDP keeps more accuracy in docstrings, after Holm's correction.

    It must lose less than half as many packets.
    """
    row = _against_tensor_parallelism(results, "ddp 2", "docstrings")
    arms = rows_of(results["comparisons"]["07_parallelisms"], task="docstrings", loss_rate=0.1)
    copies, tensor = (row_of(arms, arm=f"{arm}, zero")["lost_a_step"] for arm in ("ddp 2", "tp 2"))
    holds = row["difference"] > 0 and shown(row["p_holm"]) and 2 * copies < tensor
    return Claim(holds, {row["task"]: POINTS * row["difference"], "packets lost": copies / tensor})


def sharded_data_parallelism_bears_less(results: Results) -> Claim:
    """Require that at 10 % loss FSDP keeps less accuracy, after Holm's correction, in each task."""
    rows = [_against_tensor_parallelism(results, "fsdp 2", task) for task in tasks(results)]
    holds = all(row["difference"] < 0 and shown(row["p_holm"]) for row in rows)
    return Claim(holds, {row["task"]: POINTS * row["difference"] for row in rows})


def bias_before_the_sum_costs_more(results: Results) -> Claim:
    """Require that layers that add biases before the sum keep less, with equal losses, after Holm's correction."""
    before, after = (
        row_of(results["comparisons"]["07_implementations"], task="docstrings", arm=a) for a in ("dtensor", "megatron")
    )
    holds = before["lost_a_step"] == after["lost_a_step"] and before["gain"] < 0 and shown(before["gain_p_holm"])
    return Claim(holds, {"docstrings": -POINTS * before["gain"]})


def _against_tensor_parallelism(results: Results, arm: str, task: str) -> dict[str, Any]:
    """Return how a parallelism differs from tensor parallelism at 10 % loss, with zeros for what is lost."""
    return row_of(results["parallelisms"], arm=arm, repair="zero", loss_rate=0.1, task=task)
