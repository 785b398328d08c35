"""What the tests of all packages share.

`pytest` alone runs the fast tests: no processes, no training of more than a second. The others carry the marker slow.
Whoever names a file, a test or a marker runs all that they name; `--slow`, as in `./run_all.sh test`, runs all.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.processes import Processes


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--slow`."""
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts processes as slow, and leave out what is slow if nothing was named."""
    for item in items:
        if "processes" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    named = config.args_source is pytest.Config.ArgsSource.ARGS or config.getoption("-m") or config.getoption("--slow")
    if not named:
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.fixture(scope="session")
def processes() -> Iterator[Callable]:
    """`processes(number, function, *arguments)` runs a function on so many gloo processes; its results by rank."""
    kept = Processes()
    yield kept.run
    kept.stop()
