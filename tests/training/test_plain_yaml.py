import json
import math
import os
import re
from pathlib import Path

import pytest
import yaml

from lossytp.training.command_line import read_yaml, read_yaml_file


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("!!int 010", 10),
        ("+3", 3),
        ("1.0", 1.0),
        ("1e-3", 1e-3),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("a:", {"a": None}),
        ("{<<: {a: 1, b: 2}, b: 3}", {"a": 1, "b": 3}),
    ],
)
def test_a_plain_word_means_what_it_looks_like(text, value):
    found = read_yaml(text)
    assert found == value
    assert type(found) is type(value)


VALUES = {
    "text": ["010", "1:30", "null", "no", "1.0", "~", "", "<<", "="],
    "numbers": [1, 1e-5, 1e300, True, None],
}


@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump])
def test_dumped_values_are_read_back(write):
    assert read_yaml(write(VALUES)) == VALUES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read as YAML"),
        ("a: 1\nb: {c: 1, c: 2}", 'duplicate key "c"'),
        ("1: 1\n01: 2", "duplicate key"),
        ("[" * 3000, "cannot be read as YAML"),
        ("9" * 5000, "cannot be read as YAML"),
    ],
)
def test_text_that_is_no_yaml_is_one_line(text, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        read_yaml(text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "."])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(ValueError, match=r"^mine: .* cannot be read"):
        read_yaml_file("mine", Path(name))
