"""Make the paper's contents about pretraining: what losses cost a small model, and GPT-2's own shape."""

from typing import Any

import pandas as pd

from lossytp.study.analysis.pretraining import (
    departures,
    nats_lost,
    rises_by_seed,
    training_curves,
    turning_points,
    waiting_times,
)
from lossytp.study.figures.pretraining import losses_over_steps, nats_against_tokens
from lossytp.study.finished_runs import Study
from lossytp.study.records import LOSSLESS, json_rows

SMALL = "11_pretraining"
GPT2 = ("18_pretraining_gpt2", "18_pretraining_gpt2_jumbo")
BOTH = "losses on both ways"
NETWORKS = {  # the figure's arms and loss rates, with their names in it
    (LOSSLESS, 0.0): LOSSLESS,
    (BOTH, 0.1): "no repair",
    (f"{BOTH} with Hadamard", 0.1): "Hadamard",
    (f"{BOTH} of a sharded stream", 0.1): "sharded",
    (f"{BOTH} in jumbo packets", 0.1): "jumbo packets",
}


def pretraining(study: Study) -> dict[str, Any]:
    """Return how many nats losses cost in pretraining, and how many more tokens make up for them."""
    runs = study.arms_with_seeds(SMALL)
    if runs.empty or LOSSLESS not in set(runs["arm"]):
        return {}
    arms = nats_lost(runs)
    as_good = arms["clean_times_tokens"].notna()  # an arm that failed would squeeze the others into a corner
    study.draw(nats_against_tokens(arms[(arms["loss_rate"] == 0) | as_good]), "pretraining")
    step_times = pd.read_csv(study.results / "step_times.csv")
    rows = json_rows(arms)
    for row in rows:
        phases = "reduce" if row["reliable_gather"] else "both"
        row["waiting"] = waiting_times(step_times, loss_rate=row["loss_rate"], phases=phases)
    return {"pretraining": rows, "pretraining_turns": json_rows(turning_points(study.records[SMALL]))}


def pretraining_gpt2(study: Study) -> dict[str, Any]:
    """Return what losses in both phases cost GPT-2's own shape in pretraining, and when its loss departs."""
    enough = study.arms_with_seeds(GPT2[0])
    if enough.empty or LOSSLESS not in set(enough["arm"]):
        return {}
    runs = pd.concat([study.tables[name] for name in GPT2], ignore_index=True)
    records = [record for name in GPT2 for record in study.records[name]]
    small = training_curves(study.tables[SMALL], study.records[SMALL], NETWORKS)
    shape = training_curves(runs, records, NETWORKS)
    study.draw(losses_over_steps({"small model": small, "GPT-2's shape": shape}), "training_losses")
    return {
        "pretraining_gpt2": {
            "parameters": records[0]["parameters"],
            "steps": records[0]["config"]["total_steps"],
            "arms": json_rows(nats_lost(enough)),
            "rises": json_rows(rises_by_seed(runs)),
            "turns": json_rows(turning_points(records)),
            "departures": json_rows(departures(shape)),
        }
    }
