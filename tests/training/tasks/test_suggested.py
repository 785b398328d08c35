import pytest
import yaml

from lossytp.training.tasks import declared_task, read_declaration, suggestion
from tests.training.own_tasks import write_rows


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


COLUMNS = {
    "named": (
        [{"review": f"r {i}", "stars": i % 3 + 1, "id": i} for i in range(60)],
        "{review}",
        "stars",
        ["1", "2", "3"],
    ),
    "few values": ([{"a": f"text {i}", "yes": ["no", "on"][i % 2]} for i in range(50)], "{a}", "yes", ["no", "on"]),
    "numbers": ([{"a": f"text {i}", "value": i / 7} for i in range(50)], "{a}", "value", None),
    "numbers alone": ([{"size": i / 3, "score": i / 7} for i in range(50)], "{size!s}", "score", None),
}


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("suffix", [".csv", ".json", ".parquet"])
def test_the_suggested_declaration_works_once_there_is_a_test_file(tmp_path, columns, suffix):
    rows, body, label, labels = COLUMNS[columns]
    file = write_rows(tmp_path / f"mine{suffix}", rows)
    first, _, rest = suggestion(file).partition("\n")
    assert first.startswith(f"dataset = {str(file)!r} holds rows, but does not declare a task: write {tmp_path}/mine.")
    told = yaml.safe_load(rest)
    kind = "regression" if labels is None else "classification"
    assert (told["kind"], told["body"], told["label"], told.get("labels")) == (kind, body, label, labels)
    (tmp_path / "mine.yaml").write_text(rest)
    write_rows(tmp_path / told["test"], rows[:9])
    task = declared_task(read_declaration(tmp_path / "mine.yaml"), str(tmp_path))
    assert (len(task.examples("train")), len(task.examples("test"))) == (len(rows), 9)


def test_columns_of_which_none_can_be_a_label_leave_its_name_open(tmp_path):
    told = suggestion(write_rows(tmp_path / "mine.jsonl", [{"a": f"text {i}", "b": [str(i)]} for i in range(50)]))
    assert yaml.safe_load(told.partition("\n")[2])["label"] == "label"
    broken = tmp_path / "broken.json"
    broken.write_bytes(b"\x00\x01")
    with pytest.raises(ValueError, match=r"broken.json cannot be read"):
        suggestion(broken)


def test_labels_are_suggested_as_the_file_writes_them(tmp_path):
    cells = ["NA", "01", "1e3", "", "true"]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"t{i},{cells[i % 5]}\n" for i in range(100)))
    told = yaml.safe_load(suggestion(tmp_path / "a.csv").partition("\n")[2])
    assert (told["labels"], told["label"]) == (["01", "1e3", "NA", "true"], "label")
