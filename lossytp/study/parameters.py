"""Check a notebook's parameters before it computes anything. papermill only warns of one that it does not have.

A parameters cell declares each with its type, as in `loss_rate: float = 0.05`; None may be given where it is the
default. The next cell calls `check_parameters` or, if the parameters are the settings of a run, `given_run`.
"""

import ast
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_origin

from IPython import get_ipython

from lossytp.network.checks import check_names
from lossytp.training.config import RunSettings, settings_class
from lossytp.training.config.settings import Kind, check_kind
from lossytp.training.plain_yaml import read_yaml

REPOSITORY = Path(__file__).resolve().parents[2]
INJECTED = "# Parameters\n"  # how papermill begins the cell in which it sets the given parameters
IN_ONE_LINE = (ValueError, ModuleNotFoundError, FileNotFoundError, PermissionError)  # errors about parameters


def in_repository(path: str) -> Path:
    """Return a path that starts in this folder or, if nothing is there, at the repository's root."""
    return Path(path) if Path(path).exists() else REPOSITORY / path


def check_parameters() -> None:
    """Check this notebook's parameters, and read as YAML a text that is given for something else.

    Raises:
        ValueError: if a parameter is not declared, or has another type.
    """
    shell: Any = get_ipython()
    kinds, values = _parameters(shell)
    check_names(values, kinds)
    for name, value in values.items():
        shell.user_ns[name] = _read(name, value, lambda name, value: _check(name, value, *kinds[name]))


def given_run() -> RunSettings:
    """Return the configuration whose settings are this notebook's parameters: those declared, and any other.

    Raises:
        ValueError: if one is no setting, or has another type, or if settings contradict each other.
    """
    _, values = _parameters(get_ipython())
    kind = settings_class(values)
    kind.check_names(values)
    return kind.from_dict({name: _read(name, value, kind.check_type) for name, value in values.items()})


def _parameters(shell: Any) -> tuple[dict[str, tuple[Any, bool]], dict[str, Any]]:
    """Return the type of each declared parameter, with whether None is its default, and the values of all parameters.

    The last cell that declares some is the parameters cell; papermill's cell comes after it. From now on the notebook
    shows an error about its parameters in one line.
    """
    shell.set_custom_exc(IN_ONE_LINE, _show_in_one_line)
    kinds: dict[str, tuple[Any, bool]] = {}
    names: list[str] = []
    for source in reversed(shell.user_ns["In"]):
        statements = ast.parse(source).body
        for each in statements:
            if isinstance(each, ast.AnnAssign):
                optional = isinstance(each.value, ast.Constant) and each.value.value is None
                kinds[ast.unparse(each.target)] = eval(ast.unparse(each.annotation)), optional
        if kinds or source.startswith(INJECTED):
            names += [ast.unparse(each.targets[0]) for each in statements if isinstance(each, ast.Assign)]
        if kinds:
            break
    return kinds, {name: shell.user_ns[name] for name in (*kinds, *names)}


def _check(name: str, value: Any, kind: Any, optional: bool) -> None:
    """Raise ValueError unless the value is of a kind such as `float` or `list[float]`."""
    if value is None and optional:
        return
    check_kind(name, value, Kind(types=(get_origin(kind) or kind,)))
    for element in value if get_args(kind) else ():
        check_kind(name, element, Kind(types=get_args(kind)))


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
