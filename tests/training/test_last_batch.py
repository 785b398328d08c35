"""Test an epoch's last batch, of a size that replicas and microbatches do not divide."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.parallel_runs import PARALLELISMS, curve, train

SHORT = {"max_samples": 17, "max_steps": 9}  # batches of 8, 8 and 1


@pytest.mark.parametrize("name", ["ddp", "fsdp", "gpipe", "1f1b", "lossytp and ddp"])
def test_the_last_batch_counts_as_in_one_process(processes: Callable, tmp_path: Path, name: str) -> None:
    """It has a single example, for two replicas or four microbatches."""
    number, values = PARALLELISMS[name]
    one = train(tmp_path, SHORT)
    assert one["data"]["train_examples"] == 17
    for values_of_batch in (
        {},
        {"batch_size": 12, "pipeline_microbatches": 3},
    ):  # batches of 12 and 5; replicas share 5 as 2 and 3
        dense = train(tmp_path, SHORT | values_of_batch)
        record = processes(number, train, tmp_path / name, values | SHORT | values_of_batch)[0]
        assert curve(record) == pytest.approx(curve(dense), rel=1e-4)
        assert record["final"] == pytest.approx(dense["final"], rel=1e-4)
