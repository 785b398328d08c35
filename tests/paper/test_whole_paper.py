"""Make numbers and figures from made-up records of every cell, and typeset the paper and the report."""

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typst

from lossytp.study.grid import load_experiments
from lossytp.training.config import PretrainConfig, TrainConfig
from lossytp.training.record import read_record, write_record
from paper.build import make
from paper.study import Study

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "results" / "paper"
EXPERIMENTS = ROOT / "notebooks" / "experiments"
SEEDS = 3


def fall(config: TrainConfig) -> float:
    """Return a made-up drop in accuracy: two points at 10 % loss, half as much with a repair."""
    return 0.2 * config.network.loss_rate * (1.0 if config.network.repair == "zero" else 0.5)


def pretrained(template: dict, config: PretrainConfig) -> dict:
    """Return a made-up record: halving the tokens costs 0.4 nats, 10 % loss 0.1, and as much again in evaluation."""
    changed = {"config": config.result_settings(), "seed": config.network.seed, "parameters": 1_300_000}
    record = copy.deepcopy(template) | changed
    seed, steps = config.network.seed, config.optimizer.total_steps
    clean = 4.5 + 0.1 * seed - 0.4 * np.log2(steps / 1250) + config.network.loss_rate
    clean += np.random.default_rng([seed, steps]).normal(0, 0.0005)
    entropies = {"cross_entropy_clean": clean, "cross_entropy_lossy": clean + config.network.loss_rate}
    record["final"] = dict.fromkeys(record["final"]) | entropies
    record["data"] = {name: record["data"][name] for name in ("sha256", "real_token_share")} | {"majority_share": None}
    return record


def made_up(template: dict, config: TrainConfig, processes: int) -> dict:
    seed, steps = config.network.seed, config.optimizer.max_steps
    changed = {"config": config.result_settings(), "seed": seed, "processes": processes}
    record = copy.deepcopy(template) | changed
    noise = np.random.default_rng([seed, round(1000 * fall(config))]).normal(0, 0.0005)
    learned = 0.08 * np.log(steps / 200) / np.log(3)  # a longer training learns more than losses cost
    accuracy = 0.7 + 0.01 * seed + learned - fall(config) + noise
    record["final"] |= {"accuracy_lossy": accuracy, "accuracy_clean": accuracy + fall(config) / 4}
    record["final"]["cross_entropy_lossy"] = 2 - 3 * accuracy
    every, last = config.output.eval_steps or steps, record["curves"]["eval"][-1]
    if not config.network.reliable_gather:
        last |= {"stream_distance": [0.1, 0.2, 0.3, 0.4], "replica_drift": 0.1}
    record["curves"]["eval"] = [
        last | {"step": step, "accuracy_lossy": accuracy - 0.4 * (1 - step / steps) ** 2}
        for step in range(every, steps + 1, every)
    ]
    traffic = record["network"]["training"]
    lost = int(config.network.loss_rate * traffic["packets"])
    extra = traffic["packets"] // 5 if config.network.repair.startswith(("fec", "retransmit")) else 0
    traffic |= {"lost": lost, "missing": lost, "extra": extra}
    record["timing"]["steps"] = steps
    return record


def make_up_records(place: Path, profile: str) -> None:
    """Write made-up records of all cells of a profile, and copy what the checks measured."""
    place.mkdir()
    for name in ("baseline.json", "step_times.csv", "bursts.csv", "channel.csv"):
        shutil.copy(COMMITTED / name, place)
    templates: dict[str, dict] = {}
    for cell in load_experiments(EXPERIMENTS, "paper", COMMITTED)[0].cells:
        found = None if cell.config.data.dataset in templates else read_record(Path(cell.config.output.output_dir))
        if found is not None:
            templates[cell.config.data.dataset] = found
    for experiment in load_experiments(EXPERIMENTS, profile, place):
        first = experiment.cells[0].config.network.seed
        for cell in experiment.cells:
            if cell.config.network.seed < first + SEEDS:
                template = templates.get(cell.config.data.dataset, templates["docstrings"])
                if isinstance(cell.config, PretrainConfig):
                    record = pretrained(template, cell.config)
                else:
                    record = made_up(template, cell.config, experiment.processes)
                write_record(Path(cell.config.output.output_dir), record)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return a results folder of the paper's profile with all figures."""
    place = tmp_path_factory.mktemp("paper") / "results"
    make_up_records(place, "paper")
    rows = [
        {
            "task": "docstrings",
            "trained_at": trained,
            "evaluated_at": at,
            "seed": seed,
            "accuracy": 0.7 - at / 10 + seed / 90,
        }
        for trained in (0.0, 0.1, 0.3)
        for at in (0.0, 0.1, 0.3)
        for seed in range(SEEDS)
    ]
    for name in ("real_model", "predictions", "sizes"):
        shutil.copytree(COMMITTED / name, place / name)
    (place / "robustness").mkdir()
    pd.DataFrame(rows).to_csv(place / "robustness" / "evaluations.csv", index=False)
    values = {"profile": "paper", "results_dir": str(place), "experiments_dir": str(ROOT / "notebooks" / "experiments")}
    notebook = [sys.executable, "-m", "lossytp.study.run", str(ROOT / "notebooks" / "50_figures.ipynb")]
    subprocess.run([*notebook, str(place / "out.ipynb"), "--parameters", json.dumps(values)], check=True, cwd=ROOT)
    return place


@pytest.fixture(scope="module")
def paper(results):
    return json.loads((results / "paper.json").read_text())


def test_every_grid_but_those_with_figures_of_their_own_is_compared(paper):
    experiments = load_experiments(ROOT / "notebooks" / "experiments", "paper", ROOT / "results" / "paper")
    names = {experiment.name for experiment in experiments}
    own = {"01_tolerance", "08_robustness", "11_pretraining", "12_predictions", "15_sizes", "18_pretraining_gpt2"}
    assert set(paper["comparisons"]) == names - own - {"18_pretraining_gpt2_jumbo"}


def test_what_was_put_in_comes_out(paper):
    repairs = {(row["task"], row["arm"]): row for row in paper["comparisons"]["06_repair"]}
    for task, rate in (("docstrings", 0.2), ("sst2_held_out", 0.3)):
        assert repairs[task, "zero"]["difference"] == pytest.approx(-0.2 * rate, abs=0.002)
        assert repairs[task, "zero"]["clean"] == pytest.approx(-0.15 * rate, abs=0.002)
        assert repairs[task, "local"]["gain"] == pytest.approx(0.1 * rate, abs=0.002)
        assert repairs[task, "zero"]["rise"] == pytest.approx(0.6 * rate, abs=0.006)
    for arm in paper["tolerance"]:  # one point is lost at 5 %
        assert arm["budget"]["value"] == pytest.approx(0.05, abs=0.006)
    lossy = {(row["arm"], row["loss_rate"]): row for row in paper["pretraining"]}["losses on the way to a sum", 0.1]
    assert (lossy["clean"], lossy["lossy"]) == pytest.approx((0.1, 0.2), abs=0.001)
    assert lossy["lossy_times_tokens"] == pytest.approx(2**0.5, abs=0.01)
    assert {arm["name"] for arm in paper["tolerance"]} == {"reduce phase", "both phases", "ring, both phases"}


@pytest.fixture
def root(results, tmp_path):
    """Return a folder with the paper and the results; Typst reads nothing outside it."""
    shutil.copytree(ROOT / "paper", tmp_path / "root" / "paper")
    shutil.copytree(results, tmp_path / "root" / "results", ignore=shutil.ignore_patterns("runs"))
    return tmp_path / "root"


def pages(root, text):
    source, inputs = str(root / "paper" / f"{text}.typ"), {"results": "/results"}
    made = typst.compile(source, root=str(root), sys_inputs=inputs, format="png", ppi=20)
    return made if isinstance(made, list) else [made]  # a single page is no list


def test_the_report_is_typeset_from_any_runs(root):
    assert 2 <= len(pages(root, "report")) <= 8


def test_the_small_study_ends_with_a_report(tmp_path):
    shutil.copytree(ROOT / "paper", tmp_path / "paper")
    make_up_records(tmp_path / "results", "small")
    small = make(Study.read(tmp_path / "results", EXPERIMENTS, "small"))
    assert {row["arm"] for row in small["law_arms"]} == {"single losses"}
    assert set(small["law_elsewhere"]["docstrings"].values()) == {None}
    assert 1 <= len(pages(tmp_path, "report")) <= 2


def test_the_paper_is_typeset_from_the_committed_results(tmp_path):
    shutil.copytree(ROOT / "paper", tmp_path / "paper")
    shutil.copytree(COMMITTED, tmp_path / "results", ignore=shutil.ignore_patterns("runs"))
    source = str(tmp_path / "paper" / "lossytp.typ")
    inputs = {"root": str(tmp_path), "sys_inputs": {"results": "/results"}}
    (appendix,) = json.loads(typst.query(source, "<appendix-page>", field="value", **inputs))
    assert 4 <= appendix <= 8
    assert len(pages(tmp_path, "lossytp")) <= 13


def test_a_claim_that_is_no_longer_true_stops_the_paper_with_its_numbers_and_sentence(root, paper):
    source = (ROOT / "paper" / "lossytp.typ").read_text(encoding="utf-8")
    in_order = re.findall(r'#claim\("(\w+)"\)', source)
    false = next(name for name in in_order if not paper["claims"][name]["holds"])  # the runs are made up
    for name, claim in paper["claims"].items():
        claim["holds"] |= name != false
    (root / "results" / "paper.json").write_text(json.dumps(paper))
    with pytest.raises(typst.TypstError, match=f"(?s)the claim {false} is no longer true, with .*: [A-Z][a-z]* "):
        pages(root, "lossytp")
