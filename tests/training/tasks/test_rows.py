"""Test the rows of tasks: of a copy of the hub, the hub itself and files; those held out, and the cache."""

import json
import os
import shutil
import socket
import threading
import time
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from lossytp.training import rows as hub
from lossytp.training.rows import Files, HeldOut, Source, Table, cached
from lossytp.training.tasks import TASKS
from tests.training.own_tasks import write_rows

ROWS = [{"text": f"row {i}", "label": i % 2} for i in range(6)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOSSYTP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    hub_at("http://127.0.0.1:9", monkeypatch)  # nothing listens at this port
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def hub_at(address, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
    hub.hub_answers.cache_clear()


def write(file: Path, rows=ROWS) -> Path:
    return write_rows(file, rows)


def as_written(rows, suffix):
    """Return the rows as a file holds them: cells of a csv are text."""
    return [{name: str(cell) for name, cell in row.items()} for row in rows] if suffix == "csv" else rows


@pytest.mark.parametrize("suffix", ["parquet", "csv", "json", "jsonl"])
@pytest.mark.parametrize("place", ["some/words/plain", "some/words/plain/data"])
def test_a_copy_laid_out_like_the_hub_is_read(folder, suffix, place, capfd):
    write(folder / place / f"train.{suffix}", ROWS[:4])
    write(folder / place / f"validation-00000-of-00002.{suffix}", ROWS[:4])
    write(folder / place / f"validation-00001-of-00002.{suffix}", ROWS[4:])
    write(folder / place / f"validation_mismatched.{suffix}", ROWS[:1])
    source = Source(path="some/words", name="plain", official_rows={"train": 4, "test": 7})
    expected = as_written(ROWS, suffix)
    assert source.rows("train").to_list() == expected[:4]
    assert source.rows("test").to_list() == expected
    assert (source.subset("train"), source.subset("test")) == (False, True)
    assert Source(path="some/words", name="plain").subset("train") is None
    assert "Generating" not in capfd.readouterr().err  # no progress bars into a log


CELLS = ["NA", "null", "nan", "-", "0x1f", " ", "01"]


def test_only_an_empty_cell_of_a_csv_is_null(folder):
    (folder / "a.csv").write_text("text,number\n" + "".join(f"{cell},{i}\n" for i, cell in enumerate([*CELLS, ""])))
    rows = Files(train=folder / "a.csv", test="").rows("train")
    assert rows["text"] == [*CELLS, None]


def test_texts_of_json_stay_as_they_are(folder):
    rows = [{"a": "2024-01-01"}, {"a": "01", "more": 1}, {"a": None}]
    for name, content in (("a.json", json.dumps(rows, indent=1)), ("a.jsonl", "\n\n".join(map(json.dumps, rows)))):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
        found = Files(train=folder / name, test="").rows("train")
        assert (found["a"], found["more"]) == (["2024-01-01", "01", None], [None, 1, None])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("a.csv", b"text,text,label\na,b,0\n"), ("a.csv", b"text,label\na,b,0\n"), ("a.csv", b"text,label\na\n")),
        *(("a.csv", b'text\n"open\n'), ("a.csv", b"text,label\n\xff,0\n"), ("a.json", b'[{"text": "a"}, "b"]')),
        *(("a.json", b'[{"text": "a"},'), ("a.json", b"[" * 100_000), ("a.jsonl", b'{"id": 1}\n{"id": "x"}')),
        *(("a.jsonl.gz", b'{"id": 1}'), ("a.parquet", b"PAR1")),
    ],
)
def test_rows_that_are_not_clear_are_refused_in_one_line(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} cannot be read") as error:
        Files(train=folder / name, test="").rows("train")
    assert "\n" not in str(error.value)


def test_a_broken_link_in_place_of_a_file_is_refused(folder):
    """Otherwise some rows would silently be missing."""
    write(folder / "train-0.csv")
    (folder / "train-1.csv").symlink_to("gone")
    for asked in (Files.rows, Files.fingerprint):
        with pytest.raises(ValueError, match=r"train-1.csv cannot be read"):
            asked(Files(train=folder / "*.csv", test=""), "train")


@pytest.mark.parametrize("kind", ["copy", "files", "table"])
def test_a_fingerprint_depends_on_the_rows_and_not_on_their_place(folder, kind, monkeypatch):
    def source(place, rows):
        if kind == "table":
            return Table(train=rows, test=rows)
        file = write(folder / place / "me/mine/train.jsonl", rows)
        if kind == "files":
            return Files(train=file, test=file)
        monkeypatch.setenv("LOSSYTP_DATA", str(folder / place))
        return Source(path="me/mine")

    first = source("here", ROWS).fingerprint("train")
    if kind != "table":
        shutil.copytree(folder / "here", folder / "there")  # keeps file times
        monkeypatch.setenv("LOSSYTP_DATA", str(folder / "there"))
        again = (
            Files(train=folder / "there/me/mine/train.jsonl", test="") if kind == "files" else Source(path="me/mine")
        )
        assert again.fingerprint("train") == first
    assert source("other", [*ROWS[:-1], {"text": "another", "label": 0}]).fingerprint("train") != first


def test_no_hub_and_no_copy_is_one_line_that_says_where_it_looked(folder, monkeypatch):
    start = time.perf_counter()
    with pytest.raises(ValueError, match=rf"^data set some/words, plain, .*LOSSYTP_DATA.*{folder}/some/words/plain"):
        Source(path="some/words", name="plain").rows("train")
    monkeypatch.delenv("LOSSYTP_DATA")
    with pytest.raises(ValueError, match=r"data set some/words is neither in LOSSYTP_DATA \(not set\)"):
        Source(path="some/words").fingerprint("test")
    assert time.perf_counter() - start < 10
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


@pytest.mark.slow
def test_a_hub_that_is_silent_is_asked_once(folder, monkeypatch):
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen():
            while True:
                try:
                    asked.append(server.accept()[0])  # stays open, and gets no answer
                except OSError:
                    return

        threading.Thread(target=listen, daemon=True).start()
        hub_at(f"http://127.0.0.1:{server.getsockname()[1]}", monkeypatch)
        start = time.perf_counter()
        for split in ("train", "test"):
            with pytest.raises(ValueError, match="does not answer"):
                Source(path="some/words").rows(split)
        assert time.perf_counter() - start < 10
        server.shutdown(socket.SHUT_RDWR)
    assert len(asked) == 1


@pytest.mark.parametrize("kept_as", ["plain", "default-data_dir=plain"])  # the second comes from the hub's own export
def test_rows_once_loaded_from_the_hub_load_without_it(folder, tmp_path, kept_as):
    write(folder / "once.parquet")
    made = datasets.load_dataset("parquet", data_files=str(folder / "once.parquet"), cache_dir=str(tmp_path / "made"))
    (arrow,) = [Path(file["filename"]) for file in made["train"].cache_files]
    place = tmp_path / "hub/some___words" / kept_as / "0.0.0/abc"  # the cache of `datasets`
    shutil.copytree(arrow.parent, place)
    (place / arrow.name).rename(place / "words-train.arrow")
    info = place / "dataset_info.json"
    told = info.read_text().replace('"dataset_name": "parquet"', '"dataset_name": "words"')
    info.write_text(told.replace('"config_name": "default"', f'"config_name": "{kept_as}"'))
    source = Source(path="some/words", name="plain")
    assert source.rows("train").to_list() == ROWS
    assert source.fingerprint("train") == source.fingerprint("train")


def test_a_folder_is_built_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    times = []

    def build(folder):
        times.append((folder / "numbers").write_text("123"))

    assert cached("name", "key", build) == cached("name", "key", build) != cached("name", "other", build)
    assert (cached("name", "key", build) / "numbers").read_text() == "123"
    assert len(times) == 2


def test_a_build_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match="on purpose"):
        cached("other", "key", lambda _: (_ for _ in ()).throw(RuntimeError("on purpose")))
    assert [path for path in (tmp_path / "lossytp").iterdir() if path.is_dir()] == []


SENTENCES = [f"story {i} is a {'dull' if i % 2 else 'fine'} one ." for i in range(20)]
PHRASES = [f"story {i}" for i in range(20)] + ["one .", "a fine one", "fin"]
TRAIN = [{"text": text, "label": 0} for text in [*PHRASES, *SENTENCES, SENTENCES[0]]]
OFFICIAL = [{"text": "officially poor", "label": 1}]


def held_out(sentences: int, train=TRAIN) -> HeldOut:
    return HeldOut(source=Table(train=train, test=OFFICIAL), column="text", sentences=sentences)


def test_whole_sentences_follow_the_official_test_rows_and_no_row_in_one_of_them_stays_in_training():
    rows = held_out(7).rows("test").to_list()
    assert rows[0] == {"text": "officially poor", "label": 1, "part": "official"}
    assert [row["part"] for row in rows[1:]] == ["held_out"] * 7
    tested = [row["text"] for row in rows[1:]]
    assert len(set(tested)) == 7
    assert set(tested) <= set(SENTENCES) | {"fin"}  # part of a word of other rows, but never a whole word
    left = [row["text"] for row in held_out(7).rows("train").to_list()]
    apart = [row["text"] for row in TRAIN if not any(f" {row['text']} " in f" {sentence} " for sentence in tested)]
    assert left == apart
    assert 0 < len(left) < len(TRAIN)
    assert "one ." not in left  # every sentence ends with it


def test_the_choice_is_fixed_and_another_one_has_another_fingerprint():
    assert held_out(7).rows("test").to_list() == held_out(7).rows("test").to_list()
    fingerprints = {
        held_out(7).fingerprint("test"),
        held_out(8).fingerprint("test"),
        held_out(7, TRAIN[:-2]).fingerprint("test"),
    }
    assert len(fingerprints) == 3
    assert held_out(7).fingerprint("test") == held_out(7).fingerprint("test")


@pytest.mark.slow
def test_the_numbers_of_sst2(tmp_path, monkeypatch, capfd):
    source = TASKS["sst2_held_out"].source
    if not os.environ.get("LOSSYTP_DATA") or not source.source.folder.is_dir():
        pytest.skip("needs LOSSYTP_DATA, a folder laid out like the hub, with nyu-mll/glue/sst2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    datasets.enable_progress_bars()
    train, test = source.rows("train"), source.rows("test")
    assert capfd.readouterr().err == "", "no progress bars into a log"
    assert (len(train), len(test)) == (17579, 5872)
    assert test["part"][:872] == ["official"] * 872
    tested = " | ".join(f" {' '.join(text.split())} " for text in test["sentence"][872:])
    assert not [text for text in train["sentence"][::5] if f" {' '.join(text.split())} " in tested]
