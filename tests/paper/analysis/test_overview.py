from pathlib import Path

import pandas as pd
import pytest

from lossytp.study.grid import Cell, Experiment
from lossytp.study.tables import read_experiment
from lossytp.training.config import TrainConfig
from lossytp.training.record import write_record
from paper.build import (
    compute_hours,
    repeatability,
    summarise_runs,
)


def test_core_hours_are_new_cells_times_seconds_times_processes(tmp_path, record):
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
    for each in {each.config.output.output_dir: each for each in curve + shared}.values():
        key = each.config.network.loss_rate, each.config.network.seed
        if key in took:
            made = record(loss_rate=key[0], seed=key[1], accuracy=0.5)
            made["timing"]["total_seconds"] = took[key]
            write_record(Path(each.config.output.output_dir), {**made, "config": each.config.result_settings()})
    found = compute_hours(experiments, {each.name: read_experiment(each)[1] for each in experiments})
    columns = ["experiment", "cells", "finished", "of"]
    assert found[columns].values.tolist() == [["1", 6, 4, 6], ["2", 3, 4, 6], ["3", 1, 0, 1]]
    assert found["core_hours"].tolist()[:2] == pytest.approx([3 * (12 + 20) / 3600, 3 * 100 * 2 / 3600])
    assert found["seconds"].tolist()[:2] == [16, 100]
    assert pd.isna(found.loc[2, ["seconds", "core_hours"]]).all()


def test_an_unrun_cell_takes_its_steps_times_the_others_seconds_a_step(tmp_path, record):
    cells = [
        Cell(arm, TrainConfig(max_steps=steps, seed=seed, output_dir=str(tmp_path / f"{steps}-{seed}")))
        for arm, steps in (("short", 200), ("long", 600))
        for seed in range(2)
    ]
    made = record(loss_rate=0.0, seed=0, accuracy=0.5)
    made["timing"]["total_seconds"] = 100
    write_record(Path(cells[0].config.output.output_dir), {**made, "config": cells[0].config.result_settings()})
    experiment = Experiment("1", "20_cells", tuple(cells), 1)
    found = compute_hours([experiment], {"1": read_experiment(experiment)[1]})
    assert found.loc[0, "core_hours"] == pytest.approx((2 * 100 + 2 * 300) / 3600)


def test_losses_of_controls_do_not_count_as_packets(study, record):
    elements = record(loss_rate=0.1, seed=7, accuracy=0.5, control="elements")
    ran, with_control = summarise_runs(study), summarise_runs([*study, elements])
    assert with_control["cells"] == ran["cells"] + 1
    assert with_control["packets"] == ran["packets"]


def test_runs_are_summarised(study):
    ran = summarise_runs(study)
    assert (ran["cells"], ran["packets"]) == (15, 15_000)
    assert ran["hours"] == pytest.approx(0.15)


def test_a_run_that_several_experiments_have_counts_once(study):
    assert summarise_runs([*study, *study[:4]]) == summarise_runs(study)


def test_trainings_that_ran_twice_are_compared_by_their_processors(record):
    def run(accuracy, processor="one", seed=0, lossy=0.5, **kept):
        made = record(loss_rate=0.1, seed=seed, accuracy=accuracy, **kept)
        final = made["final"] | {"accuracy_lossy": lossy}
        return made | {"environment": {"processor": processor}, "final": final}

    others = [run(0.9, seed=1), run(0.8, seed=2, max_length=16)]  # ran once
    found = repeatability([run(0.7), run(0.7, save_model=True, lossy=0.52), run(0.6, "two", eval_steps=5), *others])
    assert found["one"] == {"pairs": 1, "differ": 0, "largest": 0.0, "largest_lossy": pytest.approx(0.02)}
    assert found["two"] == {
        "pairs": 2, "differ": 2, "largest": pytest.approx(0.1), "largest_lossy": pytest.approx(0.02)
    }  # fmt: skip
    on_gpu = run(0.7) | {"environment": {"processor": "one", "gpu": "A GPU"}}
    assert repeatability([run(0.7), on_gpu])["two"]["pairs"] == 1  # one processor, but not one machine
    none = {"pairs": 0, "differ": 0, "largest": 0.0, "largest_lossy": 0.0}
    assert repeatability(others) == {"one": none, "two": none}
