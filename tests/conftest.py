"""What the tests of all packages share."""

from collections.abc import Callable, Iterator

import pytest

from tests.processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Callable]:
    """`processes(number, function, *arguments)` runs a function on so many gloo processes; its results by rank."""
    kept = Processes()
    yield kept.run
    kept.stop()
