"""Check a notebook's parameters before it computes anything. papermill only warns of one that it does not have.

A parameters cell declares each with its type, as in `loss_rate: float = 0.05`. The next cell calls `check_parameters`.
"""

import ast
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from IPython import get_ipython
from pydantic import create_model

from lossytp.training.command_line import read_yaml
from lossytp.training.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY))  # notebooks also import `paper`, which is not installed
INJECTED = "# Parameters\n"  # how papermill begins the cell in which it sets the given parameters
IN_ONE_LINE = (ValueError, ModuleNotFoundError, FileNotFoundError, PermissionError)  # errors about parameters


def in_repository(path: str) -> Path:
    """Return a path that starts in this folder or, if nothing is there, at the repository's root."""
    return Path(path) if Path(path).exists() else REPOSITORY / path


def check_parameters(kind_of: Callable[[Mapping[str, Any]], type[Settings]] | None = None) -> Settings:
    """Check this notebook's parameters, and read as YAML a text that is given for something else.

    From now on the notebook shows an error about its parameters in one line.

    Args:
        kind_of: returns the class whose settings are all parameters; if None, only those of the parameters cell are.
            There, None may be given for a parameter whose default it is.

    Returns:
        The parameters.
    """
    shell: Any = get_ipython()
    shell.set_custom_exc(IN_ONE_LINE, _show_in_one_line)
    declared: dict[str, Any] = {}
    names: list[str] = []
    for source in reversed(shell.user_ns["In"]):  # first papermill's cell, if there is one, then the parameters cell
        statements = ast.parse(source).body
        for each in statements:
            if isinstance(each, ast.AnnAssign):
                none = " | None" if isinstance(each.value, ast.Constant) and each.value.value is None else ""
                declared[ast.unparse(each.target)] = eval(ast.unparse(each.annotation) + none)
        if declared or source.startswith(INJECTED):
            names += [ast.unparse(each.targets[0]) for each in statements if isinstance(each, ast.Assign)]
        if declared:
            break
    values = {name: shell.user_ns[name] for name in (*declared, *names)}
    fields: dict[str, Any] = {name: (kind, ...) for name, kind in declared.items()}
    own = create_model("Parameters", __base__=Settings, **fields)
    kind: Any = kind_of(values) if kind_of else own
    values = {name: _read(name, value, kind.check_type) for name, value in values.items()}
    shell.user_ns.update(values)
    return kind.from_dict(values)


def _read(name: str, value: Any, check: Callable[[str, Any], None]) -> Any:
    """Return a value that passes the check: as it is or, if it is text, as YAML reads it. papermill's -p gives text."""
    if isinstance(value, str):
        try:
            check(name, value)
        except ValueError:
            with suppress(ValueError):  # then the check below complains of the text
                value = read_yaml(value)
    check(name, value)
    return value


def _show_in_one_line(shell: Any, kind: type, error: Any, trace: Any, tb_offset: int | None = None) -> None:
    error._render_traceback_ = lambda: [f"{kind.__name__}: {error}"]  # IPython asks an exception how to show it
    shell.showtraceback((kind, error, trace))
