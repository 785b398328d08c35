"""Answer which parallelism tolerates packet loss best: implementations and parallelisms side by side."""

import pandas as pd

from lossytp.study.comparisons import compare_arms, lossy_changes

PARALLELISMS = {  # the settings of size and kind
    "dp": ("data_parallel_size", "data_parallel_type"),
    "pp": ("pipeline_parallel_size", "pipeline_schedule"),
    "tp": ("tensor_parallel_size", "implementation"),
}


def label(config: dict) -> str:
    """Describe a run's parallelism and repair, such as "dp 2 (fsdp) x tp 2 (lossytp), rescale"."""
    used = {axis: each for axis, each in PARALLELISMS.items() if config[each[0]] > 1}
    parts = [f"{axis} {config[size]} ({config[kind]})" for axis, (size, kind) in used.items()]
    words = [" x ".join(parts) or "one process"]
    words += [config["repair"]] * (config["repair"] != "zero")
    words += ["bf16"] * config["bf16"]
    words += ["clipped"] * (config["gradient_clipping"] is not None)
    words += ["exact adjoint"] * config["exact_adjoint"]
    return ", ".join(words)


def compare(records: list[dict]) -> pd.DataFrame:
    """Tabulate task, parallelism, accuracy, step time, and calls and losses of collectives, one row per record.

    Step times compare only between runs on one otherwise idle machine.
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
