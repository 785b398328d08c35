"""Define the handle of running lossy operations, in place of torch's."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work


class Then(Work):
    """Wait for several operations, then act once, before any caller learns that they are complete.

    PyTorch's C++ code may keep only the C++ half of this object, which cannot wait without the Python half. So `alive`
    holds the handle until a caller has waited for it.

    Args:
        works: the operations.
        actions: functions to call, in order, once all operations are complete.
        alive: the set of handles that must stay alive; this one is added.
    """

    def __init__(self, works: Sequence[Work], actions: Sequence[Callable[[], None]], alive: set[Work]) -> None:
        super().__init__()
        self._works = works
        self._actions = actions
        self._lock = threading.Lock()  # a future may complete on a thread of the backend's
        self._complete = False
        self._alive = alive
        alive.add(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        waited = [work.wait(timeout) for work in self._works]  # wait for each, even if one is not complete
        self._complete = all(waited)
        self._act()
        return self._complete

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        def act(future: Any) -> list[Tensor]:
            results = [part.value() for part in future.value()]
            self._complete = True  # the operations may report it a little later
            self._act()
            return [tensor for tensors in results for tensor in tensors]

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(act)

    def is_completed(self) -> bool:
        if not self._complete and all(work.is_completed() for work in self._works):
            self._complete = True
            self._act()
        return self._complete

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        self.wait()
        return [tensor for work in self._works for tensor in work.result()]

    def _act(self) -> None:
        with self._lock:
            actions, self._actions = self._actions, ()
            for action in actions:
                action()
        self._alive.discard(self)
