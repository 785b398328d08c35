"""Provide made-up records with the keys of real ones."""

import pytest

from lossytp.study.tables import tidy, with_lossless


@pytest.fixture
def record():
    """Return a function that makes a record with a given loss rate, seed and accuracy."""

    def make(*, loss_rate, seed, accuracy, burst=None, status="finished", **config):
        bernoulli = burst is None
        return {
            "config": {
                "model_name": "gpt2-nano", "dataset": "docstrings", "tensor_parallel_size": 4, "algorithm": "direct",
                "repair": "zero", "mtu_bytes": 1500, "batch_size": 32, "max_length": 48, "max_steps": 10,
                "learning_rate": 1e-3, "warmup_steps": 2, "weight_decay": 0.01, "loss_rate": loss_rate, "seed": seed,
                "loss_type": "ber" if bernoulli else "g-e", "mean_burst_packets": burst, "ge_config": None,
                "bf16": False, "fp16": False, "control": None, **config,
            },
            "status": status,
            "implementation": "lossytp",
            "processes": 1,
            "commit": "0123456789abcdef",
            "environment": {"python": "3.11", "processor": "one"},
            "data": {
                "sha256": "ab", "majority_share": 0.3, "train_examples": 5, "test_examples": 4, "real_token_share": 0.9,
                "subsets": [],
            },
            "final": {
                "accuracy_clean": accuracy, "accuracy_lossy": accuracy, "cross_entropy_clean": 1.0,
                "cross_entropy_lossy": 1.0,
            },
            "network": {
                "training": {"packets": 1000, "lost": int(1000 * loss_rate), "observed_loss_rate": loss_rate}
            },
            "timing": {"total_seconds": 36.0, "steps": 10, "threads": 1, "device": "cpu"},
        }  # fmt: skip

    return make


@pytest.fixture
def curves():
    """Return a function that tabulates records for a figure, with arms "alone" and "bursts"."""

    def make(records):
        table = tidy(records)
        bursts = table["loss_type"].map({"ber": "alone", "g-e": "bursts"})
        return with_lossless(table.assign(arm=bursts.where(table["loss_rate"] > 0, "no loss")))

    return make


@pytest.fixture
def study(record):
    """Return records of two loss processes, three rates and three seeds.

    Accuracy drops by 0.2 times the rate, and by 0.4 times the rate in bursts.
    """
    records = []
    for seed in range(3):
        lossless = 0.6 + 0.01 * seed
        records.append(record(loss_rate=0.0, seed=seed, accuracy=lossless))
        for rate in (0.1, 0.2):
            records.append(record(loss_rate=rate, seed=seed, accuracy=lossless - 0.2 * rate))
            records.append(record(loss_rate=rate, seed=seed, accuracy=lossless - 0.4 * rate, burst=8.0))
    return records
