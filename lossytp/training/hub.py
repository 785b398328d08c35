"""Ask at most once a minute whether the hub answers, and go offline if not."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

HUB_TIMEOUT_S = 4.0
ASK_HUB_AGAIN_AFTER_S = 60.0


@contextmanager
def hub_or_its_cache() -> Iterator[bool]:
    """Go offline within the block if the hub does not answer; yield whether it answers.

    Online, the hub's client would try for half a minute before it reads its cache.
    """
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    answers = not is_offline() and hub_answers()
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = not answers
    try:
        yield answers
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def is_offline() -> bool:
    """Return whether the user's environment forbids asking the hub."""
    import datasets
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE)


def hub_answers() -> bool:
    """Return whether the hub answers. Ask it at most once a minute."""
    if _HUB.answers is None or time.monotonic() - _HUB.asked_at_s > ASK_HUB_AGAIN_AFTER_S:
        _HUB.answers, _HUB.asked_at_s = _ask_hub(), time.monotonic()
    return _HUB.answers


@dataclass
class _Hub:
    answers: bool | None = None  # None until asked
    asked_at_s: float = 0.0


_HUB = _Hub()


def _ask_hub() -> bool:
    from huggingface_hub import constants, get_session

    answers: list[int] = []

    def ask() -> None:
        with suppress(Exception):  # any client's error: refused, timed out, or a proxy's
            answers.append(get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S).status_code)

    asking = threading.Thread(target=ask, daemon=True)  # waiting for a silent name server has no time limit
    asking.start()
    asking.join(HUB_TIMEOUT_S)
    return bool(answers)
