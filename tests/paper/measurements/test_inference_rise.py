"""The rise of the pretrained model's cross-entropy over a run's network."""

import pytest

from lossytp.training.config import TrainConfig
from paper.predictions import InferenceProbe

BATCH, LENGTH = 4, 16
RUN = TrainConfig(model_name="gpt2-nano", loss_rate=0.3, tensor_parallel_size=4, batch_size=BATCH, max_length=LENGTH)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> InferenceProbe:
    text = tmp_path_factory.mktemp("text") / "river.txt"
    text.write_text("The river flows through the old town and into the sea near the harbour. " * 40, encoding="utf-8")
    return InferenceProbe("gpt2-nano", batch_size=BATCH, length=LENGTH, batches=1, text=str(text))


def test_without_losses_nothing_rises(probe: InferenceProbe) -> None:
    assert probe.rise(RUN.replace(loss_rate=0.0), draws=2).value == pytest.approx(0.0, abs=1e-5)


def test_losses_raise_the_cross_entropy_and_more_of_them_raise_it_more(probe: InferenceProbe) -> None:
    few, many = (probe.rise(RUN.replace(loss_rate=rate), draws=4) for rate in (0.02, 0.4))
    assert few.value < many.low
    assert many.low > 0.05


def test_draws_differ_from_each_other_and_not_from_run_to_run(probe: InferenceProbe) -> None:
    first, again = probe.rise(RUN, draws=3), probe.rise(RUN, draws=3)
    assert first == again
    assert first.high > first.low


def test_both_phases_cost_more_than_one(probe: InferenceProbe) -> None:
    one, both = (probe.rise(RUN.replace(reliable_gather=reliable), draws=4) for reliable in (True, False))
    assert both.value > one.value


def test_the_batches_have_the_runs_shape(probe: InferenceProbe) -> None:
    assert [tuple(batch.shape) for batch in probe.batches_BT] == [(BATCH, LENGTH)]


def test_no_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="batches = 0"):
        InferenceProbe("gpt2-nano", batch_size=BATCH, length=LENGTH, batches=0, text="stdlib")
