from pathlib import Path

import pytest

from lossytp.training.config import EvaluateConfig, PretrainConfig, TrainConfig


@pytest.mark.parametrize("kind", [TrainConfig, EvaluateConfig, PretrainConfig])
def test_the_output_folder_has_a_name_on_one_line_and_home_is_expanded(kind, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    for path, expected in (("~", "/home/someone"), ("~/x", "/home/someone/x"), ("a~/~x", "a~/~x"), ("./~x", "./~x")):
        assert kind(output_dir=path).output_dir == expected
    for path in ("", "\n", "a\nb", "a\r", "a\u2028b"):
        with pytest.raises(ValueError, match="is empty or has a line break: give the path of a folder") as error:
            kind(output_dir=path)
        assert len(str(error.value).splitlines()) == 1
    with pytest.raises(
        ValueError, match=r"^output_dir = '~nobody-here/x' names a user who has no home folder: write \./~"
    ):
        kind(output_dir="~nobody-here/x")
    assert not list(Path().glob("~*"))
