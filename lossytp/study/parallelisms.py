"""Implementations and parallelisms side by side."""

import pandas as pd

from lossytp.study.contrasts import beside, changes, contrasts

PARALLELISMS = {"dp": "data_parallel_size", "pp": "pipeline_parallel_size", "tp": "tensor_parallel_size"}


def label(config: dict) -> str:
    """How a run was spread, and what it did about losses, such as "dp 2 (fsdp) x tp 2 (lossytp), rescale"."""
    details = {"dp": "data_parallel_type", "pp": "pipeline_schedule", "tp": "implementation"}
    parts = [
        f"{axis} {config[size]} ({config[details[axis]]})" for axis, size in PARALLELISMS.items() if config[size] > 1
    ]
    words = [" x ".join(parts) or "one process"]
    words += [config["repair"]] * (config["repair"] != "zero")
    words += ["clipped"] * (config["gradient_clipping"] is not None)
    words += ["exact adjoint"] * config["exact_adjoint"]
    return ", ".join(words)


def compare(records: list[dict]) -> pd.DataFrame:
    """One row a record: task, how it was spread, accuracy, step time, what its collectives lost, forward and backward.

    Step times compare only runs of one machine that had it to themselves.
    """
    rows = []
    for record in records:
        config, traffic = record["config"], record["network"]["training"]
        row = {
            "task": config["dataset"],
            "parallelism": label({**config, "implementation": record["implementation"]}),
            "implementation": record["implementation"],
            "processes": record["processes"],
            "loss_rate": config["loss_rate"],
            "seed": config["seed"],
            "status": record["status"],
            "accuracy_clean": record["final"]["accuracy_clean"],
            "accuracy_lossy": record["final"]["accuracy_lossy"],
            "replica_drift": record["curves"]["eval"][-1]["replica_drift"] if record["curves"]["eval"] else None,
            "step_ms": 1000 * record["timing"]["step_seconds"],
            "packets_a_step": traffic["packets"] / record["timing"]["steps"],
            "observed_loss_rate": traffic["observed_loss_rate"],
        }
        for direction in ("forward", "backward"):
            called = traffic["messages"]["by_direction"].get(direction, {"called": 0, "lossy": 0})
            row |= {f"collectives_{direction}": called["called"], f"lossy_{direction}": called["lossy"]}
        rows.append(row)
    return pd.DataFrame(rows).sort_values(["task", "parallelism", "loss_rate", "seed"], ignore_index=True)


def against_tensor_parallelism(table: pd.DataFrame, *, reference: str = "tp 2") -> pd.DataFrame:
    """How much more accuracy each parallelism keeps than tensor parallelism, at equal loss rate and repair.

    Args:
        table: from `records.read_experiment`; its arms are named by parallelism and repair, such as "tp 2, zero". Arms
            that are named by more differ in more, and are left out.

    Returns what `contrasts.contrasts` does, of the changes of accuracy against the same seed's run without losses, with
    `arm` the parallelism, for each `task`, `repair` and `loss_rate`; columns from `clean` on are of accuracy
    evaluated without losses.
    """
    within = ("task", "repair", "loss_rate")
    found = []
    for outcome in ("accuracy_lossy", "accuracy_clean"):
        lossy = changes(table, within=["task"], outcome=outcome)
        lossy = lossy[lossy["arm"].str.fullmatch(r"\w+ \d+, .+")]
        lossy = lossy.assign(arm=lossy["arm"].str.split(",").str[0])
        found.append(contrasts(lossy, reference=reference, outcome="change", within=within))
    return beside(found[0], found[1], [*within, "arm"], "clean")
