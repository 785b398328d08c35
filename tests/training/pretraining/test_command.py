"""Test what `python -m lossytp.pretrain` prints."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from lossytp.pretrain import main


@pytest.mark.parametrize(("values", "loses"), [({}, False), ({"tensor_parallel_size": 2, "loss_rate": 0.2}, True)])
def test_the_loss_over_the_lossy_network_is_printed_if_it_loses_packets(
    pretrain, tmp_path, capsys, monkeypatch, values, loses
):
    config = pretrain(total_steps=2, save_model=False, **values)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.changes()))
    monkeypatch.setattr(sys, "argv", ["pretrain", "--config", str(tmp_path / "run.yaml")])
    main()
    told = capsys.readouterr().out
    assert told.startswith("validation loss ")
    assert ("over the lossy network" in told) == loses


def test_a_damaged_record_is_named(pretrain, tmp_path, monkeypatch):
    config = pretrain(total_steps=2, save_model=False)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.changes()))
    monkeypatch.setattr(sys, "argv", ["pretrain", "--config", str(tmp_path / "run.yaml")])
    main()
    file = Path(config.output.output_dir) / "record.json"
    record = json.loads(file.read_text())
    del record["status"]
    file.write_text(json.dumps(record))
    with pytest.raises(
        ValueError, match=r"record\.json is not a record \(KeyError\('status'\)\): delete it to run again"
    ):
        main()
