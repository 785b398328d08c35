"""Build the documentation: `./run_all.sh docs` writes output/docs."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from pages import copy_lessons, copy_study, write_ratios

import lossytp

project = "lossytp"
version = release = lossytp.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.doctest"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_title = f"lossytp {release}"
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_in_temp = True
nb_execution_timeout = 240
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_inherit_docstrings = False  # torch's own, whose links lead nowhere here
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

copy_lessons(Path(__file__).parent)
write_ratios(Path(__file__).parent)
copy_study(Path(__file__).parent)


def in_rst(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Turn the Markdown of docstrings, `code`, into ``code``; a letter that follows needs an escape."""
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", "\n".join(lines))
    lines[:] = re.sub(r"``(?=s\b)", r"``\\ ", text).split("\n")


def setup(app: object) -> None:
    """Let Sphinx call `in_rst` on every docstring, before napoleon does."""
    app.connect("autodoc-process-docstring", in_rst, priority=1)  # type: ignore[attr-defined]
