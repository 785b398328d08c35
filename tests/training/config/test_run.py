"""Settings of a run beside those of an earlier one."""

from lossytp.training.config import TrainConfig


def test_settings_that_differ_are_named_with_both_values() -> None:
    config = TrainConfig(loss_rate=0.2, tensor_parallel_size=4, output_dir="somewhere")
    written = {"loss_rate": 0.1, "wire_dtype": None, "data": {"rows": 3}}
    assert config.compared(["loss_rate"], written) == "loss_rate = 0.1, not 0.2"
    assert config.compared(["loss_rate", "data"], written) == "loss_rate = 0.1, not 0.2; another data"
    assert config.compared(["algorithm"], written) == "no algorithm", "a record from before the setting existed"
