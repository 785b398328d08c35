"""Run the examples in docstrings."""

import doctest
import pkgutil
from importlib import import_module
from pathlib import Path

import pytest

import lossytp
from tests.parallel.conftest import tiny_gpt2

NAMES = ["lossytp", *(module.name for module in pkgutil.walk_packages(lossytp.__path__, "lossytp."))]
WITH_EXAMPLES = [name for name in NAMES if ">>>" in Path(pkgutil.resolve_name(name).__file__).read_text("utf-8")]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name: str) -> None:
    gpt2 = tiny_gpt2()
    tokens = gpt2.dummy_inputs["input_ids"] % 10
    module = import_module(name)
    result = doctest.testmod(
        module,
        extraglobs={"gpt2": gpt2, "batch": {"input_ids": tokens, "labels": tokens}},
        optionflags=doctest.ELLIPSIS,
    )
    assert result.attempted > 0
    assert result.failed == 0
