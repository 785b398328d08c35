import re
from collections import Counter
from pathlib import Path

import pytest

from lossytp.study import grid
from lossytp.study.grid import load_experiment, load_experiments
from lossytp.training.config import PretrainConfig, TrainConfig
from lossytp.training.record import check_output_folder

GRID = """
notebook: 20_cells
profiles:
  tiny:
    cells_per_notebook: 2
    seeds: 2
    base: {{max_steps: 5}}
    arms:
      - {{arm: alone, loss_rate: [0.0, 0.1]}}
      - arm: "bursts of {{mean_burst_packets:g}}"
        loss_type: [g-e]
        mean_burst_packets: [8.0]
        loss_rate: [{rate}]
        {name}: {two}
"""


def load(tmp_path, profile="tiny", rate="0.1", name="tensor_parallel_size", two="[2]"):
    file = tmp_path / "experiments" / "grid.yaml"
    file.parent.mkdir(exist_ok=True)
    (tmp_path / "20_cells.ipynb").touch()
    file.write_text(GRID.format(rate=rate, name=name, two=two))
    return load_experiment(file, profile, tmp_path / "results")


def test_cells_are_the_product_of_arms_and_seeds(tmp_path):
    experiment = load(tmp_path)
    cells = [
        (c.seed, arm, c.loss_type, c.loss_rate, c.tensor_parallel_size)
        for arm, c in ((arm, cell.network) for arm, cell in experiment.cells)
    ]
    one_seed = [("alone", "ber", 0.0, 4), ("alone", "ber", 0.1, 4), ("bursts of 8", "g-e", 0.1, 2)]
    assert cells == [(seed, *cell) for seed in (0, 1) for cell in one_seed]
    assert [len(batch) for batch in experiment.batches()] == [2, 2, 2]
    assert {cell.config.optimizer.max_steps for cell in experiment.cells} == {5}


def test_seeds_may_be_fresh_ones(tmp_path):
    first = load(tmp_path)
    file = tmp_path / "experiments" / "grid.yaml"
    text = file.read_text()

    def beginning_at(seed):
        file.write_text(text.replace("    seeds: 2", f"    seeds: 2\n    first_seed: {seed}"))
        return load_experiment(file, "tiny", tmp_path / "results")

    fresh = beginning_at(5)
    assert [cell.config.network.seed for cell in fresh.cells] == [5] * 3 + [6] * 3
    assert not fresh.folders & first.folders
    assert beginning_at(0) == first
    for wrong in ("-1", "1.5", "two", "true"):
        with pytest.raises(ValueError, match=f"first_seed = '?(?i:{wrong})'? is "):
            beginning_at(wrong)


def test_a_cells_folder_names_its_whole_configuration(tmp_path):
    first, same, other = load(tmp_path), load(tmp_path), load(tmp_path, rate="0.2")
    assert first == same
    folders = [experiment.folders for experiment in (first, other)]
    assert all(len(folder) == 6 for folder in folders)
    assert len(folders[0] & folders[1]) == 4  # the cells that the change leaves alone


def test_a_processs_text_makes_one_folders_name(tmp_path):
    text = GRID.split("    arms:")[0] + "    arms: [{{arm: shared, loss_type: [{text}], loss_rate: [0.1]}}]\n"
    (tmp_path / "20_cells.ipynb").touch()
    file = tmp_path / "experiments" / "grid.yaml"
    file.parent.mkdir()
    file.write_text(text.format(text="\"correlated(shared=0.5, switch='rack/1')\""))
    [(_, cell), _] = load_experiment(file, "tiny", tmp_path).cells
    assert cell.network.process().switch == "rack/1"
    assert Path(cell.output.output_dir).parent == tmp_path / "runs"
    assert Path(cell.output.output_dir).name.startswith("docstrings_correlated-shared-0.5-switch-rack-1_0.1_seed0_")


@pytest.mark.parametrize(
    ("written", "instead", "named"),
    [
        *((GRID, "", "None is not a configuration"), ("base: {{max_steps: 5}}", "base:", "base = None")),
        *(("seeds: 2", "seeds: true", "seeds = True"), ("seeds: 2", "", "seeds is missing")),
        ("seeds: 2", "seeds: 2\n    seeds: 3", 'duplicate key "seeds"'),
        *(("seeds: 2", "sedes: 2", "'sedes': did you mean seeds"), ("arm: alone", "arm: 3", "arm")),
        ("notebook: 20", "outputs: table.csv\nnotebook: 20", "outputs = 'table.csv'"),
        *(
            ("notebook: 20", f"outputs: ['{name}']\nnotebook: 20", "outputs = ")
            for name in ("a/../../t.csv", "../t.csv", "/t.csv", "a b.csv", "$HOME", "a;b", "-rf", "*.csv", "", "a//b")
        ),
        ("notebook: 20_cells", "notebook: '20 cells'", "notebook = '20 cells'"),
        ("notebook: 20_cells", "notebook: 20", "notebook = 20"),
        ("notebook: 20_cells", "notebook: 21_cells", "notebook = '21_cells'"),
        ("max_steps: 5", "max_steps: 5.0", "max_steps = 5.0"),
        *(
            ("arm: alone", f"arm: '{arm}'", "cannot be filled in")
            for arm in ("{{0}}", "{{config}}", "a}}", "{{eval_steps:g}}")
        ),
        *(("tiny:", "1:", "profiles"), ("seeds: 2", "seeds: 2\n    tasks: []", "arms or tasks is empty")),
    ],
)
def test_what_has_not_the_form_of_a_grid_is_refused(tmp_path, written, instead, named):
    load(tmp_path)
    file = tmp_path / "experiments" / "grid.yaml"
    (tmp_path / "tasks.yaml").write_text("one: {max_length: 16}\n")
    text = GRID.replace(written, instead)
    assert text != GRID
    file.write_text(text.format(rate="0.1", name="tensor_parallel_size", two="[2]"))
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        load_experiment(file, "tiny", tmp_path / "results")
    assert str(error.value).startswith(str(file))
    assert "\n" not in str(error.value)


EXPERIMENTS = Path(__file__).parents[2] / "notebooks" / "experiments"


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["smoke", "laptop", "small", "paper"])
def test_the_studys_own_grids_are_valid(profile):
    experiments = {
        experiment.name: experiment for experiment in load_experiments(EXPERIMENTS, profile, Path("results"))
    }
    cells = experiments["01_tolerance"].cells
    assert len({cell.config.output.output_dir for cell in cells}) == len(cells)
    assert cells[0].arm == "no loss"
    assert {cell.config.network.tensor_parallel_size for cell in cells} == {4}


def test_cells_that_two_experiments_have_run_once(tmp_path):
    (first,), (other,) = [(load(tmp_path, rate=rate),) for rate in ("0.1", "0.2")]
    own = other.batches(first.folders)
    assert {config.network.loss_rate for batch in own for config in batch} == {0.2}
    assert sum(len(batch) for batch in own) == 2
    assert other.batches(other.folders) == []


def test_tasks_are_read_from_their_file_and_arms_override_them(tmp_path):
    (tmp_path / "tasks.yaml").write_text("one: {max_length: 16, batch_size: 8}\ntwo: {max_length: 32}\n")
    text = GRID.replace("    seeds: 2", "    seeds: 1\n    tasks: [one, two]").replace(
        "{{max_steps: 5}}", "{{batch_size: 4}}"
    )
    file = tmp_path / "experiments" / "grid.yaml"
    file.parent.mkdir()
    (tmp_path / "20_cells.ipynb").touch()
    file.write_text(text.format(rate="0.1", name="batch_size", two="[2]"))
    cells = load_experiment(file, "tiny", tmp_path / "results").cells
    assert [(c.data.max_length, c.optimizer.batch_size) for _, c in cells] == [
        (16, 4),
        (16, 4),
        (16, 2),
        (32, 4),
        (32, 4),
        (32, 2),
    ]


def test_several_processes_are_another_cell_and_as_many_as_it_has_ranks(tmp_path):
    here = load(tmp_path, two="[4]").folders
    file = tmp_path / "experiments" / "grid.yaml"
    text = file.read_text()
    file.write_text("processes: 4\n" + text)
    with pytest.raises(ValueError, match="processes = 4 does not suit 20_cells: leave it out, or give a notebook"):
        load_experiment(file, "tiny", tmp_path / "results")
    (tmp_path / "20_cells.ipynb").write_text("from lossytp.study.torchrun import torchrun")
    assert here.isdisjoint(load_experiment(file, "tiny", tmp_path / "results").folders)
    file.write_text("processes: 2\n" + text)
    with pytest.raises(ValueError, match="processes = 2 does not match a cell of 4 ranks: give 4, or leave it out"):
        load_experiment(file, "tiny", tmp_path / "results")


@pytest.mark.parametrize("name", ["seed", "output_dir", "dataset"])
def test_a_base_cannot_have_what_a_cell_gets_from_elsewhere(tmp_path, name):
    load(tmp_path)
    file = tmp_path / "experiments" / "grid.yaml"
    file.write_text(file.read_text().replace("max_steps: 5", f"max_steps: 5, {name}: 7"))
    with pytest.raises(ValueError, match=f"base: {name} = "):
        load_experiment(file, "tiny", tmp_path / "results")


def test_profiles_that_no_grid_has_are_refused(tmp_path):
    load(tmp_path)
    assert len(load_experiments(tmp_path / "experiments", "tiny", tmp_path)) == 1
    with pytest.raises(ValueError, match=r"profile = 'huge' is in no grid .*: choose one of tiny"):
        load_experiments(tmp_path / "experiments", "huge", tmp_path)
    with pytest.raises(ValueError, match="nowhere has no grid"):
        load_experiments(tmp_path / "nowhere", "tiny", tmp_path)


def test_a_folder_hashes_only_what_differs_from_the_defaults(tmp_path, monkeypatch):
    def places(**values):
        return [cell.config.output.output_dir for cell in load(tmp_path, **values).cells]

    folders = places(name="batch_size", two="[32]")  # the default
    assert places(name="max_length", two="[64]") == folders
    assert places(name="batch_size", two="[16]") != folders

    class Grown(TrainConfig):
        of_tomorrow: int = 3

    monkeypatch.setattr(grid, "settings_class", lambda _: Grown)
    assert places(name="of_tomorrow", two="[3]") == folders
    changed = places(name="of_tomorrow", two="[4]")
    assert changed[:2] == folders[:2]
    assert changed[2] not in folders


@pytest.mark.slow
def test_the_papers_committed_records_are_of_their_cells_and_whole_seeds():
    """Arms are compared on equal seeds: a seed is committed with all that its experiment asks of it, or not at all."""
    experiments = load_experiments(EXPERIMENTS, "paper", EXPERIMENTS.parents[1] / "results" / "paper")
    having = Counter(folder for experiment in experiments for folder in experiment.folders)
    for experiment in experiments:
        own = [
            config for _, config in experiment.cells if having[config.output.output_dir] == 1
        ]  # no other's seeds ask for it
        finished = {
            (config.data.dataset, config.network.seed)
            for config in own
            if Path(config.output.output_dir, "record.json").exists()
        }
        for config in own:
            if (config.data.dataset, config.network.seed) in finished:
                record = check_output_folder(config)
                assert record is not None, f"{config.output.output_dir} ({experiment.name}) has no record"
                assert record["seed"] == config.network.seed


def test_cells_that_name_total_steps_pretrain(tmp_path):
    file = tmp_path / "experiments" / "grid.yaml"
    file.parent.mkdir()
    (tmp_path / "20_cells.ipynb").touch()
    file.write_text(
        "notebook: 20_cells\nprofiles:\n  tiny:\n    cells_per_notebook: 2\n    seeds: 1\n"
        "    base: {total_steps: 5, tensor_parallel_size: 2, save_model: false}\n"
        "    arms: [{arm: both, loss_rate: [0.0, 0.05], reliable_gather: [false]}]\n"
    )
    cells = load_experiment(file, "tiny", tmp_path / "results").cells
    assert [(type(cell.config), cell.config.network.loss_rate) for cell in cells] == [
        (PretrainConfig, 0.0),
        (PretrainConfig, 0.05),
    ]
    assert re.fullmatch(r"stdlib_ber_0\.05_seed0_\w{10}", Path(cells[1].config.output.output_dir).name)
