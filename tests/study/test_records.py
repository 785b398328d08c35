import pytest

from lossytp.study.records import tidy


def test_a_row_a_record_in_their_order_without_seconds(study):
    table = tidy(study)
    assert len(table) == len(study) == 15
    assert tidy(study[::-1])["accuracy_lossy"].tolist() == table["accuracy_lossy"].tolist()[::-1]
    assert not [column for column in table if "second" in column]
    assert table["observed_loss_rate"].tolist() == table["loss_rate"].tolist()


def test_a_run_that_was_not_finite_counts_as_the_most_frequent_class(record):
    broken = record(loss_rate=0.2, seed=0, accuracy=None, status="not finite")
    assert tidy([broken])["accuracy_lossy"].tolist() == [0.3]


def test_a_presets_rate_is_its_process_own(record):
    preset = record(loss_rate=0.0, seed=0, accuracy=0.5, loss_type="g-e", ge_config="default")
    assert tidy([preset])["loss_rate"].tolist() == [pytest.approx(0.1)]


def test_copies_of_a_run_are_no_second_seed(record):
    with pytest.raises(ValueError, match="two records of seed 3"):
        tidy([record(loss_rate=0.1, seed=3, accuracy=0.5), record(loss_rate=0.1, seed=3, accuracy=0.6)])
