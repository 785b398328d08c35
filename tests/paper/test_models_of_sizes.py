"""Pretrain, measure in inference, fine-tune."""

import shutil
from pathlib import Path

import pandas as pd
import pytest

from lossytp.study.grid import load_experiment
from lossytp.study.run import execute
from lossytp.training.config import PretrainConfig
from lossytp.training.record import read_record
from paper import sizes
from paper.sizes import fine_tuned, packet_bytes, rises_in_inference

pytestmark = pytest.mark.slow

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
def test_each_run_starts_from_the_pretrained_model_and_loses_packets_of_its_size(config, runs):
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


def test_a_finished_run_with_other_settings_is_not_taken_for_this_one(config, runs):
    with pytest.raises(
        ValueError, match=r"fine_tuned_0_seed0 holds a run with max_steps = 2, not 3: delete this folder"
    ):
        fine_tuned(config, {**SETTINGS, "max_steps": 3}, loss_rates=[0.0, 0.5], seeds=2)


def test_rises_have_a_row_for_each_draw_in_packets_of_both_sizes(config, runs):
    table = rises_in_inference(config, SETTINGS, loss_rates=[0.0, 0.5], draws=2)
    assert len(table) == 2 * 2 * 2
    sizes_of = table.groupby("whole_packets")["mtu_bytes"].unique().map(list).to_dict()
    assert sizes_of == {False: [44 + 4 * 43], True: [1500]}, "evaluation is in fp32"
    assert table.loc[table["loss_rate"] == 0, "rise"].abs().max() < 1e-5
    lossy = table[table["loss_rate"] == 0.5]
    assert (lossy["rise"].abs() > 1e-5).all()
    assert lossy["rise"].nunique() == len(lossy), "draws differ"


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


def test_a_packet_carries_a_third_of_a_token_at_every_size():
    for name, elements in (("gpt2-nano", 43), ("gpt2-3m", 64), ("gpt2-micro", 85), ("gpt2-14m", 107)):
        config = PretrainConfig(model_name=name)
        assert packet_bytes(config, bf16=False) == 44 + 4 * elements
        assert packet_bytes(config, bf16=True) == 44 + 2 * elements


def test_a_model_whose_width_is_not_known_by_name_is_refused():
    with pytest.raises(ValueError, match="'someone/some-gpt2' has no known width: give a named shape"):
        packet_bytes(PretrainConfig(model_name="someone/some-gpt2", tensor_parallel_size=1), bf16=False)
