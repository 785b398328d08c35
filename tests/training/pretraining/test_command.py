"""Test what `python -m lossytp.pretrain` prints."""

import sys

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
