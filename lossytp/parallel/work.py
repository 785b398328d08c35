"""Handles of operations under way, in place of torch's."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import Work


class Then(Work):
    """A handle of an operation after which something is to be done, once, before anybody learns that it is complete."""

    def __init__(self, work: Work, action: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._action: Callable[[], None] | None = action
        self._lock = threading.Lock()  # a future may complete on a thread of the backend's

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done = self._work.wait(timeout)
        self._act()
        return done

    def get_future(self) -> Any:
        def act(future: Any) -> Any:
            self._act()
            return future.value()

        return self._work.get_future().then(act)

    def is_completed(self) -> bool:
        done = self._work.is_completed()
        if done:
            self._act()
        return done

    def _act(self) -> None:
        with self._lock:
            action, self._action = self._action, None
            if action is not None:
                action()


class All(Work):
    """One handle for several operations."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done = [work.wait(timeout) for work in self._works]  # each of them, also behind one that is not done
        return all(done)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
