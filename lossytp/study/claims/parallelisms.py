"""Claims about other parallelisms and implementations."""

from typing import Any

from lossytp.study.claims.claim import POINTS, Claim, Results, row_of, shown, tasks
from lossytp.study.statistics import ONE_POINT


def pipelines_collapse(results: Results) -> Claim:
    """Require that a pipeline falls by over a point at 1 % loss, and by less with the exact adjoint, in each task."""
    arms = results["comparisons"]["07_parallelisms"]
    numbers: dict[str, float] = {}
    holds = True
    for task in tasks(results):
        plain, exact = (row_of(arms, task, f"{arm}, zero", 0.01) for arm in ("pp 2", "pp 2 exact adjoint"))
        holds &= plain["high"] < min(-ONE_POINT, exact["low"])
        numbers[task] = -POINTS * plain["high"]
    return Claim(holds, numbers)


def data_parallelism_bears_more(results: Results) -> Claim:
    """Require that at 10 % loss DDP keeps more accuracy in docstrings, after Holm's correction."""
    row = _against_tensor_parallelism(results, "ddp 2", "docstrings")
    return Claim(row["difference"] > 0 and shown(row["p_holm"]), {row["task"]: POINTS * row["difference"]})


def sharded_data_parallelism_bears_less(results: Results) -> Claim:
    """Require that at 10 % loss FSDP keeps less accuracy, after Holm's correction, in each task."""
    rows = [_against_tensor_parallelism(results, "fsdp 2", task) for task in tasks(results)]
    holds = all(row["difference"] < 0 and shown(row["p_holm"]) for row in rows)
    return Claim(holds, {row["task"]: POINTS * row["difference"] for row in rows})


def bias_before_the_sum_costs_more(results: Results) -> Claim:
    """Require that layers that add biases before the sum keep less, with equal losses, after Holm's correction."""
    before, after = (
        row_of(results["comparisons"]["07_implementations"], "docstrings", a) for a in ("dtensor", "megatron")
    )
    holds = before["lost_a_step"] == after["lost_a_step"] and before["gain"] < 0 and shown(before["gain_p_holm"])
    return Claim(holds, {"docstrings": -POINTS * before["gain"]})


def _against_tensor_parallelism(results: Results, arm: str, task: str) -> dict[str, Any]:
    """Return how a parallelism differs from tensor parallelism at 10 % loss, with zeros for what is lost."""
    wanted = (arm, "zero", 0.1, task)
    keys = ("arm", "repair", "loss_rate", "task")
    (row,) = (row for row in results["parallelisms"] if tuple(row[key] for key in keys) == wanted)
    return dict(row)
