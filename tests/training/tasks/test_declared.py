import json
import re

import pytest
import yaml

from lossytp.training.tasks import declared_task, read_declaration
from tests.training.own_tasks import DECLARED, declare, flat_rows, write_rows


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl", ".parquet"])
def test_files_of_all_formats_from_the_declarations_own_folder(tmp_path, suffix):
    task = declared_task(read_declaration(declare(tmp_path / "a[b]", suffix=suffix)), str(tmp_path / "a[b]"))
    expected = flat_rows(36, 0)
    examples = task.examples("train")
    assert [example.body for example in examples] == [row["text"] for row in expected]
    assert [task.labels[example.label] for example in examples] == [row["name"] for row in expected]
    assert len(task.examples("test")) == 15


@pytest.mark.parametrize("kind", DECLARED)
def test_all_kinds_and_what_json_keeps_of_them(tmp_path, kind):
    declaration = read_declaration(declare(tmp_path, kind))
    assert declaration["name"] == "mine"
    kept = json.loads(json.dumps(declaration))
    assert kept == declaration
    first = declared_task(kept, str(tmp_path)).examples("train")[1]
    assert first.body == "the grass 1 is green"
    assert (first.endings, first.label) == {
        "classification": (("",), 1),
        "regression": (("",), 1.5),
        "multiple choice": ((" yes", " no"), 0),
        "generation": ((" Which?",), ("green",)),
    }[kind]


def test_numbers_are_names_of_classes_and_are_read_as_text(tmp_path):
    for name, first in (("train", 0), ("test", 1)):
        stars = [{"stars": i % 3 + 1, "price": 0.5 * i, "year": 1990 + i} for i in range(first, first + 6)]
        write_rows(tmp_path / f"{name}.parquet", stars)
    keys = {"train": "train.parquet", "test": "test.parquet", "body": "{year}: {price:.2f}", "label": "stars"}
    (tmp_path / "stars.yaml").write_text(yaml.safe_dump({**keys, "labels": [1, 2, 3]}))
    examples = declared_task(read_declaration(tmp_path / "stars.yaml"), str(tmp_path)).examples("train")
    assert [(example.body, example.label) for example in examples[:2]] == [("1990: 0.00", 0), ("1991: 0.50", 1)]


def test_single_values_stand_for_lists_and_the_file_names_the_task(tmp_path):
    file = declare(tmp_path, metric="f1", labels=["red", "blue"], targets=0.7, stem="my own (1)")
    declaration = read_declaration(file)
    assert declaration == {
        "name": "my-own-1-",
        "kind": "classification",
        "train": "rows/train-*.csv",
        "test": "rows/test.csv",
        "body": "{text}",
        "label": "name",
        "labels": ["red", "blue"],
        "metrics": ["f1"],
        "targets": [0.7],
    }
    task = declared_task(declaration, None)
    assert (task.metrics, task.targets, task.labels) == (("f1",), (0.7,), ("red", "blue"))
    assert read_declaration(declare(tmp_path, name="another"))["name"] == "another"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"lables": ["a", "b"]}, "'lables': did you mean labels"),
        ({"kind": "clasification"}, "kind = 'clasification'"),
        ({"body": None, "labels": None}, "body, labels"),
        ({"test": None}, "test"),
        ({"body": "always"}, "body"),
        ({"body": "{text"}, "expected '}'"),
        ({"label": 5}, "label = 5"),
        ({"labels": ["a"]}, "labels"),
        ({"labels": [["a"], "b"]}, "labels"),
        ({"labels": []}, "labels"),
        ({"metric": "f2"}, "metric 'f2'"),
        ({"targets": [float("inf")]}, "targets"),
        ({"targets": [0.5, 2]}, "targets = 2"),
        ({"train": "gone.csv"}, "train = 'gone.csv'"),
        ({"train": "gone-*.csv"}, "train = 'gone-*.csv'"),
        ({"train": "rows"}, "train = 'rows'"),
        ({"train": "rows/*.csv"}, "rows/test.csv is in both train and test"),
        ({"test": "rows/../rows/train-0.csv"}, "rows/train-0.csv is in both train and test"),
        ({"name": "sst2"}, "'sst2'"),
        ({"name": "a/b"}, "name = 'a/b'"),
        ({"name": ""}, "name = ''"),
    ],
)
def test_a_wrong_declaration_is_told_in_one_line(tmp_path, values, named):
    file = declare(tmp_path, **values)
    with pytest.raises(ValueError, match=f"^dataset = {re.escape(repr(str(file)))}: .*{re.escape(named)}") as error:
        read_declaration(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds None: write keys with values, such as 'train: my_rows.csv'"),
        (b"- a\n- b\n", "holds ['a', 'b']: write keys with values"),
        (b"train: [", "cannot be read as YAML"),
        (b"train: a\ntrain: b\n", "duplicate key"),
        (b"\xff\xfe", "is not UTF-8"),
        (None, "cannot be read (No such file or directory): give the path of a file"),
    ],
)
def test_a_file_that_holds_no_declaration_is_named(tmp_path, content, message):
    file = tmp_path / "mine.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=f"^dataset = {re.escape(repr(str(file)))}.*{re.escape(message)}") as error:
        read_declaration(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"body": "{txt}"}, "train of files .* has no column 'txt'"),
        ({"label": "nme"}, "train of files .* has no column 'nme'"),
        ({"labels": ["red", "green", "blu"]}, "^label 'blu' does not occur in column 'name' of train of "),
        ({"labels": ["red", "blue"]}, "^label 'green' is not a class of red, blue: .* in row .* of train"),
    ],
)
def test_rows_that_do_not_fit_the_declaration_are_told_in_one_line(tmp_path, values, message):
    task = declared_task(read_declaration(declare(tmp_path, **values)), str(tmp_path))
    with pytest.raises(ValueError, match=message) as error:
        task.examples("train")
    assert "\n" not in str(error.value)


def test_a_declaration_that_a_record_holds_is_checked_without_its_files(tmp_path):
    declaration = read_declaration(declare(tmp_path))
    task = declared_task(declaration, "/gone")
    with pytest.raises(ValueError, match=r"relative to /gone"):
        task.examples("train")
    with pytest.raises(ValueError, match=r"^declaration of 'mine': label = None"):
        declared_task({**declaration, "label": None}, None)
    with pytest.raises(ValueError, match=r"^declaration of 'mine': kind = None"):
        declared_task({"name": "mine"}, None)


def test_a_record_with_an_impossible_target_still_loads(tmp_path):
    declaration = {**read_declaration(declare(tmp_path)), "targets": [2]}
    assert declared_task(declaration, str(tmp_path)).targets == (2,)


@pytest.mark.parametrize("words", ["[no, yes]", "[true, false]", "[01, 1e3]", "['NA', 'null']"])
def test_names_in_yaml_are_those_in_a_csv(tmp_path, words):
    names = [word.strip("'\" ") for word in words.strip("[]").split(",")]
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text("text,name\n" + "".join(f"a,{name}\n" for name in names))
    file = tmp_path / "mine.yaml"
    file.write_text(f"train: train.csv\ntest: test.csv\nbody: '{{text}}'\nlabel: name\nlabels: {words}\n")
    examples = declared_task(read_declaration(file), str(tmp_path)).examples("train")
    assert [example.label for example in examples] == [0, 1]
