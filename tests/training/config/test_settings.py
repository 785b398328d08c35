import re
import subprocess
import sys
from pathlib import Path

import pytest

from lossytp.labs.lab import LabConfig
from lossytp.probe.import_trace import ImportConfig
from lossytp.probe.receive import ReceiveConfig
from lossytp.probe.report import ReportConfig
from lossytp.tolerance.config import ToleranceConfig
from lossytp.training.config import EvaluateConfig, PretrainConfig, TrainConfig, run_settings


@pytest.mark.parametrize("kind", [TrainConfig, EvaluateConfig, PretrainConfig])
def test_the_output_folder_has_a_name_on_one_line_and_home_is_expanded(kind, monkeypatch, tmp_path):
    home = str(tmp_path)
    monkeypatch.setenv("HOME", home)
    for path, expected in (("~", home), ("~/x", f"{home}/x"), ("a~/~x", "a~/~x"), ("./~x", "./~x")):
        assert kind(output_dir=path).output_dir == expected
    for path in ("\n", "a\nb", "a\r", "a\u2028b"):
        with pytest.raises(ValueError, match="has a line break: give the path of a folder") as error:
            kind(output_dir=path)
        assert len(str(error.value).splitlines()) == 1
    with pytest.raises(
        ValueError, match=r"^output_dir = '~nobody-here/x' names a user who has no home folder: write \./~"
    ):
        kind(output_dir="~nobody-here/x")
    assert not list(Path().glob("~*"))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind in (TrainConfig, PretrainConfig) for name in ("output_dir", "checkpoint_path")),
        *((PretrainConfig, name) for name in ("tokenizer_path", "data_glob", "validation_glob", "dataset")),
        *((EvaluateConfig, name) for name in ("model_name", "data_glob", "dataset", "task_folder")),
        *((ToleranceConfig, name) for name in ("text", "loss_rates", "output_dir")),
        *((LabConfig, name) for name in ("data_dir", "output_dir")),
        *((ImportConfig, name) for name in ("file", "column", "where", "output")),
        *((ReportConfig, name) for name in ("trace", "results_dir", "output_dir")),
        (ReceiveConfig, "output_dir"),
        (TrainConfig, "lossy_links"),
    ],
)
def test_no_path_or_name_is_empty_or_has_bytes_that_are_no_text(kind, name):
    """Empty, it would mean the current folder, or the default; with such bytes, a run would end without its record."""
    needed = {"file": "a.csv"} if kind is ImportConfig else {"trace": "a.parquet"} if kind is ReportConfig else {}
    for value, fault in (("", "is empty"), ("a\udcff", "not UTF-8"), ("a\0", "NUL")):
        with pytest.raises(ValueError, match=rf"^{name} = '.*' .*{fault}"):
            kind(**{**needed, name: value})


def test_a_folder_of_a_declaration_without_one_is_refused(tmp_path):
    for rows in ("a.csv", "b.csv"):
        (tmp_path / rows).write_text("a,b\nword,x\n")
    (tmp_path / "mine.yaml").write_text(
        "{kind: classification, train: a.csv, test: b.csv, body: '{a}', label: b, labels: [x, y]}"
    )
    for values in ({}, {"dataset": "sst2"}, {"dataset": str(tmp_path / "mine.yaml")}):
        with pytest.raises(ValueError, match=r"^task_folder = 'elsewhere' does not go with dataset = "):
            TrainConfig(task_folder="elsewhere", **values)
    found = TrainConfig(dataset=str(tmp_path / "mine.yaml"), task_folder=str(tmp_path))
    assert TrainConfig(**found.changes()) == found


def test_changes_are_the_fields_that_are_not_at_their_default():
    assert TrainConfig().changes() == {}
    config = TrainConfig(seed=1234, max_steps=5, gradient_clipping=1, dropout=0)
    assert config.changes() == {"max_steps": 5, "gradient_clipping": 1.0}
    assert TrainConfig(**config.changes()) == config


def test_dict_round_trip_and_ints_for_floats():
    config = TrainConfig.from_dict({"loss_rate": 0, "seed": 3})
    assert TrainConfig.from_dict(config.as_dict()) == config


def test_checking_a_configuration_does_not_wait_for_torch():
    code = "import sys, lossytp.study.grid, lossytp.training.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (5, "cells = 5 is not a list of at least one value: give one"),
        ([], "cells = [] is not a list of at least one value: give one"),
        ({"seed": 1}, "cells = {'seed': 1} is not a list of at least one value: give one"),
        ([5], "5 is not a configuration: give names with values, such as {'seed': 1}"),
        ([{"sed": 5}], "unknown parameter 'sed': did you mean seed?"),
        (
            [{"output_dir": "a", "seed": 1}, {"output_dir": "b"}, {"output_dir": "a", "seed": 2}],
            "output_dir = 'a' is that of several cells: give each its own",
        ),
    ],
)
def test_what_are_no_configurations_is_refused(cells, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run_settings(cells, TrainConfig)
    assert run_settings([{"seed": 5}]) == [TrainConfig(seed=5)]
