from pathlib import Path

import pytest

from lossytp.study.contrasts import unlearnt
from lossytp.study.grid import Cell, Experiment
from lossytp.study.records import read_experiment, repeated, tidy, whole_seeds, with_lossless
from lossytp.training.config import TrainConfig
from lossytp.training.record import portable, write_record


def test_a_row_a_record_in_their_order_without_seconds(study):
    table = tidy(study)
    assert len(table) == len(study) == 15
    assert tidy(study[::-1])["accuracy_lossy"].tolist() == table["accuracy_lossy"].tolist()[::-1]
    assert not [column for column in table if "second" in column]
    assert table["observed_loss_rate"].tolist() == table["loss_rate"].tolist()


def test_a_run_that_was_not_finite_counts_as_the_most_frequent_class(record):
    broken = record(loss_rate=0.2, seed=0, accuracy=None, status="not finite")
    assert tidy([broken])["accuracy_lossy"].tolist() == [0.3]


def test_a_presets_rate_is_its_process_own(record):
    preset = record(loss_rate=0.0, seed=0, accuracy=0.5, loss_type="g-e", ge_config="default")
    assert tidy([preset])["loss_rate"].tolist() == [pytest.approx(0.1)]


def test_whose_layers_ran_is_told_and_not_whose_were_asked_for(record):
    asked = record(loss_rate=0.1, seed=3, accuracy=0.5, implementation="megatron")
    ours = record(loss_rate=0.1, seed=3, accuracy=0.5, implementation="lossytp")
    assert tidy([asked, ours])["implementation"].tolist() == ["lossytp", "lossytp"]


def test_of_no_runs_there_are_none_without_losses():
    assert with_lossless(tidy([])).empty


def test_copies_of_a_run_are_no_second_seed(record):
    with pytest.raises(ValueError, match="two records of seed 3"):
        tidy([record(loss_rate=0.1, seed=3, accuracy=0.5), record(loss_rate=0.1, seed=3, accuracy=0.6)])


def test_seeds_without_all_their_arms_are_left_out(tmp_path, record):
    cells = [
        Cell(arm, TrainConfig(loss_rate=rate, seed=seed, output_dir=str(tmp_path / f"{arm}{seed}")))
        for seed in range(3)
        for arm, rate in (("none", 0.0), ("lossy", 0.1))
    ]
    experiment = Experiment("e", "20_cells", tuple(cells), 1)
    for cell in [*cells[:3], *cells[4:]]:  # seed 1 lacks an arm
        made = record(loss_rate=cell.config.loss_rate, seed=cell.config.seed, accuracy=0.5)
        write_record(Path(cell.config.output_dir), {**made, "config": portable(cell.config)})
    table, records = read_experiment(experiment)
    learnt = unlearnt(table.head(0))
    whole, theirs = whole_seeds(experiment, table, records, learnt)
    assert whole[["arm", "seed"]].values.tolist() == [["none", 0], ["lossy", 0], ["none", 2], ["lossy", 2]]
    assert [each["config"]["seed"] for each in theirs] == [0, 0, 2, 2]
    assert whole["run"].tolist() == ["none0", "lossy0", "none2", "lossy2"]  # by which a point's record is found
    assert whole_seeds(experiment, table, records, learnt, fewest=3)[0].empty
    assert whole_seeds(experiment, tidy([]), [], unlearnt(tidy([])))[0].empty


def test_a_training_that_is_not_learnt_is_not_asked_for(tmp_path, record):
    cells = [
        Cell(arm, TrainConfig(loss_rate=rate, model_name=model, seed=0, output_dir=str(tmp_path / f"{arm}{model}")))
        for model in ("gpt2-nano", "gpt2-nano-scratch")
        for arm, rate in (("no loss", 0.0), ("lossy", 0.1))
    ]
    experiment = Experiment("e", "20_cells", tuple(cells), 1)
    for cell in cells[:3]:  # of the second model, the run without losses alone
        made = record(
            loss_rate=cell.config.loss_rate, seed=0, accuracy=0.31 if "scratch" in cell.config.model_name else 0.5
        )
        write_record(Path(cell.config.output_dir), {**made, "config": portable(cell.config)})
    table, records = read_experiment(experiment)
    assert whole_seeds(experiment, table, records, unlearnt(table.head(0)))[0].empty
    assert unlearnt(table)["model_name"].tolist() == ["gpt2-nano-scratch"]
    whole, theirs = whole_seeds(experiment, table, records, unlearnt(table))
    assert whole["arm"].tolist() == ["no loss", "lossy"]
    assert theirs == records[:2]


def test_trainings_that_ran_twice_are_compared_by_their_processors(record):
    def run(accuracy, processor="one", seed=0, lossy=0.5, **kept):
        made = record(loss_rate=0.1, seed=seed, accuracy=accuracy, **kept)
        final = made["final"] | {"accuracy_lossy": lossy}
        return made | {"environment": {"processor": processor}, "final": final}

    others = [run(0.9, seed=1), run(0.8, seed=2, max_length=16)]  # ran once
    found = repeated([run(0.7), run(0.7, save_model=True, lossy=0.52), run(0.6, "two", eval_steps=5), *others])
    assert found["one"] == {"pairs": 1, "differ": 0, "largest": 0.0, "largest_lossy": pytest.approx(0.02)}
    assert found["two"] == {
        "pairs": 2, "differ": 2, "largest": pytest.approx(0.1), "largest_lossy": pytest.approx(0.02)
    }  # fmt: skip
    none = {"pairs": 0, "differ": 0, "largest": 0.0, "largest_lossy": 0.0}
    assert repeated(others) == {"one": none, "two": none}
