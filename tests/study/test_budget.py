from pathlib import Path

import pandas as pd

from lossytp.study.budget import budget
from lossytp.study.grid import Cell, Experiment
from lossytp.study.records import read_experiment
from lossytp.training.config import TrainConfig
from lossytp.training.record import portable, write_record


def test_what_questions_cost_is_cells_that_are_new_times_seconds_times_processes(tmp_path, record):
    def cell(arm, rate, seed):
        return Cell(arm, TrainConfig(loss_rate=rate, seed=seed, output_dir=str(tmp_path / f"{rate}-{seed}")))

    curve = [cell("none", 0.0, seed) for seed in range(3)] + [cell("lossy", 0.1, seed) for seed in range(3)]
    shared = [*curve[:3], *(cell("slow", 0.2, seed) for seed in range(3))]
    experiments = [
        Experiment("1", "20_cells", tuple(curve), 1),
        Experiment("2", "20_cells", tuple(shared), 1, processes=2),
        Experiment("3", "20_cells", (cell("other", 0.3, 0),), 1),
    ]
    took = {(0.0, 0): 10, (0.0, 1): 900, (0.0, 2): 12, (0.1, 0): 20, (0.2, 1): 100}  # 900: suspended
    for each in {each.config.output_dir: each for each in curve + shared}.values():
        key = each.config.loss_rate, each.config.seed
        if key in took:
            made = record(loss_rate=key[0], seed=key[1], accuracy=0.5)
            made["timing"]["total_seconds"] = took[key]
            write_record(Path(each.config.output_dir), {**made, "config": portable(each.config)})
    read = {each.name: read_experiment(each) for each in experiments}
    found = budget(
        experiments,
        {name: table for name, (table, _) in read.items()},
        {name: records for name, (_, records) in read.items()},
    )
    columns = ["experiment", "cells", "finished", "of", "seconds"]
    assert found[columns].values.tolist()[:2] == [["1", 6, 4, 6, 16.0], ["2", 3, 4, 6, 56.0]]
    assert found["core_hours"].tolist()[:2] == [6 * 16 / 3600, 3 * 56 * 2 / 3600]
    assert found.loc[2, ["cells", "finished", "of"]].tolist() == [1, 0, 1]
    assert pd.isna(found.loc[2, ["seconds", "core_hours"]]).all()
