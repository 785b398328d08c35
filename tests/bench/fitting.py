"""How well fits find the truth: `nice python -m tests.bench.fitting [--trials 100] [--packets 100000]`.

Prints how often BIC picks the family that made a synthetic trace, how far off the parameters of a Gilbert-Elliott
channel are after 10^6 packets, the seconds this takes, and how often the intervals hold the truth.
"""

import inspect
import time
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from lossyprobe.fitting import fit, fit_family, intervals
from lossyprobe.likelihood import FAMILIES
from lossytp.network import Bernoulli, FourState, GilbertElliott, LossProcess, Trace
from lossytp.training.command_line import Parser, run_as_command

SETTINGS: dict[str, LossProcess] = {
    "Bernoulli": Bernoulli(loss_rate=0.02),
    "simple Gilbert": GilbertElliott(p_good_to_bad=0.005, p_bad_to_good=0.25),
    "Gilbert-Elliott": GilbertElliott(p_good_to_bad=0.002, p_bad_to_good=0.05, loss_bad=0.4, loss_good=0.001),
    "four-state Markov": FourState(0.004, 0.1, 0.15, 0.2, 0.003),
}
RECOVERED = GilbertElliott(p_good_to_bad=0.01, p_bad_to_good=0.1, loss_bad=0.6, loss_good=0.01)
MILLION = 10**6  # packets hold some 9,000 events of each kind, whose number has a standard error of 1 %
PARAMETERS = ("p_good_to_bad", "p_bad_to_good", "loss_bad", "loss_good")


class Fitted(NamedTuple):
    """What one trial found: the family, the largest relative error, and which intervals hold the truth."""

    family: str
    error: float
    held: list[bool]


def recorded(process: LossProcess, packets: int, seed: int) -> list[Trace]:
    """One flow of a loss process."""
    return [Trace(lost=process.losses((seed, "bench")).take(packets), num_packets=packets)]


def trial(name: str, packets: int, seed: int) -> Fitted:
    """Fit all families to one trace."""
    flows = recorded(SETTINGS[name], packets, seed)
    best = fit(flows)[0]
    if best.family.name != name:
        return Fitted(best.family.name, np.nan, [])
    truth = [getattr(SETTINGS[name], parameter) for parameter in best.family.parameters]
    found = intervals(best, flows)
    ends = [found[parameter] for parameter in best.family.parameters]
    held = [low <= value <= high for (low, high), value in zip(ends, truth, strict=True)]
    return Fitted(name, float(np.abs(np.array(best.values) / truth - 1).max()), held)


def main(trials: int = 100, packets: int = 100_000, recoveries: int = 10) -> None:
    """Print the tables.

    Args:
        trials: for each family.
        packets: of each trial's trace.
        recoveries: traces of 10^6 packets of a Gilbert-Elliott channel.
    """
    print(f"{'truth':18} picked by BIC, of {trials} traces of {packets} packets; intervals that hold the truth")
    for name in SETTINGS:
        found = [trial(name, packets, seed) for seed in tqdm(range(trials), desc=name, mininterval=5)]
        held = np.array([each.held for each in found if each.held])
        print(f"{name:18} {sum(each.family == name for each in found):5}  {np.round(held.mean(axis=0), 2)}", flush=True)
    print(f"\nGilbert-Elliott channel, {MILLION} packets: relative error of {', '.join(PARAMETERS)}; seconds")
    for seed in range(recoveries):
        flows = recorded(RECOVERED, MILLION, seed)
        begun = time.process_time()
        values = fit_family(FAMILIES["Gilbert-Elliott"], flows).values
        errors = np.array(values) / [getattr(RECOVERED, parameter) for parameter in PARAMETERS] - 1
        print(np.round(errors, 4), f"{time.process_time() - begun:.1f}", flush=True)


if __name__ == "__main__":
    parser = Parser(description=main.__doc__)
    for name, default in (inspect.signature(main).parameters).items():
        parser.add_argument(f"--{name}", type=int, default=default.default)
    run_as_command(lambda: main(**vars(parser.parse_args())))
