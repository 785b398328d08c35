"""Compare published records with copies of them, changed in one place each."""

import copy
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from lossytp.study.grid import load_experiments
from lossytp.study.run import execute
from paper.reproduction import compare_lines, compare_runs, line, verdict
from paper.study import typeset

ROOT = Path(__file__).parents[2]
GRIDS, PUBLISHED = ROOT / "notebooks" / "experiments", ROOT / "results" / "paper"
PUBLISHED_LINE = json.loads((PUBLISHED / "line.json").read_text())


@pytest.fixture
def here(tmp_path):
    """Return a results folder whose records are the published ones."""
    results = tmp_path / "laptop"
    for experiment in load_experiments(GRIDS, "laptop", results):
        for folder in experiment.folders:
            shutil.copytree(PUBLISHED / "runs" / Path(folder).name, folder)
    shutil.copy(PUBLISHED / "line.json", results)
    return results


def compared(here):
    return compare_runs(load_experiments(GRIDS, "laptop", here), PUBLISHED)


def change(here, edit):
    """Edit the record of the first cell, and return the cell's rows of the comparison."""
    first = load_experiments(GRIDS, "laptop", here)[0].cells[0]
    file = Path(first.config.output.output_dir) / "record.json"
    record = json.loads(file.read_text())
    edit(record)
    file.write_text(json.dumps(record))
    table = compared(here)
    ours = (table["arm"] == first.arm) & (table["seed"] == first.config.network.seed)
    assert (table[~ours]["agrees"] == "yes").all()
    return table[ours].set_index("measure")


def test_equal_records_agree_in_every_value(here):
    table = compared(here)
    assert len(table) == 3 * 7  # two accuracies and a count of each cell
    assert (table["agrees"] == "yes").all()
    assert (table["difference"] == 0).all()
    assert verdict(table) == "21 of 21 values agree with the published ones"


@pytest.mark.parametrize(("difference", "agrees"), [(0.009, "yes"), (-0.009, "yes"), (0.011, "no"), (-0.011, "no")])
def test_an_accuracy_may_differ_by_a_point(here, difference, agrees):
    def edit(record):
        record["final"]["accuracy_lossy"] += difference

    row = change(here, edit).loc["accuracy with losses"]
    assert row["agrees"] == agrees
    assert row["difference"] == pytest.approx(difference)
    assert row["here"] - row["published"] == pytest.approx(difference)


def test_a_single_packet_is_noticed(here):
    def edit(record):
        record["network"]["training"]["lost"] += 1

    rows = change(here, edit)
    assert rows["agrees"].to_dict() == {
        "accuracy with losses": "yes",
        "accuracy without": "yes",
        "packets lost in training": "no",
    }
    assert verdict(rows).startswith("2 of 3 values agree")


def test_runs_that_ended_differently_never_agree(here):
    def diverge(record):
        record["status"] = "not finite"
        record["final"] = dict.fromkeys(record["final"])

    assert (change(here, lambda record: record.update(status="stopped early"))["agrees"] == "no").all()
    rows = change(here, diverge)
    assert (rows["agrees"] == "no").all()
    assert rows["here"]["accuracy with losses"] < rows["published"]["accuracy with losses"], "the most frequent class"


def test_cells_with_other_data_are_not_compared(here):
    def edit(record):
        record["data"]["sha256"] = "other"
        record["final"]["accuracy_clean"] = 0.0

    rows = change(here, edit)
    assert (rows["agrees"] == "other data").all()
    assert verdict(rows).startswith("0 of 0 values agree")


def test_a_missing_record_is_named(here):
    folder = next(iter(load_experiments(GRIDS, "laptop", here)[0].folders))
    (Path(folder) / "record.json").unlink()
    with pytest.raises(ValueError, match=f"{folder} has no record.json: run its cell first"):
        compared(here)


def test_the_line_and_the_strongest_packet_may_differ_by_a_hundredth_of_a_nat():
    ours = copy.deepcopy(PUBLISHED_LINE)
    ours["slope"] += 0.9  # 0.009 nats for each per cent
    ours["strongest"]["rise"] -= 0.011
    assert list(compare_lines(ours, PUBLISHED_LINE)["agrees"]) == ["yes", "no"]
    ours["environment"]["python"] = "3.12.1"
    assert list(compare_lines(ours, PUBLISHED_LINE)["agrees"]) == ["other data"] * 2
    ours["settings"]["seed"] += 1
    with pytest.raises(ValueError, match="other settings"):
        compare_lines(ours, PUBLISHED_LINE)


@pytest.mark.slow
def test_the_line_is_measured_again_as_published(tmp_path):
    table = compare_lines(line(tmp_path / "line.json"), PUBLISHED_LINE)
    assert "no" not in set(table["agrees"])
    assert line(tmp_path / "line.json")["commit"], "the record is read"


@pytest.mark.slow
def test_the_cells_of_the_laptop_are_among_the_papers():
    laptop, paper = (
        {Path(folder).name for each in load_experiments(GRIDS, profile, Path("results")) for folder in each.folders}
        for profile in ("laptop", "paper")
    )
    assert laptop < paper


@pytest.mark.slow
def test_the_page_is_made_of_the_notebooks_table_and_figure(here, tmp_path, monkeypatch):
    parameters = {"results_dir": str(here), "output_dir": str(here), "experiments_dir": str(GRIDS)}
    execute(ROOT / "notebooks" / "58_reproduction.ipynb", tmp_path / "out.ipynb", parameters)
    page = json.loads((here / "answers" / "reproduction.json").read_text())
    assert page["verdict"] == "23 of 23 values agree with the published ones"
    assert len(pd.DataFrame(page["rows"])) == 23
    shutil.copytree(ROOT / "paper", tmp_path / "paper")
    monkeypatch.chdir(tmp_path)  # typst reads nothing outside its root
    typeset(Path("paper/reproduction.typ"), Path("page.pdf"), Path("laptop"))
    assert Path("page.pdf").read_bytes().startswith(b"%PDF")
