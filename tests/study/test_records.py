"""Records as tables, the seeds that have all their arms, and what runs lost and sent."""

from pathlib import Path

import pandas as pd
import pytest

from lossytp.study.grid import Cell, Experiment
from lossytp.study.tables import read_experiment, tidy, with_lossless
from lossytp.training.config import PretrainConfig, TrainConfig
from lossytp.training.record import read_record, write_record
from paper.study import complete_seeds, loss_rate_of, speed_and_traffic, unlearned_trainings


def test_tidy_has_a_row_a_record_in_their_order_without_seconds(study):
    table = tidy(study)
    assert len(table) == len(study) == 15
    assert tidy(study[::-1])["accuracy_lossy"].tolist() == table["accuracy_lossy"].tolist()[::-1]
    assert not [column for column in table if "second" in column]
    assert table["observed_loss_rate"].tolist() == table["loss_rate"].tolist()
    assert with_lossless(tidy([])).empty


def test_tidy_says_what_ran_and_not_what_was_asked(record):
    broken = record(loss_rate=0.2, seed=0, accuracy=None, status="not finite")
    preset = record(loss_rate=0.0, seed=0, accuracy=0.5, loss_type="g-e", ge_config="default")
    fallen_back = record(loss_rate=0.1, seed=3, accuracy=0.5, implementation="megatron")
    assert tidy([broken])["accuracy_lossy"].tolist() == [0.3], "the most frequent class"
    assert tidy([preset])["loss_rate"].tolist() == [pytest.approx(0.1)], "its process's own"
    assert tidy([fallen_back])["implementation"].tolist() == ["lossytp"]


def test_the_committed_summary_has_the_columns_of_todays_table():
    results = Path(__file__).parents[2] / "results" / "paper"
    summary = pd.read_csv(results / "experiment_summary.csv", low_memory=False)
    runs = summary[summary["experiment"] == "01_tolerance"]["run"]
    records = [read_record(results / "runs" / run) for run in (runs.iloc[0], runs.iloc[-1])]
    places = [list(summary).index(name) for name in tidy(records) if name in records[0]["config"]]
    assert places == sorted(places), "./run_all.sh figures would write another table"


def test_tidy_has_no_column_that_no_record_has_and_refuses_a_second_record_of_a_seed(record):
    old, new = record(loss_rate=0.1, seed=0, accuracy=0.5), record(loss_rate=0.1, seed=1, accuracy=0.5)
    old["newer_settings"] = ["mtu_bytes"]
    assert "mtu_bytes" not in tidy([old])
    assert "mtu_bytes" in tidy([old, new])
    with pytest.raises(ValueError, match=r"seed 3 at ber 0\.1 has two records"):
        tidy([record(loss_rate=0.1, seed=3, accuracy=0.5), record(loss_rate=0.1, seed=3, accuracy=0.6)])
    nodes = record(loss_rate=0.1, seed=0, accuracy=0.5, ranks_per_node=2)  # which the first record leaves out
    for records in ([new, nodes], [nodes, new], [old, nodes]):
        assert sorted(tidy(records)["ranks_per_node"].fillna(0)) == [0, 2]


@pytest.fixture
def finished(tmp_path, record):
    """Return a function that writes records of an experiment's cells; it returns the experiment, its table and records.

    A cell is its arm, its settings, and its accuracy, or None where it did not run.
    """

    def write(*cells):
        configs = [TrainConfig(**values, output_dir=str(tmp_path / str(n))) for n, (_, values, _) in enumerate(cells)]
        for config, (*_, accuracy) in zip(configs, cells, strict=True):
            if accuracy is not None:
                made = record(loss_rate=config.network.loss_rate, seed=config.network.seed, accuracy=accuracy)
                write_record(Path(config.output.output_dir), {**made, "config": config.result_settings()})
        arms = [arm for arm, *_ in cells]
        experiment = Experiment("e", "20_cells", tuple(map(Cell, arms, configs)), 1)
        return experiment, *read_experiment(experiment)

    return write


def test_complete_seeds_leaves_out_seeds_without_all_their_arms(finished):
    experiment, table, records = finished(
        *(
            (arm, {"loss_rate": rate, "seed": seed}, None if (arm, seed) == ("lossy", 1) else 0.5)
            for seed in range(3)
            for arm, rate in (("no loss", 0.0), ("lossy", 0.1))
        )
    )
    learnt = unlearned_trainings(table.head(0))
    whole, theirs = complete_seeds(experiment, table, records, learnt)
    assert whole[["arm", "seed"]].values.tolist() == [["no loss", 0], ["lossy", 0], ["no loss", 2], ["lossy", 2]]
    assert [each["config"]["seed"] for each in theirs] == [0, 0, 2, 2]
    assert whole["run"].tolist() == ["0", "1", "4", "5"]  # by which a point's record is found
    assert complete_seeds(experiment, table, records, learnt, min_seeds=3)[0].empty
    assert complete_seeds(experiment, tidy([]), [], unlearned_trainings(tidy([])))[0].empty


@pytest.mark.parametrize(("lacks", "kept"), [("added", ["no loss", "lossy"]), ("no loss", [])])
def test_complete_seeds_hides_others_of_an_arm_without_enough_runs_if_all_are_compared_with_it(finished, lacks, kept):
    experiment, table, records = finished(
        *(
            (arm, {"loss_rate": rate, "seed": seed}, None if (arm, seed) == (lacks, 1) else 0.5)
            for arm, rate in {"no loss": 0.0, "lossy": 0.1, "added": 0.2}.items()
            for seed in range(3)
        )
    )
    whole, theirs = complete_seeds(experiment, table, records, unlearned_trainings(table.head(0)), min_seeds=3)
    assert list(whole["arm"].unique()) == kept
    assert len(whole) == len(theirs) == 3 * len(kept)


def test_complete_seeds_tells_the_presets_of_an_arm_apart_by_their_own_rates(finished):
    one, default = ({"loss_type": "g-e", "ge_config": name} for name in ("one", "default"))
    experiment, table, records = finished(
        *(
            (arm, {**values, "seed": seed}, None if (values, seed) == (default, 2) else 0.5)
            for arm, values in (("no loss", {}), ("presets", one), ("presets", default))
            for seed in range(3)
        )
    )
    whole, _ = complete_seeds(experiment, table, records, unlearned_trainings(table.head(0)), min_seeds=3)
    assert whole["ge_config"].fillna("no loss").value_counts().to_dict() == {"no loss": 3, "one": 3}
    assert sorted(whole["loss_rate"].unique()) == pytest.approx([0.0, TrainConfig(**one).network.process_rate])
    lossy = [each for each in records if loss_rate_of(each) > 0]
    assert [each["config"]["loss_rate"] for each in lossy] == [0.0] * 5, "the setting does not say it"


def test_complete_seeds_does_not_require_a_training_that_does_not_learn(finished):
    """Of the second model, the run without losses alone."""
    experiment, table, records = finished(
        *(
            (arm, {"loss_rate": rate, "model_name": model, "seed": 0}, accuracy)
            for model, accuracies in {"gpt2-nano": (0.5, 0.5), "gpt2-nano-scratch": (0.31, None)}.items()
            for (arm, rate), accuracy in zip((("no loss", 0.0), ("lossy", 0.1)), accuracies, strict=True)
        )
    )
    assert unlearned_trainings(table)["model_name"].tolist() == ["gpt2-nano-scratch"]
    whole, theirs = complete_seeds(experiment, table, records, unlearned_trainings(table))
    assert whole["arm"].tolist() == ["no loss", "lossy"]
    assert theirs == records[:2]


def test_pretraining_has_cross_entropies_and_no_accuracy(record):
    made = record(loss_rate=0.05, seed=0, accuracy=0.5)
    config = PretrainConfig(loss_rate=0.05, tensor_parallel_size=2, total_steps=7)
    final = dict.fromkeys(made["final"]) | {"cross_entropy_clean": 3.0, "cross_entropy_lossy": 3.5}
    row = tidy([{**made, "config": config.result_settings(), "final": final, "data": {"majority_share": None}}]).iloc[0]
    assert (row["task"], row["max_steps"], row["cross_entropy_lossy"]) == ("stdlib", 7, 3.5)
    assert pd.isna(row["accuracy_lossy"])


# What runs lost and sent, by hand


def measured(operations, **more):
    """Return a run's record with 4 packets, 1 of them lost, for each operation; the messages are an older record's."""
    counts = {"packets": 4, "lost": 1}
    traffic = {"by_direction": {"backward": counts}, "by_operation": dict.fromkeys(operations, counts)}
    traffic["messages"] = {"called": 3, "lossy": 2, "by_direction": {"backward": {"called": 3, "lossy": 2}}}
    return {
        "config": {"loss_rate": 0.1, "data_parallel_size": 2, "max_steps": 10},
        "timing": {"step_seconds": 0.25, "tokens_per_second": 800.0, "device": "cpu"},
        "environment": {"processor": "this one"},
        "network": {"training": traffic},
        "time_to_accuracy": None,
        **more,
    }


def test_the_summary_has_speed_time_to_accuracy_and_collectives_by_direction_and_operation():
    reached = {"target": 0.7, "step": 5, "seconds": 1.5}
    row = speed_and_traffic([measured(["all_reduce"], times_to_targets=[reached])]).iloc[0]
    speed = {name: row[name] for name in row.index if name.startswith("machine") and pd.notna(row[name])}
    assert speed == {
        "machine_processor": "this one", "machine_step_seconds": 0.25, "machine_tokens_per_second": 800.0,
        "machine_seconds_to_0.7": 1.5,
    }  # fmt: skip
    assert row["steps_to_0.7"] == 5
    assert pd.isna(row["steps_to_target"])
    for name in ("backward", "all_reduce"):  # an only operation's calls are all of them
        counted = [row[f"{name}_{what}"] for what in ("called", "lossy", "packets", "lost")]
        assert counted == [3, 2, 4, 1]
    sharded = measured(["all_gather", "reduce_scatter"])
    assert speed_and_traffic([sharded])["all_gather_called"].isna().all(), "unknown"
    calls = {"all_gather": {"called": 2, "lossy": 2}, "reduce_scatter": {"called": 1, "lossy": 0}}
    sharded["network"]["training"]["messages"]["by_operation"] = calls
    row = speed_and_traffic([sharded]).iloc[0]
    assert (row["all_gather_called"], row["reduce_scatter_lossy"], row["reduce_scatter_lost"]) == (2, 0, 1)
