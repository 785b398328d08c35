"""Run the examples in docstrings."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import lossytp
from tests.parallel.conftest import tiny_gpt2

ROOT = Path(lossytp.__file__).parent
WITH_EXAMPLES = [file.relative_to(ROOT.parent) for file in ROOT.rglob("*.py") if ">>>" in file.read_text("utf-8")]


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=str)
def test_examples_run(file: Path) -> None:
    gpt2 = tiny_gpt2()
    tokens = gpt2.dummy_inputs["input_ids"] % 10
    module = import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
    result = doctest.testmod(
        module,
        extraglobs={"gpt2": gpt2, "batch": {"input_ids": tokens, "labels": tokens}},
        optionflags=doctest.ELLIPSIS,
    )
    assert result.attempted > 0
    assert result.failed == 0
