"""Make answers and figures from made-up records, and typeset the report and the paper."""

import copy
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typst

from lossytp.study.grid import load_experiment, load_experiments
from lossytp.study.run import execute
from lossytp.training.config import TrainConfig
from lossytp.training.record import read_record, write_record

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "results" / "paper"
EXPERIMENTS = ROOT / "notebooks" / "experiments"
REDRAWN = {2: "real_model", 3: "models", 4: "both_phases", 5: "pretraining", 6: "price", 7: "sizes", 9: "lost_together"}


def fall(config: TrainConfig) -> float:
    """Return a made-up drop in accuracy: two points at 10 % loss."""
    return 0.2 * config.network.loss_rate


def made_up(template: dict, config: TrainConfig, processes: int) -> dict:
    """Return a record whose accuracy falls as `fall` says."""
    seed = config.network.seed
    changed = {"config": config.result_settings(), "seed": seed, "processes": processes}
    record = copy.deepcopy(template) | changed
    noise = np.random.default_rng([seed, round(1000 * fall(config))]).normal(0, 0.0005)
    accuracy = 0.7 + 0.01 * seed - fall(config) + noise
    record["final"] |= {"accuracy_lossy": accuracy, "accuracy_clean": accuracy + fall(config) / 4}
    record["timing"]["steps"] = config.optimizer.max_steps
    return record


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a folder with the paper's texts and the small profile's results, of made-up records."""
    root = tmp_path_factory.mktemp("small")
    place = root / "results"
    published = load_experiment(EXPERIMENTS / "01_tolerance.yaml", "paper", COMMITTED).cells
    folders = (Path(cell.config.output.output_dir) for cell in published if cell.config.data.dataset == "docstrings")
    template = next(record for folder in folders if (record := read_record(folder)))
    for experiment in load_experiments(EXPERIMENTS, "small", place):
        for cell in experiment.cells:
            record = made_up(template, cell.config, experiment.processes)
            write_record(Path(cell.config.output.output_dir), record)
    values = {"profile": "small", "results_dir": str(place), "output_dir": str(place)}
    for notebook in ("50_runs", "51_tolerance"):
        execute(ROOT / "notebooks" / f"{notebook}.ipynb", root / "out.ipynb", values)
    shutil.copytree(ROOT / "paper", root / "paper")
    return root


def pages(root, text):
    source, inputs = str(root / "paper" / f"{text}.typ"), {"results": "/results"}
    made = typst.compile(source, root=str(root), sys_inputs=inputs, format="png", ppi=20)
    return made if isinstance(made, list) else [made]  # a single page is no list


def test_what_was_put_in_comes_out(small):
    answers = small / "results" / "answers"
    for arm in json.loads((answers / "tolerance.json").read_text())["tolerance"]:  # one point is lost at 5 %
        assert arm["budget"]["value"] == pytest.approx(0.05, abs=0.006)
    compared = pd.read_csv(answers / "comparisons.csv")
    lossy = compared[(compared["loss_rate"] > 0) & (compared["experiment"] == "01_tolerance")]
    assert lossy["fall"].to_numpy() == pytest.approx(0.2 * lossy["loss_rate"].to_numpy(), abs=0.002)
    assert (small / "results" / "figures" / "tolerance.svg").is_file()


def test_the_small_study_ends_with_a_report(small):
    assert 1 <= len(pages(small, "report")) <= 2


@pytest.fixture
def root(tmp_path):
    """Return a folder with the paper and the committed results; Typst reads nothing outside it."""
    shutil.copytree(ROOT / "paper", tmp_path / "paper")
    shutil.copytree(COMMITTED, tmp_path / "results", ignore=shutil.ignore_patterns("runs"))
    return tmp_path


def test_the_paper_is_typeset_from_the_committed_results(root):
    assert 1 <= len(pages(root, "lossytp")) <= 8


def test_a_claim_that_is_no_longer_true_stops_the_paper_with_its_numbers_and_sentence(root):
    source = (ROOT / "paper" / "lossytp.typ").read_text(encoding="utf-8")
    false = re.findall(r'#claim\("(\w+)"\)', source)[0]
    for file in (root / "results" / "answers").glob("*.json"):
        answer = json.loads(file.read_text())
        if false in answer.get("claims", {}):
            answer["claims"][false]["holds"] = False
            file.write_text(json.dumps(answer))
    with pytest.raises(typst.TypstError, match=f"(?s)the claim {false} is no longer true, with .*: [A-Z][a-z]*[, ]"):
        pages(root, "lossytp")


def leaves(value, name=""):
    """Yield the numbers and words of an answer by their places."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if parts is None:
        yield name, value
    for key, part in parts or ():
        yield from leaves(part, f"{name}/{key}")


@pytest.mark.parametrize("question", ["51_tolerance", *(f"5{number}_{name}" for number, name in REDRAWN.items())])
def test_a_question_is_answered_again_as_committed(tmp_path, question):
    """Notebooks read committed records; numbers agree but for rounding."""
    values = {"profile": "paper", "results_dir": str(COMMITTED), "output_dir": str(tmp_path)}
    execute(ROOT / "notebooks" / f"{question}.ipynb", tmp_path / "out.ipynb", values)
    file = Path("answers", f"{question[3:]}.json")
    here, there = (dict(leaves(json.loads((folder / file).read_text()))) for folder in (tmp_path, COMMITTED))
    assert here.keys() == there.keys()
    numbers = {place for place, each in there.items() if isinstance(each, float)}
    assert {place: here[place] for place in numbers} == pytest.approx(
        {place: there[place] for place in numbers}, rel=1e-6
    )
    assert [here[place] for place in there.keys() - numbers] == [there[place] for place in there.keys() - numbers]
