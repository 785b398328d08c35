"""An epoch's last batch, which is a multiple of nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.parallel_runs import PARALLELISMS, train
from tests.training.test_parallelism import curve

SHORT = {"max_samples": 17, "max_steps": 9}  # batches of 8, 8 and 1


@pytest.mark.parametrize("name", ["ddp", "fsdp", "gpipe", "1f1b", "lossytp and ddp"])
def test_the_last_batch_counts_as_in_one_process(processes: Callable, tmp_path: Path, name: str) -> None:
    """A single example for two replicas, and for four microbatches."""
    number, values = PARALLELISMS[name]
    one = train(tmp_path, SHORT)
    assert one["data"]["train_examples"] == 17
    for values_of_batch in ({}, {"batch_size": 12, "pipeline_microbatches": 3}):  # 12 and 5: shares of 2 and 3
        dense = train(tmp_path, SHORT | values_of_batch)
        record = processes(number, train, tmp_path / name, values | SHORT | values_of_batch)[0]
        assert curve(record) == pytest.approx(curve(dense), rel=1e-4)
        assert record["final"] == pytest.approx(dense["final"], rel=1e-4)
