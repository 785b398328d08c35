import json

from lossytp.study.records import load_records, tidy


def test_a_row_a_record_in_a_fixed_order_without_seconds(study):
    table = tidy(study)
    assert len(table) == len(study) == 15
    assert tidy(study[::-1]).equals(table)
    assert not [column for column in table if "second" in column]
    assert table["observed_loss_rate"].tolist() == table["loss_rate"].tolist()


def test_a_run_that_was_not_finite_counts_as_the_most_frequent_class(record):
    broken = record(loss_rate=0.2, seed=0, accuracy=None, status="not finite")
    assert tidy([broken])["accuracy_lossy"].tolist() == [0.3]


def test_only_finished_records_are_loaded(tmp_path, record):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "record.json").write_text(json.dumps(record(loss_rate=0.0, seed=0, accuracy=0.5)))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / ".record.json.17").write_text("{half")
    assert len(load_records(tmp_path)) == 1
