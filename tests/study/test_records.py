import json
from pathlib import Path

import pandas as pd
import pytest

from lossytp.study.grid import Cell, Experiment
from lossytp.study.tables import read_experiment, tidy, with_lossless
from lossytp.training.config import PretrainConfig, TrainConfig
from lossytp.training.record import read_record, write_record
from paper.build import joined
from paper.comparisons import complete_seeds, json_rows, loss_rate_of, unlearned_trainings


def test_a_row_a_record_in_their_order_without_seconds(study):
    table = tidy(study)
    assert len(table) == len(study) == 15
    assert tidy(study[::-1])["accuracy_lossy"].tolist() == table["accuracy_lossy"].tolist()[::-1]
    assert not [column for column in table if "second" in column]
    assert table["observed_loss_rate"].tolist() == table["loss_rate"].tolist()


def test_a_run_that_was_not_finite_counts_as_the_most_frequent_class(record):
    broken = record(loss_rate=0.2, seed=0, accuracy=None, status="not finite")
    assert tidy([broken])["accuracy_lossy"].tolist() == [0.3]


def test_the_committed_summary_has_the_columns_of_todays_table():
    results = Path(__file__).parents[2] / "results" / "paper"
    summary = pd.read_csv(results / "experiment_summary.csv", low_memory=False)
    runs = summary[summary["experiment"] == "01_tolerance"]["run"]
    records = [read_record(results / "runs" / run) for run in (runs.iloc[0], runs.iloc[-1])]
    places = [list(summary).index(name) for name in tidy(records) if name in records[0]["config"]]
    assert places == sorted(places), "./run_all.sh figures would write another table"


def test_a_setting_that_no_record_has_is_no_column(record):
    old, new = record(loss_rate=0.1, seed=0, accuracy=0.5), record(loss_rate=0.1, seed=1, accuracy=0.5)
    old["newer_settings"] = ["mtu_bytes"]
    assert "mtu_bytes" not in tidy([old])
    assert "mtu_bytes" in tidy([old, new])


def test_a_presets_rate_is_its_process_own(record):
    preset = record(loss_rate=0.0, seed=0, accuracy=0.5, loss_type="g-e", ge_config="default")
    assert tidy([preset])["loss_rate"].tolist() == [pytest.approx(0.1)]


def test_the_implementation_is_the_one_that_ran(record):
    asked = record(loss_rate=0.1, seed=3, accuracy=0.5, implementation="megatron")
    ours = record(loss_rate=0.1, seed=3, accuracy=0.5, implementation="lossytp")
    assert tidy([asked, ours])["implementation"].tolist() == ["lossytp", "lossytp"]


def test_of_no_runs_there_are_none_without_losses():
    assert with_lossless(tidy([])).empty


def test_an_experiment_without_runs_changes_no_other_ones_table(record):
    table = tidy([record(loss_rate=0.1, seed=3, accuracy=0.5)])
    both = joined({"done": table, "planned": tidy([])})
    assert both.to_csv(index=False) == table.assign(experiment="done").to_csv(index=False)


def test_copies_of_a_run_are_no_second_seed(record):
    with pytest.raises(ValueError, match=r"seed 3 at ber 0\.1 has two records"):
        tidy([record(loss_rate=0.1, seed=3, accuracy=0.5), record(loss_rate=0.1, seed=3, accuracy=0.6)])


def test_seeds_without_all_their_arms_are_left_out(tmp_path, record):
    cells = [
        Cell(arm, TrainConfig(loss_rate=rate, seed=seed, output_dir=str(tmp_path / f"{arm}{seed}")))
        for seed in range(3)
        for arm, rate in (("no loss", 0.0), ("lossy", 0.1))
    ]
    experiment = Experiment("e", "20_cells", tuple(cells), 1)
    for cell in [*cells[:3], *cells[4:]]:  # seed 1 lacks an arm
        made = record(loss_rate=cell.config.network.loss_rate, seed=cell.config.network.seed, accuracy=0.5)
        write_record(Path(cell.config.output.output_dir), {**made, "config": cell.config.result_settings()})
    table, records = read_experiment(experiment)
    learnt = unlearned_trainings(table.head(0))
    whole, theirs = complete_seeds(experiment, table, records, learnt)
    assert whole[["arm", "seed"]].values.tolist() == [["no loss", 0], ["lossy", 0], ["no loss", 2], ["lossy", 2]]
    assert [each["config"]["seed"] for each in theirs] == [0, 0, 2, 2]
    assert whole["run"].tolist() == ["no loss0", "lossy0", "no loss2", "lossy2"]  # by which a point's record is found
    assert complete_seeds(experiment, table, records, learnt, min_seeds=3)[0].empty
    assert complete_seeds(experiment, tidy([]), [], unlearned_trainings(tidy([])))[0].empty


@pytest.mark.parametrize(("lacks", "kept"), [("added", ["no loss", "lossy"]), ("no loss", [])])
def test_an_arm_without_enough_runs_hides_no_other_unless_all_are_compared_with_it(tmp_path, record, lacks, kept):
    rates = {"no loss": 0.0, "lossy": 0.1, "added": 0.2}
    cells = [
        Cell(arm, TrainConfig(loss_rate=rate, seed=seed, output_dir=str(tmp_path / f"{arm}{seed}")))
        for arm, rate in rates.items()
        for seed in range(3)
    ]
    for cell in cells:
        if (cell.arm, cell.config.network.seed) != (lacks, 1):
            made = record(loss_rate=cell.config.network.loss_rate, seed=cell.config.network.seed, accuracy=0.5)
            write_record(Path(cell.config.output.output_dir), {**made, "config": cell.config.result_settings()})
    experiment = Experiment("e", "20_cells", tuple(cells), 1)
    table, records = read_experiment(experiment)
    whole, theirs = complete_seeds(experiment, table, records, unlearned_trainings(table.head(0)), min_seeds=3)
    assert list(whole["arm"].unique()) == kept
    assert len(whole) == len(theirs) == 3 * len(kept)


def test_the_presets_of_an_arm_are_told_apart_by_their_own_rates(tmp_path, record):
    networks = {"no loss": {}, "one": {"loss_type": "g-e", "ge_config": "one"}, "default": {"loss_type": "g-e"}}
    networks["default"]["ge_config"] = "default"
    cells = [
        Cell(
            "no loss" if name == "no loss" else "presets",
            TrainConfig(seed=seed, output_dir=f"{tmp_path}/{name}{seed}", **values),
        )
        for name, values in networks.items()
        for seed in range(3)
    ]
    for cell in cells[:-1]:  # the second preset lacks a seed
        made = record(loss_rate=0.0, seed=cell.config.network.seed, accuracy=0.5)
        write_record(Path(cell.config.output.output_dir), {**made, "config": cell.config.result_settings()})
    experiment = Experiment("e", "20_cells", tuple(cells), 1)
    table, records = read_experiment(experiment)
    whole, _ = complete_seeds(experiment, table, records, unlearned_trainings(table.head(0)), min_seeds=3)
    assert whole["ge_config"].fillna("no loss").value_counts().to_dict() == {"no loss": 3, "one": 3}
    preset = TrainConfig(**networks["one"]).network.process_rate
    assert sorted(whole["loss_rate"].unique()) == pytest.approx([0.0, preset])
    lossy = [each for each in records if loss_rate_of(each) > 0]
    assert [each["config"]["loss_rate"] for each in lossy] == [0.0] * 5, "the setting does not say it"


def test_a_training_that_does_not_learn_is_not_required(tmp_path, record):
    cells = [
        Cell(arm, TrainConfig(loss_rate=rate, model_name=model, seed=0, output_dir=str(tmp_path / f"{arm}{model}")))
        for model in ("gpt2-nano", "gpt2-nano-scratch")
        for arm, rate in (("no loss", 0.0), ("lossy", 0.1))
    ]
    experiment = Experiment("e", "20_cells", tuple(cells), 1)
    for cell in cells[:3]:  # of the second model, the run without losses alone
        made = record(
            loss_rate=cell.config.network.loss_rate,
            seed=0,
            accuracy=0.31 if "scratch" in cell.config.model_name else 0.5,
        )
        write_record(Path(cell.config.output.output_dir), {**made, "config": cell.config.result_settings()})
    table, records = read_experiment(experiment)
    assert unlearned_trainings(table)["model_name"].tolist() == ["gpt2-nano-scratch"]
    whole, theirs = complete_seeds(experiment, table, records, unlearned_trainings(table))
    assert whole["arm"].tolist() == ["no loss", "lossy"]
    assert theirs == records[:2]


def test_rows_are_json(study, curves):
    table = curves(study).assign(value=float("inf"))
    text = json.dumps(json_rows(table[["task", "seed", "value", "ge_config"]].head(1)), allow_nan=False)
    assert json.loads(text) == [{"task": "docstrings", "seed": 0, "value": None, "ge_config": None}]


def test_arms_share_the_runs_without_losses(study, curves):
    arms = curves(study)
    assert list(arms["arm"].unique()) == ["alone", "bursts"]
    assert (arms.groupby("arm").size() == 9).all()


def test_pretraining_has_cross_entropies_and_no_accuracy(record):
    made = record(loss_rate=0.05, seed=0, accuracy=0.5)
    config = PretrainConfig(loss_rate=0.05, tensor_parallel_size=2, total_steps=7)
    final = dict.fromkeys(made["final"]) | {"cross_entropy_clean": 3.0, "cross_entropy_lossy": 3.5}
    row = tidy([{**made, "config": config.result_settings(), "final": final, "data": {"majority_share": None}}]).iloc[0]
    assert (row["task"], row["max_steps"], row["cross_entropy_lossy"]) == ("stdlib", 7, 3.5)
    assert pd.isna(row["accuracy_lossy"])
