"""Find loss processes by the name in a flag, a grid or a notebook: ``correlated(shared=0.5)``."""

from collections.abc import Callable

from lossytp.network.bernoulli import Bernoulli
from lossytp.network.correlated import Correlated
from lossytp.network.four_state import FourState
from lossytp.network.gilbert_elliott import GilbertElliott
from lossytp.network.loss_process import LossProcess
from lossytp.network.notation import build
from lossytp.network.presets import from_netem
from lossytp.network.replay import Replay
from lossytp.network.trace import Trace

LOSS_PROCESSES: dict[str, Callable[..., LossProcess]] = {
    "ber": Bernoulli,
    "g-e": GilbertElliott.from_loss_and_burst,
    "correlated": Correlated.from_loss_and_share,
    "four_state": FourState,
    "netem": from_netem,
    "replay": Replay.from_file,
    "trace": Trace.from_file,
}
"""Add your own, a class or a function that returns a process, and every configuration knows its name."""


def loss_process_named(text: str, **given: float | None) -> LossProcess:
    """Return the process that `text` names, as ``name`` or ``name(1, option=2)``.

    Args:
        text: the name, with values if any.
        given: values of `loss_rate` and `mean_burst_packets`, for parameters with these names that the text leaves out.
            A 0 replaces no default, and None replaces nothing.

    Raises:
        ValueError: if a name is unknown, a value is missing, or values do not go together.
    """
    return build("loss_type", text, LOSS_PROCESSES, given)
