import json

import pytest

from lossytp.training.config import TrainConfig
from lossytp.training.loop import run, trace_sha256


def test_a_trace_is_identified_by_its_losses_and_other_processes_have_no_hash(tmp_path):
    hashes = []
    for text in ("0010", "0, 0, 1, 0", "0100", "00100"):
        (tmp_path / "trace").write_text(text)
        hashes.append(trace_sha256(TrainConfig(loss_type=f"trace('{tmp_path / 'trace'}')").network))
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
    assert trace_sha256(TrainConfig(loss_rate=0.1).network) is None


def test_a_finished_run_on_other_data_is_refused(toy, tmp_path, monkeypatch):
    done = run(toy(max_steps=1))
    record = tmp_path / "run" / "record.json"
    changed = {**done, "data": {**done["data"], "sha256": "another"}}
    record.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"the data of toy has changed since .*record\.json was written: put "):
        run(toy(max_steps=1))
    monkeypatch.setattr("lossytp.training.objectives.load_dataset", lambda *_, **__: (_ for _ in ()).throw(ValueError))
    assert run(toy(max_steps=1)) == changed  # the data is not on this machine
