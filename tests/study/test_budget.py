from pathlib import Path

import pandas as pd
import pytest

from lossytp.study.budget import GPU_FLOPS_PER_S, budget, larger
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
    found = budget(experiments, {each.name: read_experiment(each)[1] for each in experiments})
    columns = ["experiment", "cells", "finished", "of"]
    assert found[columns].values.tolist() == [["1", 6, 4, 6], ["2", 3, 4, 6], ["3", 1, 0, 1]]
    assert found["core_hours"].tolist()[:2] == pytest.approx([3 * (12 + 20) / 3600, 3 * 100 * 2 / 3600])
    assert found["seconds"].tolist()[:2] == [16, 100]
    assert pd.isna(found.loc[2, ["seconds", "core_hours"]]).all()


def test_what_was_never_run_takes_its_steps_times_the_others_seconds_a_step(tmp_path, record):
    cells = [
        Cell(arm, TrainConfig(max_steps=steps, seed=seed, output_dir=str(tmp_path / f"{steps}-{seed}")))
        for arm, steps in (("short", 200), ("long", 600))
        for seed in range(2)
    ]
    made = record(loss_rate=0.0, seed=0, accuracy=0.5)
    made["timing"]["total_seconds"] = 100
    write_record(Path(cells[0].config.output_dir), {**made, "config": portable(cells[0].config)})
    experiment = Experiment("1", "20_cells", tuple(cells), 1)
    found = budget([experiment], {"1": read_experiment(experiment)[1]})
    assert found.loc[0, "core_hours"] == pytest.approx((2 * 100 + 2 * 300) / 3600)


def test_a_larger_model_takes_as_many_times_the_operations_as_its_blocks_have_parameters(record):
    run = record(loss_rate=0.1, seed=0, accuracy=0.5)
    run["config"] |= {"model_name": "gpt2-nano", "max_length": 48}
    run["data"]["test_examples"] = 1000
    run["timing"] |= {"tokens_per_second": 500.0, "train_seconds": 40.0}
    found = larger([run, run])  # a run that two grids have
    assert found["times"] == pytest.approx(12 * 768**2 / (4 * 128**2))
    flops = 12 * 12 * 768**2 * (6 * 500 * 40 + 2 * 2 * 1000 * 48)
    assert found["hours"] == pytest.approx(flops / GPU_FLOPS_PER_S / 3600)
