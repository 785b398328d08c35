"""Test what a trained model is asked: accuracy with each repair, and how far its strongest packet stands out."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from lossytp.study.run import execute
from lossytp.training import evaluation
from lossytp.training.config import TrainConfig
from lossytp.training.record import read_record
from paper import real_training as after_training
from paper.real_training import train_and_measure

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "42_real_model_training.ipynb"
TINY = {"max_steps": 4, "max_length": 16, "max_samples": 200, "eval_samples": 80, "tensor_parallel_size": 2}
REPAIRS = ["zero", "retransmit(9)"]


def config(folder, **values):
    return TrainConfig(**{**TINY, "save_model": True, "loss_rate": 0.3, "output_dir": str(folder), **values})


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("asked")
    return folder, train_and_measure(config(folder / "run"), loss_rate=0.3, repairs=REPAIRS)


def test_each_repair_has_a_row_beside_the_accuracy_without_losses(asked):
    folder, table = asked
    record = read_record(folder / "run")
    assert table["evaluated_with"].tolist() == REPAIRS
    assert table["clean"].tolist() == [record["final"]["accuracy_clean"]] * 2
    assert table["accuracy"][1] == table["clean"][1], "nearly all packets arrive in the end"
    assert table["accuracy"][0] != table["clean"][0]
    assert (table["trained_with"] == "zero").all()
    assert (table["trained_at"] == 0.3).all()
    strongest = json.loads((folder / "run" / "strongest_packet.json").read_text())
    assert table["strongest"].tolist() == [pytest.approx(strongest["largest"] / strongest["median"])] * 2
    assert strongest["ratio"] > 1


def test_a_finished_run_is_not_asked_again_and_keeps_no_model(asked, monkeypatch):
    folder, table = asked
    for module, name in ((evaluation, "run"), (after_training, "packet_norms")):
        monkeypatch.setattr(module, name, None)
    pd.testing.assert_frame_equal(train_and_measure(config(folder / "run"), loss_rate=0.3, repairs=REPAIRS), table)
    assert not (folder / "run" / "last").exists()
    lacking = r"no evaluation at 0\.3 with repair = 'rescale', and its model was deleted: delete"
    with pytest.raises(ValueError, match=lacking):
        train_and_measure(config(folder / "run"), loss_rate=0.3, repairs=["rescale"])


@pytest.fixture
def in_a_clone(asked, tmp_path, monkeypatch):
    """Return the finished run's folder with its record alone, as results keep it, and its table; measure nothing."""
    folder, table = asked
    shutil.copytree(folder / "run", tmp_path / "run", ignore=lambda _, names: set(names) - {"record.json"})
    for module, name in ((evaluation, "run"), (after_training, "packet_norms")):
        monkeypatch.setattr(module, name, None)
    return tmp_path / "run", table


def test_rows_in_the_table_need_neither_the_model_nor_its_measurements(in_a_clone):
    run, table = in_a_clone
    others = table.assign(run="another", accuracy=0.0)
    known = pd.concat([others, table.assign(evaluated_at=0.9, accuracy=0.0), table[::-1]])
    kept = train_and_measure(config(run), loss_rate=0.3, repairs=REPAIRS, known=known)
    pd.testing.assert_frame_equal(kept, table)


@pytest.mark.parametrize(("at", "repairs"), [(0.2, REPAIRS), (0.3, ["zero", "rescale"])])
def test_rows_that_the_table_lacks_are_measured(in_a_clone, at, repairs):
    run, table = in_a_clone
    with pytest.raises(ValueError, match="its model was deleted: delete this folder and train again"):
        train_and_measure(config(run), loss_rate=at, repairs=repairs, known=table)


def test_rows_of_an_earlier_run_in_the_same_folder_are_not_kept(in_a_clone):
    run, table = in_a_clone
    with pytest.raises(ValueError, match="its model was deleted"):
        train_and_measure(config(run), loss_rate=0.3, repairs=REPAIRS, known=table.assign(clean=table["clean"] + 0.1))


def test_a_run_that_saves_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="save_model = False leaves no model to measure: set it to True"):
        train_and_measure(config(tmp_path, save_model=False), loss_rate=0.3, repairs=["zero"])


def test_a_run_that_became_not_finite_scores_the_most_frequent_class(tmp_path):
    table = train_and_measure(config(tmp_path, learning_rate=1e30, warmup_steps=0), loss_rate=0.3, repairs=REPAIRS)
    record = read_record(tmp_path)
    assert record["status"] == "not finite"
    share = record["data"]["majority_share"]
    assert table["accuracy"].tolist() == table["clean"].tolist() == [share, share]
    assert table["strongest"].isna().all()


def test_the_notebook_writes_the_table_and_keeps_its_rows(asked, tmp_path):
    folder, table = tmp_path, asked[1]
    shutil.copytree(asked[0] / "run", folder / "run")
    cells = [config(folder / "run").as_dict()]
    values = {"cells": cells, "loss_rate": 0.3, "repairs": REPAIRS, "results_dir": str(tmp_path)}
    execute(NOTEBOOK, tmp_path / "out.ipynb", values)
    file = tmp_path / "real_model" / "after_training_docstrings.csv"
    pd.testing.assert_frame_equal(pd.read_csv(file), table)
    written = file.read_bytes()
    for measured in [*(folder / "run").glob("evaluated_at*/*"), folder / "run" / "strongest_packet.json"]:
        measured.unlink()  # results do not keep them
    execute(NOTEBOOK, tmp_path / "out.ipynb", values)
    assert file.read_bytes() == written
