"""The summary of the study's runs, their hours, and arms with enough seeds."""

from pathlib import Path

import pandas as pd
import pytest

from lossytp.study.grid import Cell, Experiment
from lossytp.study.tables import read_experiment
from lossytp.training.config import TrainConfig
from lossytp.training.record import write_record
from paper.build import compute_hours, repeatability, summarise_runs
from paper.study import Study


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


def test_summarise_runs_counts_each_run_once_and_no_packets_of_controls(study, record):
    control = record(loss_rate=0.1, seed=7, accuracy=0.5, control="elements")
    ran, with_control = summarise_runs(study), summarise_runs([*study, control])
    assert (ran["cells"], ran["packets"], ran["hours"]) == (15, 15_000, pytest.approx(0.15))
    assert (with_control["cells"], with_control["packets"]) == (16, 15_000)
    assert summarise_runs([*study, *study[:4]]) == ran


def test_arms_with_seeds_leaves_out_arms_with_too_few():
    """A third seed makes an interval; the same seed at another rate does not count."""
    seeds = {("whole", 0.1): (0, 1, 2), ("begun", 0.1): (0, 1), ("begun", 0.2): (2,)}
    rows = [{"arm": arm, "loss_rate": rate, "seed": seed} for (arm, rate), each in seeds.items() for seed in each]
    study = Study("paper", Path(), {}, {"asked": pd.DataFrame(rows)}, {})
    assert study.arms_with_seeds("asked").to_dict("list") == {
        "arm": ["whole"] * 3, "loss_rate": [0.1] * 3, "seed": [0, 1, 2],
    }  # fmt: skip
    assert study.arms_with_seeds("not in this profile").empty


@pytest.mark.slow
def test_study_configs_are_those_of_each_row_of_a_comparison():
    """Runs without losses of several models and learning rates share an arm's name."""
    root = Path(__file__).parents[2]
    study = Study.read(root / "results" / "paper", root / "notebooks" / "experiments", "paper")
    for name in ("01_training", "10_carry_over"):
        rows = study.comparisons[name]
        for row, config in zip(rows.itertuples(), study.configs(name), strict=True):
            asked = (row.task, row.model_name, row.max_steps, row.learning_rate, row.loss_rate)
            assert asked == (
                config.data.dataset,
                config.model_name,
                config.optimizer.max_steps,
                config.optimizer.learning_rate,
                config.network.loss_rate,
            )
