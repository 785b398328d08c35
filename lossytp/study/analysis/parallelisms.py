"""Answer which parallelism tolerates packet loss best: implementations and parallelisms side by side."""

from typing import Any

import pandas as pd

from lossytp.network.bernoulli import Bernoulli
from lossytp.network.loss_process import LossProcess
from lossytp.study.comparisons import compare_arms, lossy_changes
from lossytp.study.records import ACCURACIES
from lossytp.study.run_measures import speed_and_traffic
from lossytp.training.config import RunSettings, settings_class


def label(config: RunSettings, layers: str | None = None) -> str:
    """Describe a run's parallelism and repair, such as "dp 2 (pytorch fsdp) x tp 2 (lossytp), rescale".

    `layers` says whose tensor-parallel layers ran, if not the configuration's.
    """
    kinds = {
        "dp": (config.data_parallel_size, f"{config.data_parallel_implementation} {config.data_parallel_type}"),
        "pp": (config.pipeline_parallel_size, config.pipeline_schedule),
        "tp": (config.tensor_parallel_size, layers or config.tensor_parallel_layers),
    }
    words = [" x ".join(f"{axis} {size} ({kind})" for axis, (size, kind) in kinds.items() if size > 1) or "one process"]
    words += [config.repair] * (config.repair != "zero")
    words += ["bf16"] * config.bf16
    words += ["clipped"] * (config.gradient_clipping is not None)
    words += ["exact adjoint"] * config.exact_adjoint
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
        "loss_rate": config.process_rate,
        "losses": losses_of(config.process()),
        "seed": config.seed,
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
        table: from `records.read_experiment`. Only arms named by parallelism and repair count, such as "tp 2, zero":
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
