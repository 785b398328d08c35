import dataclasses
from pathlib import Path

import pytest

from lossytp.study import grid
from lossytp.study.grid import load_experiment
from lossytp.training.config import TrainConfig
from lossytp.training.record import check_output_folder

GRID = """
notebook: 20_accuracy_vs_loss
profiles:
  tiny:
    cells_per_notebook: 2
    seeds: 2
    base: {{max_steps: 5}}
    arms:
      - {{loss_rate: [0.0, 0.1]}}
      - {{loss_type: [g-e], mean_burst_packets: [8.0], loss_rate: [{rate}], {name}: {two}}}
"""


def load(tmp_path, profile="tiny", rate="0.1", name="tensor_parallel_size", two="[2]"):
    file = tmp_path / "experiments" / "grid.yaml"
    file.parent.mkdir(exist_ok=True)
    (tmp_path / "20_accuracy_vs_loss.ipynb").touch()
    file.write_text(GRID.format(rate=rate, name=name, two=two))
    return load_experiment(file, profile, tmp_path / "results")


def test_cells_are_the_product_of_arms_and_seeds(tmp_path):
    experiment = load(tmp_path)
    cells = [(cell.seed, cell.loss_type, cell.loss_rate, cell.tensor_parallel_size) for cell in experiment.cells]
    one_seed = [("ber", 0.0, 4), ("ber", 0.1, 4), ("g-e", 0.1, 2)]
    assert cells == [(seed, *cell) for seed in (0, 1) for cell in one_seed]
    assert [len(batch) for batch in experiment.batches()] == [2, 2, 2]
    assert {cell.max_steps for cell in experiment.cells} == {5}


def test_a_cells_folder_names_its_whole_configuration(tmp_path):
    first, same, other = load(tmp_path), load(tmp_path), load(tmp_path, rate="0.2")
    assert first == same
    folders = [{cell.output_dir for cell in experiment.cells} for experiment in (first, other)]
    assert all(len(folder) == 6 for folder in folders)
    assert len(folders[0] & folders[1]) == 4  # the cells that the change leaves alone


def test_a_processs_text_makes_one_folders_name(tmp_path):
    text = GRID.split("    arms:")[0] + "    arms: [{{loss_type: [{text}], loss_rate: [0.1]}}]\n"
    (tmp_path / "20_accuracy_vs_loss.ipynb").touch()
    file = tmp_path / "experiments" / "grid.yaml"
    file.parent.mkdir()
    file.write_text(text.format(text="\"correlated(shared=0.5, switch='rack/1')\""))
    [cell, _] = load_experiment(file, "tiny", tmp_path).cells
    assert cell.process().switch == "rack/1"
    assert Path(cell.output_dir).parent == tmp_path / "runs" / "grid"
    assert Path(cell.output_dir).name.startswith("correlated-shared-0.5-switch-rack-1_0.1_seed0_")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"profile": "huge"}, ["grid.yaml", "huge", "tiny"]),
        ({"rate": "1.5"}, ["grid.yaml", "1.5", "[0, 1]"]),
        ({"two": "2"}, ["tensor_parallel_size = 2", "list"]),
        ({"name": "seed"}, ["seed"]),
        ({"name": "tensor_paralel_size"}, ["grid.yaml", "tensor_paralel_size", "did you mean tensor_parallel_size"]),
    ],
)
def test_errors_name_the_file_and_the_value_in_one_line(tmp_path, values, words):
    with pytest.raises(ValueError, match=r"grid\.yaml") as error:
        load(tmp_path, **values)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("profile", ["smoke", "laptop", "paper"])
def test_the_studys_own_grid_is_valid(profile):
    file = Path(__file__).parents[2] / "notebooks" / "experiments" / "accuracy_vs_loss.yaml"
    cells = load_experiment(file, profile, Path("results")).cells
    assert len({cell.output_dir for cell in cells}) == len(cells)
    assert {cell.tensor_parallel_size for cell in cells} == {4}
    assert {cell.loss_type for cell in cells} == {"ber", "g-e"}


def test_a_folder_hashes_only_what_differs_from_the_defaults(tmp_path, monkeypatch):
    folders = [cell.output_dir for cell in load(tmp_path, name="batch_size", two="[32]").cells]  # the default
    assert [cell.output_dir for cell in load(tmp_path, name="max_length", two="[64]").cells] == folders
    assert [cell.output_dir for cell in load(tmp_path, name="batch_size", two="[16]").cells] != folders

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Grown(TrainConfig):
        of_tomorrow: int = 3

    monkeypatch.setattr(grid, "TrainConfig", Grown)
    assert [cell.output_dir for cell in load(tmp_path, name="of_tomorrow", two="[3]").cells] == folders
    changed = [cell.output_dir for cell in load(tmp_path, name="of_tomorrow", two="[4]").cells]
    assert changed[:2] == folders[:2]
    assert changed[2] not in folders


def test_every_cell_of_the_paper_has_its_committed_record():
    root = Path(__file__).parents[2]
    file = root / "notebooks" / "experiments" / "accuracy_vs_loss.yaml"
    cells = load_experiment(file, "paper", root / "results" / "paper").cells
    assert len(cells) == 55
    for cell in cells:
        record = check_output_folder(cell)
        assert record is not None, f"{cell.output_dir} has no record"
        assert record["seed"] == cell.seed
