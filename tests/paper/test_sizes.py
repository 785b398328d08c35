"""Whether tolerance depends on a model's size: made-up costs by hand, and tiny models pretrained and fine-tuned."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lossytp.study.grid import load_experiment
from lossytp.study.run import execute
from lossytp.training.config import PretrainConfig
from lossytp.training.record import read_record
from paper import sizes
from paper.sizes import (
    exponents,
    falls_of_models,
    fine_tuned,
    of_equal_tokens,
    of_one_size,
    packet_bytes,
    rises_in_inference,
    rises_of_models,
)

PARAMETERS = {"small": 1_000_000, "middle": 4_000_000, "large": 16_000_000}
SEEDS = (0, 1, 2)


def fine_tuning(exponent: float) -> pd.DataFrame:
    """Return runs whose fall is 0.02 at a million parameters and follows the exponent. Seeds differ by more."""
    rows = [
        {"model_name": name, "parameters": count, "tokens": 8000, "pretrained": 4.5, "seed": seed, "loss_rate": rate}
        | {"accuracy_lossy": 0.6 + 0.05 * seed - (rate > 0) * 0.02 * (count / 1e6) ** exponent}
        for name, count in PARAMETERS.items()
        for seed in SEEDS
        for rate in (0.0, 0.3)
    ]
    return pd.DataFrame(rows)


def inference(exponent: float) -> pd.DataFrame:
    rows = [
        {"model_name": name, "tokens": 8000, "lossless": 4.5, "whole_packets": whole, "loss_rate": rate, "draw": draw}
        | {"rise": (1 + whole) * rate * (1 + 0.1 * draw) * (count / 1e6) ** exponent}
        for name, count in PARAMETERS.items()
        for whole in (False, True)
        for rate in (0.1, 0.3)
        for draw in SEEDS
    ]
    return pd.DataFrame(rows)


def test_falls_are_paired_by_seed():
    found = falls_of_models(fine_tuning(0.5)).set_index("model_name")
    assert found["fall"].to_dict() == pytest.approx({"small": 0.02, "middle": 0.04, "large": 0.08})
    assert (found["high"] - found["low"]).to_numpy() == pytest.approx(np.zeros(3), abs=1e-9)
    assert found["accuracy"].to_list() == pytest.approx([0.65] * 3)
    assert found["parameters"].to_dict() == PARAMETERS
    assert set(found["seeds"]) == {3}


def test_rises_are_averaged_over_draws():
    found = rises_of_models(inference(0.0), fine_tuning(0.0))
    assert len(found) == 3 * 2 * 2
    (row,) = found.query("model_name == 'large' and whole_packets and loss_rate == 0.3").to_dict("records")
    assert row["rise"] == pytest.approx(0.66)
    assert row["low"] < 0.66 < row["high"]
    assert row["parameters"] == 16_000_000


def with_other_tokens(table: pd.DataFrame, cost: str, exponent: float) -> pd.DataFrame:
    """Add the small model after half and twice of the tokens. Its lossy cost follows the exponent."""
    tables = [table]
    for factor in (0.5, 2):
        other = table[table["model_name"] == "small"].assign(tokens=int(factor * 8000))
        lossy = other["loss_rate"] > 0
        if cost == "rise":
            other.loc[lossy, "rise"] *= factor**exponent
        else:
            other.loc[lossy, "accuracy_lossy"] += (1 - factor**exponent) * 0.02
        tables.append(other)
    return pd.concat(tables, ignore_index=True)


def exponent(found, cost, rate, against="parameters"):
    (row,) = (row for row in found if (row["against"], row["cost"], row["loss_rate"]) == (against, cost, rate))
    return row


def test_tokens_have_exponents_of_their_own_and_leave_those_of_size_alone():
    runs, draws = fine_tuning(-0.3), inference(0.2)
    found = exponents(with_other_tokens(runs, "fall", 1), with_other_tokens(draws, "rise", 2))
    assert exponent(found, "fall", 0.3, "tokens")["value"] == pytest.approx(1)
    assert exponent(found, "rise", 0.1, "tokens")["value"] == pytest.approx(2)
    assert exponent(found, "rise, whole packets", 0.3, "tokens")["value"] == pytest.approx(2)
    of_size = [row for row in found if row["against"] == "parameters"]
    alone = exponents(runs, draws)
    assert [row["value"] for row in of_size] == pytest.approx([row["value"] for row in alone])


def test_models_are_compared_at_equal_tokens_and_at_one_size():
    runs = with_other_tokens(fine_tuning(0.0), "fall", 1)
    assert set(of_equal_tokens(runs)["model_name"]) == set(PARAMETERS)
    assert set(of_equal_tokens(runs)["tokens"]) == {8000}
    assert set(of_one_size(runs)["model_name"]) == {"small"}
    assert set(of_one_size(runs)["tokens"]) == {4000, 8000, 16000}
    assert of_one_size(fine_tuning(0.0)).empty


@pytest.mark.parametrize("power", [-0.3, 0.0, 0.4])
def test_the_exponent_is_that_of_a_power_law(power):
    found = exponents(fine_tuning(power), inference(2 * power))
    costs = [("fall", 0.3), *((f"rise{end}", rate) for end in ("", ", whole packets") for rate in (0.1, 0.3))]
    assert [(row["cost"], row["loss_rate"]) for row in found] == costs
    assert [row["value"] for row in found] == pytest.approx([power, *4 * [2 * power]])
    runs = fine_tuning(power)
    lacking = exponents(runs[~((runs["model_name"] == "large") & (runs["seed"] == 2))], inference(0.0))
    assert exponent(lacking, "fall", 0.3)["value"] == pytest.approx(power), "a seed that a model lacks is left out"


def test_the_interval_is_over_seeds():
    runs = fine_tuning(0.0)
    steeper = (runs["loss_rate"] > 0) & (runs["seed"] == 1) & (runs["model_name"] == "large")
    runs.loc[steeper, "accuracy_lossy"] -= 0.02  # twice the fall at the large end, in one seed
    found = exponent(exponents(runs, inference(0.0)), "fall", 0.3)
    assert found["value"] == pytest.approx(np.log(4 / 3) / (2 * np.log(4))), "the large model's mean fall is 4/3"
    without = np.array([np.log(3 / 2), 0, np.log(3 / 2)]) / (2 * np.log(4))  # one seed left out at a time
    half = 4.3027 * (2 * without).std(ddof=1) / 3**0.5
    assert (found["low"], found["high"]) == pytest.approx((found["value"] - half, found["value"] + half), rel=1e-3)


def test_a_seed_that_does_not_fall_counts_and_a_model_that_does_not_leaves_no_exponent():
    runs = fine_tuning(0.0)
    better = (runs["loss_rate"] > 0) & (runs["seed"] == 1) & (runs["model_name"] == "large")
    runs.loc[better, "accuracy_lossy"] += 0.03
    assert exponent(exponents(runs, inference(0.0)), "fall", 0.3)["value"] < 0
    runs.loc[better, "accuracy_lossy"] += 0.04
    assert exponent(exponents(runs, inference(0.0)), "fall", 0.3)["value"] is None


# Tiny models

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "results" / "paper"
GRID = ROOT / "notebooks" / "experiments" / "15_sizes.yaml"
NANO = ROOT / "models" / "gpt2-nano"
SETTINGS = {"max_length": 16, "batch_size": 8, "max_steps": 2, "max_samples": 200, "eval_samples": 80, "bf16": True}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PretrainConfig:
    text = tmp_path_factory.mktemp("text") / "river.txt"
    text.write_text("The river flows through the old town and into the sea near the harbour. " * 200, encoding="utf-8")
    return PretrainConfig(
        total_steps=2, batch_size=4, eval_samples=4, block_size=32, tokenizer_path=str(NANO), data_glob=str(text),
        output_dir=str(tmp_path_factory.mktemp("pretrained") / "run"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(config: PretrainConfig) -> pd.DataFrame:
    return fine_tuned(config, SETTINGS, loss_rates=[0.0, 0.5], seeds=2)


@pytest.mark.slow
def test_fine_tuned_starts_from_the_pretrained_model_and_loses_packets_of_its_size(config, runs):
    assert runs[["loss_rate", "seed"]].to_numpy().tolist() == [[0.0, 0], [0.5, 0], [0.0, 1], [0.5, 1]]
    pretrained = read_record(Path(config.output.output_dir))
    assert set(runs["pretrained"]) == {pretrained["final"]["cross_entropy_clean"]}
    assert set(runs["parameters"]) == {pretrained["parameters"]}
    for row in runs.to_dict("records"):
        record = read_record(Path(config.output.output_dir, f"fine_tuned_{row['loss_rate']:g}_seed{row['seed']}"))
        assert record["config"]["model_name"] == config.output.output_dir
        assert record["config"]["mtu_bytes"] == row["mtu_bytes"] == 44 + 2 * 43, "bf16: 2 bytes for each of 43 elements"
        assert record["final"]["accuracy_lossy"] == row["accuracy_lossy"]
        assert (record["network"]["training"]["observed_loss_rate"] > 0) == (row["loss_rate"] > 0)


@pytest.mark.slow
def test_finished_runs_are_read_even_without_the_model(config, runs, monkeypatch):
    monkeypatch.setattr(
        sizes, "run", lambda asked: read_record(Path(asked.output.output_dir)) or pytest.fail("trained again")
    )
    weights = Path(config.output.output_dir, "config.json")
    hidden = weights.rename(weights.with_suffix(".hidden"))
    try:
        again = fine_tuned(config, SETTINGS, loss_rates=[0.0, 0.5], seeds=2)
    finally:
        hidden.rename(weights)
    pd.testing.assert_frame_equal(again, runs)
    with pytest.raises(ValueError, match="fine_tuned_0_seed0 holds a run with max_steps = 2"):
        fine_tuned(config, {**SETTINGS, "max_steps": 3}, loss_rates=[0.0, 0.5], seeds=2)


@pytest.mark.slow
def test_rises_have_a_row_for_each_draw_in_packets_of_both_sizes(config, runs):
    table = rises_in_inference(config, SETTINGS, loss_rates=[0.0, 0.5], draws=2)
    assert len(table) == 2 * 2 * 2
    sizes_of = table.groupby("whole_packets")["mtu_bytes"].unique().map(list).to_dict()
    assert sizes_of == {False: [44 + 4 * 43], True: [1500]}, "evaluation is in fp32"
    assert table.loc[table["loss_rate"] == 0, "rise"].abs().max() < 1e-5
    lossy = table[table["loss_rate"] == 0.5]
    assert (lossy["rise"].abs() > 1e-5).all()
    assert lossy["rise"].nunique() == len(lossy), "draws differ"


@pytest.mark.slow
def test_rows_in_the_table_need_no_model(config, monkeypatch):
    measured = rises_in_inference(config, SETTINGS, loss_rates=[0.1, 0.5], draws=2)
    known = pd.concat([measured.assign(run="another", rise=-1.0), measured[::-1]])
    monkeypatch.setattr(sizes, "InferenceProbe", lambda *_, **__: pytest.fail("measured again"))
    kept = rises_in_inference(config, SETTINGS, loss_rates=[0.1, 0.5], draws=2, known=known)
    pd.testing.assert_frame_equal(kept, measured)
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        rises_in_inference(config, SETTINGS, loss_rates=[0.1, 0.5], draws=3, known=known)
    earlier = measured.assign(pretrained=measured["pretrained"] + 0.1)  # before the model was pretrained again
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        rises_in_inference(config, SETTINGS, loss_rates=[0.1, 0.5], draws=2, known=earlier)


@pytest.mark.slow
def test_another_size_is_added_to_the_committed_ones_without_their_models(tmp_path):
    """A clone has the records and the tables alone. The notebook runs over the first two of the paper's models."""
    cells = [cell.config for cell in load_experiment(GRID, "paper", tmp_path / "paper").cells[:2]]
    for cell in cells:
        folder = Path(cell.output.output_dir)
        shutil.copytree(COMMITTED / "runs" / folder.name, folder)
    shutil.copytree(COMMITTED / "sizes", tmp_path / "paper" / "sizes")
    written = (tmp_path / "paper" / "sizes" / "inference.csv").read_text().splitlines()
    values = {"cells": [cell.as_dict() for cell in cells], "results_dir": str(tmp_path / "paper")}
    execute(ROOT / "notebooks" / "43_sizes.ipynb", tmp_path / "out.ipynb", values)
    kept = (tmp_path / "paper" / "sizes" / "inference.csv").read_text().splitlines()
    assert kept == [
        line for line in written if line.startswith(("run,", *(Path(each.output.output_dir).name for each in cells)))
    ]


@pytest.mark.slow
def test_a_packet_carries_a_third_of_a_token_at_every_size():
    for name, elements in (("gpt2-nano", 43), ("gpt2-3m", 64), ("gpt2-micro", 85), ("gpt2-14m", 107)):
        config = PretrainConfig(model_name=name)
        assert packet_bytes(config, bf16=False) == 44 + 4 * elements
        assert packet_bytes(config, bf16=True) == 44 + 2 * elements
    with pytest.raises(ValueError, match="someone/some-gpt2"):
        packet_bytes(PretrainConfig(model_name="someone/some-gpt2", tensor_parallel_size=1), bf16=False)
