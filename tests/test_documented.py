"""The documentation names what the library brings."""

import re
from pathlib import Path

import pytest

import lossytp

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", lossytp.__all__)
def test_every_public_name_has_an_example_that_the_site_runs(name):
    cells = re.findall(r"```{code-cell} python\n(.*?)```", (DOCS / "reference" / "lossytp.md").read_text(), re.DOTALL)
    assert any(re.search(rf"\bltp\.{name}\b", cell) for cell in cells)


def test_every_guide_is_on_the_site():
    for folder in ("howto", "concepts", "reference"):
        index = (DOCS / folder / "index.md").read_text()
        assert {file.stem for file in (DOCS / folder).glob("*.md")} - {"index"} <= set(index.split())
