"""Make the paper's contents about models of other sizes, and about a real model.

Each public function is a section, as in `lossytp.study.paper`.
"""

from statistics import fmean
from typing import Any

import pandas as pd

from lossytp.study.analysis.real_model import (
    NETWORK,
    against_predicted,
    repaired,
    rises,
    strongest_packet,
    times_law,
    usual,
)
from lossytp.study.analysis.real_training import (
    NOTHING,
    RETRANSMITTING,
    contrasts,
    expected_round_trips,
    first_fall,
    gains_by_rate,
    outcomes,
)
from lossytp.study.analysis.sizes import FINE_TUNED, exponents, falls_of_models, of_equal_tokens, rises_of_models
from lossytp.study.figures.real_model import real_model_after_training, real_model_law, real_model_rises
from lossytp.study.figures.sizes import cost_of_models
from lossytp.study.finished_runs import Study
from lossytp.study.records import json_rows, loss_rate_of
from lossytp.training.record import read_record


def real_model(study: Study) -> dict[str, Any]:
    """Return what losses cost the pretrained real model in inference, what predicts it, and what repairs it."""
    folder = study.results / "real_model"
    table = rises(folder)
    if table.empty:
        return {}
    study.draw(real_model_rises(repaired(table)), "real_model")
    networks = against_predicted(table, pd.read_csv(folder / "predicted.csv"))
    by_law = times_law(table, pd.read_csv(folder / "sum_errors.csv"))
    repairs = usual(by_law).query("repair != 'zero'")
    study.draw(real_model_law(networks, repairs), "real_model_law")
    predicted = networks[NETWORK].itertuples(index=False, name=None)
    later = by_law[(by_law["repair"] == "zero") & ~by_law[NETWORK].agg(tuple, axis=1).isin(list(predicted))]
    return {
        "real_model": json_rows(table),
        "real_networks": json_rows(networks),
        "real_repairs": json_rows(repairs),
        "real_networks_later": json_rows(later),  # measured after the predictions
        "strongest_packet": strongest_packet(folder / "damage_by_packet.csv"),
    }


def real_training(study: Study) -> dict[str, Any]:
    """Return whether training under loss changes what the real model bears, and what repairs do after it."""
    files = [study.results / "real_model" / f"after_training_{task}.csv" for task in ("sst2", "qnli")]
    if not all(file.is_file() for file in files):
        return {}
    table = pd.concat([pd.read_csv(file) for file in files], ignore_index=True)
    rows = outcomes(table)
    study.draw(real_model_after_training(rows), "real_model_after_training")
    records = [record for name in ("13_real_model", "13_real_model_qnli") for record in study.records.get(name, [])]
    examples = {record["config"]["dataset"]: record["data"]["test_examples"] for record in records}
    by_rate = pd.concat([study.complete(name)[0] for name in ("13_real_model_rates", "13_real_model")])
    lossy = [record for record in records if loss_rate_of(record) > 0 and record["config"]["repair"] == NOTHING]
    return {
        "real_training": json_rows(rows),
        "real_training_examples": examples,
        "real_training_gains": contrasts(table),
        "real_training_round_trips": {
            task: {
                repair: fmean(
                    expected_round_trips(record, repair) for record in lossy if record["config"]["dataset"] == task
                )
                for repair in RETRANSMITTING
            }
            for task in examples
        },
        "real_gains_by_rate": gains_by_rate(by_rate) if len(by_rate) else [],
        "real_advised_first": first_fall(study.complete("13_real_model_advised")[0], seeds=3),
    }


def sizes(study: Study) -> dict[str, Any]:
    """Return what losses cost models of several sizes, and models pretrained on several numbers of tokens."""
    folder = study.results / "sizes"
    if not (folder / "fine_tuning.csv").is_file():
        return {}
    runs, draws = pd.read_csv(folder / "fine_tuning.csv"), pd.read_csv(folder / "inference.csv")
    falls, table = falls_of_models(runs), rises_of_models(draws, runs)
    study.draw(cost_of_models(table[~table["whole_packets"]], falls), "sizes")
    shared = int(of_equal_tokens(runs)["tokens"].iloc[0])
    folders = study.results.glob(f"runs/*/{FINE_TUNED}*")  # in the pretrained model's, so no experiment has them
    seconds = sum(record["timing"]["total_seconds"] for folder in folders if (record := read_record(folder)))
    found = {"tokens": shared, "falls": json_rows(falls), "rises": json_rows(table), "core_hours": seconds / 3600}
    return {"sizes": {**found, "exponents": exponents(runs, draws)}}
