"""A task that a YAML file declares: trained, evaluated, run again from its record, and in a grid of the study."""

import os
import re
import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from lossytp.study.grid import load_experiment
from lossytp.study.tables import read_experiment
from lossytp.training import evaluation
from lossytp.training.command_line import parse
from lossytp.training.config import EvaluateConfig, TrainConfig, run_settings
from lossytp.training.loop import run
from lossytp.training.record import read_record
from tests.training.own_tasks import HEADLINES, declare, write_rows
from tests.training.tasks_of_all_kinds import at, losses

README = (Path(__file__).parents[2] / "docs/howto/task.md").read_text(encoding="utf-8")
FLAGS = "--model_name gpt2-nano-scratch --batch_size 12 --max_steps 1 --warmup_steps 0 --max_length 48 --loss_rate 0.1"


@pytest.fixture(autouse=True)
def _small(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with ExitStack() as stack:
        for each in at(tmp_path):
            stack.enter_context(each)
        yield


def config_of(file, **values):
    return parse(TrainConfig, None, [*FLAGS.split(), "--eval_samples", "4", "--dataset", str(file), *flags(values)])


def flags(values):
    return [f"--{name}={value}" if value is not True else f"--{name}" for name, value in values.items()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADLINES)
def test_each_kind_is_trained_evaluated_and_run_again_from_its_record_in_another_folder(tmp_path, monkeypatch, kind):
    file = declare(tmp_path / "tasks", kind)
    monkeypatch.chdir(tmp_path / "tasks")
    record = run(config_of(file.name, save_model=True, output_dir=tmp_path / "run"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    file.unlink()  # the record and the model hold all of it
    assert (record["config"]["dataset"], record["data"]["metric"]) == ("mine", HEADLINES[kind])
    assert record["config"]["declaration"]["train"] == "rows/train-*.csv"
    assert (record["data"]["train_examples"], record["data"]["test_examples"]) == (36, 4)
    whole = {"without_label": 0, "without_text": 0}
    assert record["data"]["incomplete_rows"] == {"train": whole, "test": whole}

    again = run(parse(TrainConfig, None, ["--config", str(tmp_path / "run/record.json"), "--output_dir", "again"]))
    assert losses(again) == losses(record)
    assert (again["config"], again["data"]) == (record["config"], record["data"])

    words = ["--model_name", str(tmp_path / "run/last"), "--eval_samples", "4", "--output_dir", "evaluated"]
    result = evaluation.run(parse(EvaluateConfig, None, words))
    assert (result["dataset"], result["metric"], result["test_examples"]) == ("mine", HEADLINES[kind], 4)
    assert result["clean"]["score"] == pytest.approx(record["final"]["score_clean"], abs=1e-6)
    assert result["config"]["declaration"] == record["config"]["declaration"]
    words = ["--config", "evaluated/evaluation.json", "--output_dir", "evaluated_again"]
    assert evaluation.run(parse(EvaluateConfig, None, words))["clean"] == result["clean"]


def test_evaluation_finds_the_rows_of_a_saved_models_task_in_another_folder(tmp_path):
    """Earlier versions ignored a task_folder without a declaration."""
    run(config_of(declare(tmp_path / "tasks"), save_model=True, output_dir=tmp_path / "run"))
    (tmp_path / "tasks").rename(tmp_path / "moved")
    model = ["--model_name", str(tmp_path / "run/last"), "--output_dir", "evaluated"]
    result = evaluation.run(parse(EvaluateConfig, None, [*model, "--task_folder", str(tmp_path / "moved")]))
    assert result["task_folder"] == str(tmp_path / "moved")
    base = ["--model_name", "gpt2-nano", "--prompt", "a", "--task_folder", str(tmp_path / "moved")]
    with pytest.raises(ValueError, match=r"^task_folder = '.*moved' is for a task that a YAML file declares"):
        evaluation.run(parse(EvaluateConfig, None, base))


def test_the_configuration_is_the_files_content_however_it_is_given(tmp_path, monkeypatch):
    file = declare(tmp_path / "tasks")
    config = config_of(file)
    assert (config.data.dataset, config.data.task_folder) == ("mine", str(tmp_path / "tasks"))
    assert config == TrainConfig.from_dict(config.as_dict())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config_of("~/tasks/mine.yaml") == config
    with pytest.raises(
        ValueError, match=r"^dataset = 'sst2' does not go with the declaration of 'mine': leave declara"
    ):
        config.replace(dataset="sst2")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.changes()))
    other = parse(TrainConfig, None, ["--config", str(tmp_path / "run.yaml"), "--dataset", "docstrings"])
    assert (other.data.dataset, other.data.declaration, other.data.task_folder) == ("docstrings", None, None)


def test_a_finished_run_is_kept_if_its_files_move_and_refused_if_their_content_or_the_declaration_changes(tmp_path):
    file = declare(tmp_path / "tasks")
    record = run(config_of(file))
    (tmp_path / "tasks").rename(tmp_path / "moved")
    assert run(config_of(tmp_path / "moved/mine.yaml")) == record
    config = parse(TrainConfig, None, ["--config", "output/record.json", "--output_dir", "again"])
    with pytest.raises(ValueError, match=rf"^train = .* relative to {tmp_path}/tasks"):
        run(config)
    found = ["--config", "output/record.json", "--dataset", str(tmp_path / "moved/mine.yaml"), "--output_dir", "again"]
    assert losses(run(parse(TrainConfig, None, found))) == losses(record)

    rows = (tmp_path / "moved/rows/test.csv").read_text()
    (tmp_path / "moved/rows/test.csv").write_text(rows.replace("the rose", "the fish"))
    with pytest.raises(ValueError, match=r"^the data of mine has changed since output/record\.json was written"):
        run(config_of(tmp_path / "moved/mine.yaml"))
    with pytest.raises(ValueError, match=r"holds a run with declaration = .*: give another folder"):
        run(config_of(declare(tmp_path / "moved", metric="matthews_correlation")))


def test_a_grid_of_the_study_runs_it(tmp_path, monkeypatch):
    declare(tmp_path / "tasks")
    (tmp_path / "notebooks/experiments").mkdir(parents=True)
    (tmp_path / "notebooks/20_cells.ipynb").touch()
    base = {"model_name": "gpt2-nano-scratch", "batch_size": 12, "max_steps": 1, "warmup_steps": 0, "max_length": 16}
    (tmp_path / "notebooks/tasks.yaml").write_text("mine: {dataset: tasks/mine.yaml}")
    arms = [{"arm": "no loss", "loss_rate": [0.0]}, {"arm": "single losses", "loss_rate": [0.2]}]
    profile = {"cells_per_notebook": 2, "seeds": 1, "tasks": ["mine"], "base": base, "arms": arms}
    grid = tmp_path / "notebooks/experiments/mine.yaml"
    grid.write_text(yaml.safe_dump({"notebook": "20_cells", "profiles": {"laptop": profile}}))
    monkeypatch.chdir(tmp_path)
    experiment = load_experiment(grid, "laptop", Path("results"))
    assert all(cell.config.output.output_dir.startswith("results/runs/mine_ber_") for cell in experiment.cells)
    for config in run_settings([cell.config.as_dict() for cell in experiment.cells]):  # as notebooks get them
        run(config)
    table, records = read_experiment(experiment)
    assert (list(table["task"]), "declaration" in table) == (["mine", "mine"], False)
    assert [record["config"] for record in records] == [
        read_record(Path(folder))["config"] for folder in folders(table)
    ]

    (tmp_path / "tasks").rename(tmp_path / "clone")  # as in another clone: the cells are the same ones
    (tmp_path / "notebooks/tasks.yaml").write_text(f"mine: {{dataset: {tmp_path}/clone/mine.yaml}}")
    assert load_experiment(grid, "laptop", Path("results")).folders == experiment.folders


def folders(table):
    return [f"results/runs/{name}" for name in table["run"]]


def test_the_readmes_declaration_and_command(tmp_path, monkeypatch):
    (lines,) = re.findall(r"```yaml\n(# reviews\.yaml\n.*?)```", README, re.DOTALL)
    (command,) = re.findall(r"^python -m lossytp\.train (--dataset reviews\.yaml .*)$", README, re.MULTILINE)
    told = yaml.safe_load(lines)
    assert lines.count("\n") <= 7
    for name, number in ((told["train"].replace("*", "0"), 12), (told["test"], 6)):
        rows = [{"title": "About", "review": f"no. {i}", "verdict": ("good", "bad")[i % 2]} for i in range(number)]
        write_rows(tmp_path / name, rows)
    (tmp_path / "reviews.yaml").write_text(lines)
    monkeypatch.chdir(tmp_path)
    config = parse(TrainConfig, None, shlex.split(command))
    record = run(config.replace(model_name="gpt2-nano-scratch", max_steps=1, warmup_steps=0, batch_size=4))
    assert record["data"]["metric"] == told["metrics"][0]
    assert os.path.isfile(f"{config.output.output_dir}/record.json")
