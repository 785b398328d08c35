"""Which parallelism tolerates packet loss best, and what does each send?"""

from typing import Any

import pandas as pd

from lossytp.network.losses import Bernoulli, LossProcess
from lossytp.study.statistics import ONE_POINT
from lossytp.study.tables import ACCURACIES
from lossytp.training.config import RunSettings, settings_class
from paper.comparisons import compare_arms, json_rows, lossy_changes, mean_by_arm, speed_and_traffic
from paper.repairs import drops_against
from paper.study import POINTS, Claim, Results, Study, claim, row_of, rows_of, shown, tasks


def label(config: RunSettings, layers: str | None = None) -> str:
    """Describe a run's parallelism and repair, such as "dp 2 (pytorch fsdp) x tp 2 (lossytp), rescale".

    `layers` says whose tensor-parallel layers ran, if not the configuration's.
    """
    kinds = {
        "dp": (
            config.parallelism.data_parallel_size,
            f"{config.parallelism.data_parallel_implementation} {config.parallelism.data_parallel_type}",
        ),
        "pp": (config.parallelism.pipeline_parallel_size, config.parallelism.pipeline_schedule),
        "tp": (config.network.tensor_parallel_size, layers or config.parallelism.tensor_parallel_layers),
    }
    words = [" x ".join(f"{axis} {size} ({kind})" for axis, (size, kind) in kinds.items() if size > 1) or "one process"]
    words += [config.network.repair] * (config.network.repair != "zero")
    words += ["bf16"] * config.compute.bf16
    words += ["clipped"] * (config.optimizer.gradient_clipping is not None)
    words += ["exact adjoint"] * config.parallelism.exact_adjoint
    return ", ".join(words)


def losses_of(process: LossProcess) -> str:
    """Describe a loss process, such as "no losses", "5 %" or "5 % in bursts of 8"."""
    rate, burst = process.loss_rate, process.mean_burst_packets
    bursts = "" if isinstance(process, Bernoulli) else f" in bursts of {burst:.3g}"
    return f"{100 * rate:.3g} %{bursts}" if rate else "no losses"


def training_curves(records: list[dict]) -> pd.DataFrame:
    """Return the training loss of every run and step, with its `task`, `parallelism`, `losses` and `seed`."""
    return pd.DataFrame([_named(record) | point for record in records for point in record["curves"]["train_loss"]])


def compare(records: list[dict]) -> pd.DataFrame:
    """Tabulate task, parallelism, losses, accuracy, and `run_measures.speed_and_traffic`, one row per record.

    Step times compare only between runs on one otherwise idle machine.
    """
    rows = [
        _named(record)
        | {name: record[name] for name in ("processes", "status")}
        | {name: record["final"][name] for name in ACCURACIES}
        | {"replica_drift": record["curves"]["eval"][-1]["replica_drift"] if record["curves"]["eval"] else None}
        for record in records
    ]
    table = pd.DataFrame(rows).join(speed_and_traffic(records))
    return table.sort_values(["task", "parallelism", "loss_rate", "losses", "seed"], ignore_index=True)


def _named(record: dict) -> dict[str, Any]:
    """Return what tells a run from the others."""
    config = settings_class(record["config"]).from_dict(record["config"])
    return {
        "task": config.task,
        "parallelism": label(config, record["implementation"]),
        "loss_rate": config.network.process_rate,
        "losses": losses_of(config.network.process()),
        "seed": config.network.seed,
    }


def traffic_a_step(record: dict) -> dict[str, float]:
    """Return the collectives and packets of a training step, `collectives_forward`, `packets_backward` and so on.

    A collective that loses packets in both phases is one, although its record counts a message for each phase.
    """
    traffic, steps = record["network"]["training"], record["timing"]["steps"]
    messages, phases = traffic["messages"]["by_direction"], len(traffic["by_phase"])
    found = {}
    for direction, packets in traffic["by_direction"].items():
        found[f"collectives_{direction}"] = messages[direction]["called"] / phases / steps
        found[f"packets_{direction}"] = packets["packets"] / steps
    return found


def against_tensor_parallelism(table: pd.DataFrame) -> pd.DataFrame:
    """Compute how much more accuracy each parallelism keeps than "tp 2", at equal loss rate and repair.

    Args:
        table: from `read_experiment`. Only arms named by parallelism and repair count, such as "tp 2, zero":
            others differ in more.

    Returns:
        The columns of `comparisons.compare_arms`, for the change in accuracy against the seed's lossless run; `arm` is
        the parallelism.
    """
    within = ("task", "repair", "loss_rate")
    lossy = lossy_changes(table, within=["task"])
    lossy = lossy[lossy["arm"].str.fullmatch(r"\w+ \d+, .+")]
    lossy = lossy.assign(arm=lossy["arm"].str.split(",").str[0])
    return compare_arms(lossy, reference="tp 2", outcome="change", within=within)


HIDDEN = "rescale|clipped"  # arms of parallelisms that lie on others in the figure; the appendix lists them


def parallelisms(study: Study) -> dict[str, Any]:
    """Return which parallelism bears loss best."""
    if "07_parallelisms" not in study.comparisons:
        return {}
    axes = {"loss_rate": "packet loss rate", "lost_a_step": "packets lost a step"}
    table = study.comparisons["07_parallelisms"]
    alone = table[~table["arm"].str.contains(HIDDEN, regex=True)]
    study.draw(drops_against(alone, axes), "parallelisms")
    return {"parallelisms": json_rows(against_tensor_parallelism(study.complete("07_parallelisms")[0]))}


def implementations(study: Study) -> dict[str, Any]:
    """Return what each implementation of tensor parallelism sends in a training step."""
    table, records = study.complete("07_implementations")
    if table.empty:
        return {}
    return {"implementations": json_rows(mean_by_arm(table, [traffic_a_step(record) for record in records]))}


# Claims about other parallelisms and implementations.


@claim
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


@claim
def data_parallelism_bears_more(results: Results) -> Claim:
    """Require that at 10 % loss DDP keeps more accuracy in docstrings, after Holm's correction.

    It must lose less than half as many packets.
    """
    row = _against_tensor_parallelism(results, "ddp 2", "docstrings")
    arms = rows_of(results["comparisons"]["07_parallelisms"], task="docstrings", loss_rate=0.1)
    copies, tensor = (row_of(arms, arm=f"{arm}, zero")["lost_a_step"] for arm in ("ddp 2", "tp 2"))
    holds = row["difference"] > 0 and shown(row["p_holm"]) and 2 * copies < tensor
    return Claim(holds, {row["task"]: POINTS * row["difference"], "packets lost": copies / tensor})


@claim
def sharded_data_parallelism_bears_less(results: Results) -> Claim:
    """Require that at 10 % loss FSDP keeps less accuracy, after Holm's correction, in each task."""
    rows = [_against_tensor_parallelism(results, "fsdp 2", task) for task in tasks(results)]
    holds = all(row["difference"] < 0 and shown(row["p_holm"]) for row in rows)
    return Claim(holds, {row["task"]: POINTS * row["difference"] for row in rows})


@claim
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
