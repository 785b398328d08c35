import gzip
import json
import shutil
import socket
import threading
import time
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from lossytp.training import rows as hub
from lossytp.training import rows as sources
from lossytp.training.rows import Files, Source, Table
from tests.training.own_tasks import write_rows

ROWS = [{"text": f"row {i}", "label": i % 2} for i in range(6)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return an empty folder that LOSSYTP_DATA names; the cache is below it, and no hub answers."""
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
    monkeypatch.setattr(hub, "_HUB", hub._Hub())


def write(file: Path, rows=ROWS) -> Path:
    return write_rows(file, rows)


@pytest.mark.parametrize("suffix", ["parquet", "csv", "json", "jsonl"])
@pytest.mark.parametrize("place", ["some/words/plain", "some/words/plain/data"])
def test_a_copy_laid_out_like_the_hub_is_read(folder, suffix, place, capfd):
    write(folder / place / f"train.{suffix}", ROWS[:4])
    write(folder / place / f"validation-00000-of-00002.{suffix}", ROWS[:4])
    write(folder / place / f"validation-00001-of-00002.{suffix}", ROWS[4:])
    write(folder / place / f"validation_mismatched.{suffix}", ROWS[:1])
    source = Source(path="some/words", name="plain", official_rows={"train": 4, "test": 7})
    assert source.rows("train").to_list() == ROWS[:4]
    assert source.rows("test").to_list() == ROWS
    assert (source.subset("train"), source.subset("test")) == (False, True)
    assert Source(path="some/words", name="plain").subset("train") is None
    assert "Generating" not in capfd.readouterr().err  # no progress bars into a log


@pytest.mark.parametrize("suffix", ["parquet", "csv", "json", "jsonl"])
def test_a_users_files_are_read(folder, suffix):
    source = Files(train=write(folder / f"mine.{suffix}"), test=write(folder / f"held.{suffix}", ROWS[:2]))
    assert source.rows("train").to_list() == ROWS
    assert source.rows("test").to_list() == ROWS[:2]
    assert source.subset("train") is None


def test_files_that_cannot_be_read_are_named(folder, capfd):
    gone = Files(train=folder / "gone.csv", test="held.txt")
    for wrong in (gone, Files(train="~no/such_user.csv", test="")):
        with pytest.raises(ValueError, match=r"train = '.*(gone|such_user).csv' is neither a file"):
            wrong.rows("train")
    with pytest.raises(ValueError, match=r"test = 'held.txt' has an unknown format: give one of \.parquet, \.csv"):
        gone.fingerprint("test")
    (folder / "broken.json").write_text("{]")
    with pytest.raises(ValueError, match=r"broken.json cannot be read"):
        Files(train=folder / "broken.json", test="held.csv").rows("train")
    assert capfd.readouterr().err == "", "the error says it all"


CELLS = ["NA", "N/A", "null", "None", "nan", "#N/A", "-", "0x1f", " "]


def test_only_an_empty_cell_of_a_csv_is_null(folder):
    (folder / "a.csv").write_text("text,number\n" + "".join(f"{cell},{i}\n" for i, cell in enumerate([*CELLS, ""])))
    rows = Files(train=folder / "a.csv", test="").rows("train")
    assert rows["text"] == [*CELLS, None]
    assert rows["number"] == list(range(len(CELLS) + 1))


def test_texts_of_json_stay_as_they_are(folder):
    rows = [{"a": "2024-01-01", "b": "01"}, {"a": "2024-01-02", "b": 2, "more": None}, {"a": None, "b": "x"}]
    for name, content in (("a.json", json.dumps(rows, indent=1)), ("a.jsonl", "\n\n".join(map(json.dumps, rows)))):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
        found = Files(train=folder / name, test="").rows("train")
        assert (found["a"], found["b"]) == (["2024-01-01", "2024-01-02", None], ["01", "2", "x"])


def test_the_type_of_a_column_may_show_late(folder):
    write(folder / "a.csv", [*({"text": "a", "id": number} for number in range(11_000)), {"text": "b", "id": "z9"}])
    assert Files(train=folder / "a.csv", test="").rows("train")["id"][-2:] == ["10999", "z9"]


def test_whole_numbers_that_no_column_holds_are_text(folder):
    big = str(10**30)
    contents = {"a.csv": f"text,id\na,{big}\nb,\nc,7\n", "a.jsonl": f'{{"id": {big}}}\n{{"id": null}}\n{{"id": 7}}'}
    for name, content in contents.items():
        (folder / name).write_text(content)
        assert Files(train=folder / name, test="").rows("train")["id"] == [big, None, "7"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"text,text,label\na,b,0\n", "two columns are named text"),
        ("a.csv", b"text,label\na,b,0\n", "Expected 2 fields in line 2, saw 3"),
        ("a.csv", b"text,label\na,0\nb,1,\n", "Expected 2 fields in line 3, saw 3"),
        ("a.csv", b"text,label\na\0b,0\n", "NUL"),
        ("a.csv", "text,label\na,0\n".encode("utf-16"), "NUL"),
        ("a.csv", b"", "No columns"),
        ("a.csv", b"text,label\n\xff,0\n", "utf-8"),
        ("a.jsonl", b'{"text": "a", "text": "b"}\n', "twice"),
        ("a.json", b'[{"text": "a"}, "b"]', "not an object"),
        ("a.json", b'[{"text": "a"},', "cannot be read"),
        ("a.json", b"[" * 100_000, "recursion"),
        ("a.parquet", b"PAR1", "not a Parquet file"),
    ],
)
def test_rows_that_are_not_clear_are_refused_in_one_line(folder, name, content, words):
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} .*{words}") as error:
        Files(train=folder / name, test="").rows("train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "words"), [({"text": "a", "lable": 0}, "columns differ"), ({"text": "a", "label": "z"}, "label has incomp")]
)
def test_files_with_other_columns_are_refused(folder, row, words):
    write(folder / "0.csv")
    write(folder / "1.csv", [row])
    with pytest.raises(ValueError, match=words):
        Files(train=folder / "*.csv", test="").rows("train")


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_a_small_file_that_unpacks_to_too_much_is_refused(folder, name, monkeypatch):
    monkeypatch.setattr(sources, "MOST_BYTES", 2**16)
    if name.endswith("parquet"):
        write(folder / name, [{"text": "a" * 1000}] * 100)
    else:
        (folder / name).write_bytes(gzip.compress(b"text\n" + bytes(2**17), mtime=0))
    assert (folder / name).stat().st_size < 10_000
    with pytest.raises(ValueError, match=rf"{name}, unpacked, = .* is above 65536"):
        Files(train=folder / name, test="").rows("train")


@pytest.mark.parametrize(("why", "kind"), [("a folder", Source), ("No such file", Source), ("No such file", Files)])
def test_a_folder_or_broken_link_in_place_of_a_file_is_refused(folder, why, kind):
    """Otherwise some rows would silently be missing."""
    write(folder / "me/mine/train-0.csv")
    wrong = folder / "me/mine/train-1.csv"
    wrong.mkdir() if why == "a folder" else wrong.symlink_to("gone")
    source = Source(path="me/mine") if kind is Source else Files(train=folder / "me/mine/*.csv", test="")
    for asked in (kind.rows, kind.fingerprint):
        with pytest.raises(ValueError, match=rf"^{wrong} cannot be read \(.*{why}"):
            asked(source, "train")


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
    with pytest.raises(
        ValueError, match=rf"^data set some/words, plain, .*LOSSYTP_DATA.* no folder {folder}/some/words/plain"
    ) as error:
        Source(path="some/words", name="plain").rows("train")
    assert "\n" not in str(error.value)
    monkeypatch.delenv("LOSSYTP_DATA")
    with pytest.raises(ValueError, match=r"data set some/words is neither in LOSSYTP_DATA, which is not set"):
        Source(path="some/words").fingerprint("test")
    assert time.perf_counter() - start < 10
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


def test_the_error_says_if_asking_the_hub_is_forbidden(monkeypatch):
    hub_at("http://127.0.0.1:9", monkeypatch)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE forbids asking: set it to 0"):
        Source(path="some/words").rows("train")


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
            with pytest.raises(ValueError, match="which does not answer"):
                Source(path="some/words").rows(split)
        assert time.perf_counter() - start < 10
        server.shutdown(socket.SHUT_RDWR)
    assert len(asked) == 1


def test_a_copy_without_the_split_is_an_error(folder):
    write(folder / "some/words/train.csv")
    with pytest.raises(
        ValueError, match=rf"data set some/words has no .* file named validation\* in {folder}/some/words"
    ):
        Source(path="some/words").rows("test")


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


def test_a_repository_with_a_script_is_read_from_the_hubs_own_export(folder, monkeypatch):
    calls = []
    refusals = ["Dataset scripts are no longer supported, but found words.py", "out of luck"]

    def load(path, *arguments, **options):
        calls.append(options)
        if "revision" not in options:
            raise RuntimeError(refusals.pop(0))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub, "_ask_hub", lambda: True)
    source = Source(path="some/words", name="plain")
    assert len(source.rows("test")) == 6
    assert calls[1] == {"data_dir": "plain", "split": "validation", "revision": "refs/convert/parquet"}
    with pytest.raises(ValueError, match=r"nor available from the hub \(out of luck\)"):
        source.rows("test")
    assert len(calls) == 3
