"""What does waiting for lost packets cost, and when is it cheaper than losing them?

Over reliable transport, training takes as many steps as without losses, but each step waits for retransmissions. With
best effort, steps hardly wait, but pretraining takes more tokens to reach the same cross-entropy. Losing pays where the
ratio of tokens is below the price of a reliable step. The steps are all communication, where waiting costs most.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats
from tqdm import tqdm

from lossytp.network.checks import check_at_least, check_filled, check_positive, check_probability
from lossytp.network.losses import Bernoulli
from lossytp.study.style import COLUMN, estimates
from paper.pretraining import AXES, EVALUATIONS, LOST, SMALL, nats_lost
from paper.study import POINTS, Claim, Results, Study, claim, json_rows, row_of
from paper.timing import (
    AllReduce,
    BestEffort,
    Channel,
    GoBackN,
    Path,
    SelectiveRepeat,
    Transport,
    check_not_negative,
    step_seconds,
)

BEST_EFFORT, SELECTIVE_REPEAT, GO_BACK_N = "best effort", "selective repeat", "go-back-N"
MIN_SAMPLES, SAMPLES_TIMES_RATE = 3, 0.3  # of go-back-N: many losses make its simulation slow and its times vary less
MAX_LOSSES_A_PACKET = 20  # beyond it a simulated step takes minutes and gigabytes
NETWORK = ["bandwidth_gbits", "round_trip_us"]
REDUCE_SHARE = 0.5  # of the messages of an all-reduce; the gather phase has as many of the same size
DRAWN = (12.5, 125.0, 1250.0, 12500.0)  # kilobytes in flight


def answer(study: Study) -> dict[str, Any]:
    """Return how many times longer reliable steps take, beside how many times more tokens losing takes."""
    step_times = pd.read_csv(study.results / "step_times.csv")
    prices = price_of_reliability(step_times)
    tokens = nats_lost(study.arms_with_seeds(SMALL))
    tokens = tokens[tokens["arm"] == LOST[0]].sort_values("loss_rate")
    rows = json_rows(tokens)
    for row in rows:
        row["waiting"] = waiting_times(step_times, loss_rate=row["loss_rate"])
    half = price_of_reliability(step_times, best_effort_share=REDUCE_SHARE)
    study.draw(price_against_loss(half, tokens), "price")
    message_bytes = int(step_times["message_bytes"].iloc[0])
    return {"price": json_rows(prices), "message_bytes": message_bytes, "waiting": rows}


def price_of_reliability(step_times: pd.DataFrame, *, best_effort_share: float = 1.0) -> pd.DataFrame:
    """Divide the time of a step over reliable transport by its time with best effort.

    A lossy run that takes that many times as many steps still reaches the same accuracy in the same time.

    Args:
        step_times: from `step_times.step_times`.
        best_effort_share: share of the messages that use best effort; the others are reliable. It is 1/2 if only the
            reduce phase may lose packets, since the gather phase has as many messages of the same size.

    Returns:
        `transport` (the reliable ones), `bandwidth_gbits`, `round_trip_us`, `loss_rate`, `price`, `standard_error`, and
        the `kilobytes` in flight, bandwidth times round trip.
    """
    setting = [*NETWORK, "loss_rate"]
    losing = step_times[step_times["transport"] == BEST_EFFORT]
    waiting = step_times[step_times["transport"] != BEST_EFFORT]
    both = waiting.merge(losing.drop(columns="transport"), on=setting, suffixes=("", "_losing"))
    ours, best_effort_s = both["seconds"], both["seconds_losing"]
    losing_s = best_effort_share * best_effort_s + (1 - best_effort_share) * ours
    price = ours / losing_s
    relative = np.hypot(both["standard_error"] / ours, both["standard_error_losing"] / best_effort_s)
    relative *= best_effort_share * best_effort_s / losing_s
    kilobytes = both["bandwidth_gbits"] * both["round_trip_us"] / 8
    table = both[["transport", *setting]].assign(kilobytes=kilobytes)
    return table.assign(price=price, standard_error=price * relative)


def waiting_times(step_times: pd.DataFrame, *, loss_rate: float) -> list[dict[str, float]]:
    """Return how many times longer steps take than with losses in the reduce phase, by the amount of data in flight.

    Waiting reaches the same cross-entropy sooner where this is below the arm's `times_tokens`. Steps are all
    communication, which favours losing: waiting for retransmissions then costs most.

    Args:
        step_times: from `step_times.step_times`.
        loss_rate: one of its loss rates.

    Returns:
        For each bandwidth times round trip, in ascending order, its `kilobytes` and the `times` with selective repeat.
    """
    prices = price_of_reliability(step_times, best_effort_share=REDUCE_SHARE)
    prices = prices[(prices["loss_rate"] == loss_rate) & (prices["transport"] == SELECTIVE_REPEAT)]
    times = prices.groupby("kilobytes")["price"].first()
    return [{"kilobytes": float(each), "times": float(price)} for each, price in times.items()]  # type: ignore[arg-type]


def price_against_loss(price: pd.DataFrame, tokens: pd.DataFrame) -> Figure:
    """Draw how many times longer steps take with selective repeat (lines), and how many more tokens losing takes.

    Losing pays where a mark lies below a line. There is one line for each of the products of bandwidth and round trip
    `DRAWN`.

    Args:
        price: from `price_of_reliability`, with losses in the reduce phase.
        tokens: from `nats_lost`, with 95 % intervals.
    """
    figure, ax = plt.subplots(figsize=(COLUMN, 2.2), layout="constrained")
    ours = price[(price["transport"] == SELECTIVE_REPEAT) & (price["loss_rate"].between(0.001, 0.1))]
    for number, kilobytes in enumerate(DRAWN):
        rows = ours[ours["kilobytes"] == kilobytes].drop_duplicates("loss_rate").sort_values("loss_rate")
        ax.plot(POINTS * rows["loss_rate"], rows["price"], color=f"C{number}", linewidth=1.4)
        size = f"{kilobytes / 1000:g} MB" if kilobytes >= 1000 else f"{kilobytes:g} kB"
        end = (POINTS * rows["loss_rate"].iloc[-1], rows["price"].iloc[-1])
        ax.annotate(
            f"{size} in flight", end, xytext=(5, 0), textcoords="offset points", color=f"C{number}", fontsize=6.5,
            va="center", annotation_clip=False,
        )  # fmt: skip
    more = tokens[[f"clean_times_tokens{end}" for end in ("", "_low", "_high")]]
    estimates(ax, POINTS * tokens["loss_rate"], more, 0, color="0.1", markersize=4, zorder=3)
    ax.annotate(
        "tokens that\nlosing takes", (POINTS * tokens["loss_rate"].iloc[-1], more.iloc[-1, 0]), xytext=(-6, 1),
        textcoords="offset points", fontsize=6.5, ha="right", va="top",
    )  # fmt: skip
    ax.set(xscale="log", xlabel="packet loss rate, %", ylabel="times as long, or as many")
    ax.set_title("Waiting is cheaper, unless megabytes are in flight")
    ax.set_xticks(ticks := [0.1, 1, 3, 10], [f"{each:g}" for each in ticks])
    ax.minorticks_off()
    return figure


# Time a training step over best effort and over reliable transports: the notebook 13_step_times.


def transports(num_packets: int, path: Path, timeout_round_trips: float) -> dict[str, Transport]:
    """Return the transports to compare, for messages of `num_packets` packets.

    The reliable ones have their best settings, so their times are lower bounds. Go-back-N is what RDMA over Converged
    Ethernet does (Mittal et al., "Revisiting network support for RDMA", SIGCOMM 2018).
    """
    return {
        BEST_EFFORT: BestEffort.patient(num_packets, path),
        SELECTIVE_REPEAT: SelectiveRepeat.prompt(path, timeout_round_trips),
        GO_BACK_N: GoBackN.prompt(path, timeout_round_trips),
    }


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The links to compare: every combination of these values.

    Raises:
        ValueError: if a list is empty, or a value out of range.
    """

    bandwidths_gbits: list[float]
    round_trips_us: list[float]
    loss_rates: list[float]

    def __post_init__(self) -> None:
        for name in ("bandwidths_gbits", "round_trips_us", "loss_rates"):
            check_filled(name, getattr(self, name))
        for gbits in self.bandwidths_gbits:
            check_positive("bandwidths_gbits", gbits, "Gbit/s")
        for round_trip_us in self.round_trips_us:
            check_not_negative("round_trips_us", round_trip_us, "microseconds")
        for rate in self.loss_rates:
            check_probability("loss_rates", rate)


def step_times(
    all_reduce: AllReduce, sweep: Sweep, *, num_layers: int, timeout_round_trips: float, samples: int, seed: int
) -> pd.DataFrame:
    """Measure a tensor-parallel training step's communication time under Bernoulli loss.

    All layers are alike, so one layer's time is measured and multiplied. Times in packets depend only on the product of
    bandwidth and round trip, so each product is timed once, with `samples` samples (fewer for go-back-N).

    Returns:
        Columns transport, bandwidth_gbits, round_trip_us, loss_rate, seconds, standard_error, and message_bytes, the
        size of each all-reduced tensor. Go-back-N has no row where it would lose each packet more than
        `MAX_LOSSES_A_PACKET` times, packets sent in vain included.

    Raises:
        ValueError: if a number is out of range.
    """
    for name, count in {"num_layers": num_layers, "samples": samples}.items():
        check_at_least(name, count, 1)
    check_at_least("seed", seed, 0)
    check_not_negative("timeout_round_trips", timeout_round_trips, "round trips")
    rows = []
    timed: dict[tuple[str, float, float], np.ndarray] = {}
    settings = list(product(sweep.bandwidths_gbits, sweep.round_trips_us, sweep.loss_rates))
    for gbits, round_trip_us, rate in tqdm(settings, desc="step times", mininterval=5):
        # at 1 Gbit/s, with as many packets a round trip
        path = Path(bandwidth_bits_per_s=1e9, round_trip_s=gbits * round_trip_us * 1e-6)
        num_packets = all_reduce.num_packets(path.wire)
        for name, transport in transports(num_packets, path, timeout_round_trips).items():
            count = samples
            if isinstance(transport, GoBackN):
                sent_a_loss = min(transport.timeout_s / path.packet_s, num_packets)
                if rate**2 * sent_a_loss > MAX_LOSSES_A_PACKET * (1 - rate):
                    continue
                count = int(np.clip(SAMPLES_TIMES_RATE / max(rate, 1e-9), min(samples, MIN_SAMPLES), samples))
            key = (name, path.round_trip_s, rate)
            if key not in timed:
                channel = Channel(path=path, transport=transport, process=Bernoulli(loss_rate=rate))
                one_layer = step_seconds(all_reduce, channel, num_layers=1, compute_s=0, samples=count, seed=seed)
                timed[key] = num_layers * one_layer
            rows.append(
                {
                    "transport": name,
                    "bandwidth_gbits": gbits,
                    "round_trip_us": round_trip_us,
                    "loss_rate": rate,
                    "seconds": timed[key].mean() / gbits,
                    "standard_error": stats.sem(timed[key]) / gbits,
                    "message_bytes": all_reduce.num_elements * all_reduce.itemsize,
                }
            )
    return pd.DataFrame(rows)


# Claims.


PAYS_UP_TO = 125.0  # kilobytes in flight
PAYS_FROM = 1250.0


@claim
def retransmission_is_cheap(results: Results) -> Claim:
    """Require that selective repeat takes less than twice as long, up to 10 % loss and 125 kB in flight."""
    in_flight = 125
    prices = [
        row["price"]
        for row in results["price"]
        if row["transport"] == "selective repeat" and row["loss_rate"] <= 0.1 and row["kilobytes"] <= in_flight
    ]
    return Claim(max(prices) < 2, {"largest price": max(prices), "kilobytes in flight": in_flight})


@claim
def losing_pays_at_low_rates(results: Results) -> Claim:
    """Require that at 1 and 3 % loss and 1.25 MB in flight, waiting costs more than the most tokens in any interval.

    Waiting is timed for steps that are all communication. The share of communication from which losing pays must lie
    between a half and three quarters of a step at 3 % loss, and be smaller at 1 %.
    """
    numbers: dict[str, float] = {}
    for rate, name in ((0.01, "low"), (0.03, "higher")):
        row = _arm(results, LOST[0], rate)
        most = max(_claimed_times_tokens(row, "_high", beyond=math.inf))
        waiting = next(each["times"] for each in row["waiting"] if each["kilobytes"] == PAYS_FROM)
        numbers |= {f"tokens, at most, {rate:g}": most, f"waiting, {rate:g}": waiting}
        numbers[f"margin, {rate:g}"] = waiting - most
        mean = max(_claimed_times_tokens(row, beyond=math.inf))
        numbers[f"share at most, {name}"] = (most - 1) / (waiting - 1)
        numbers[f"share, {name}"] = (mean - 1) / (waiting - 1)  # of communication in a step, where both cost the same
    holds = all(value > 0 for name, value in numbers.items() if name.startswith("margin"))
    return Claim(holds and max(0.5, numbers["share, low"]) < numbers["share, higher"] < 0.75, numbers)


@claim
def waiting_beats_more_tokens(results: Results) -> Claim:
    """Require that up to 125 kB in flight waiting is cheaper than the wasted tokens, and that it is open beyond.

    It must be so with and without losses in evaluation, and on both axes of tokens. With most in flight, waiting must
    cost more than each estimate of the tokens.
    """
    row = _arm(results, *LOST)
    least = min(_claimed_times_tokens(row, "_low", beyond=1.0))
    numbers = {f"at {each['kilobytes']:g} kB": each["times"] for each in row["waiting"]}
    below = [each["times"] for each in row["waiting"] if each["kilobytes"] <= PAYS_UP_TO]
    above = [each["times"] for each in row["waiting"] if each["kilobytes"] > PAYS_UP_TO]
    most = max(_claimed_times_tokens(row, beyond=math.inf))
    holds = max(below) < least <= min(above, default=0) and max(above) > most
    return Claim(holds, numbers | {"least of tokens": least, "up to": PAYS_UP_TO})


def _claimed_times_tokens(row: dict[str, Any], end: str = "", *, beyond: float) -> list[float]:
    """Return how many times the tokens an arm takes, or an end of the interval, by evaluation and axis of tokens.

    `beyond` replaces what lies beyond the lossless lengths, null in the results.
    """
    return [row[f"{evaluation}_times_tokens{axis}{end}"] or beyond for evaluation in EVALUATIONS for axis in AXES]


def _arm(results: Results, arm: str, loss_rate: float) -> dict[str, Any]:
    return row_of(results["waiting"], arm=arm, loss_rate=loss_rate)
