"""Answer when losing packets beats retransmitting them.

Time to accuracy is the number of steps, times the seconds per step. Over reliable transport, a run needs as many steps
as without losses, but each step waits for retransmissions. With best effort, a run needs the steps of a lossy run, but
its steps hardly wait. `step_ratios` computes the steps from records, and `price_of_reliability` the seconds from
`step_times`. Losing wins where the ratio of steps is below the price.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats
from tqdm import tqdm

from lossytp.network.checks import check_at_least, check_filled, check_positive, check_probability
from lossytp.network.losses import Bernoulli
from lossytp.study.statistics import t_interval
from lossytp.study.style import COLUMN, MARKERS, estimates, marker_of, shared_legend
from lossytp.study.tables import tidy
from paper.comparisons import json_rows, loss_rate_of
from paper.study import Claim, Results, Study, claim, loss_rate_axis, task_name
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

# Measure how long a training step waits for its network, over best effort and over reliable transports.


BEST_EFFORT, GO_BACK_N = "best effort", "go-back-N"
MIN_SAMPLES, SAMPLES_TIMES_RATE = 3, 0.3  # of go-back-N: many losses make its simulation slow and its times vary less
MAX_LOSSES_A_PACKET = 20  # beyond it a simulated step takes minutes and gigabytes


def transports(num_packets: int, path: Path, timeout_round_trips: float) -> dict[str, Transport]:
    """Return the transports to compare, for messages of `num_packets` packets.

    The reliable ones have their best settings, so their times are lower bounds. Go-back-N is what RDMA over Converged
    Ethernet does (Mittal et al., "Revisiting network support for RDMA", SIGCOMM 2018).
    """
    return {
        BEST_EFFORT: BestEffort.patient(num_packets, path),
        "selective repeat": SelectiveRepeat.prompt(path, timeout_round_trips),
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


TARGET_SHARE = 0.9  # share of a lossless run's gain over the most frequent class
SIGN_TEST_SEEDS = 5  # among 5 ratios, the smallest is below the median with a probability of 97 %
NETWORK = ["bandwidth_gbits", "round_trip_us"]
BEST_EFFORT_SHARE = {"both": 1.0, "reduce": 0.5}  # share of the messages, by the phases that may lose packets


def step_ratios_of_both_phases(records: list[dict]) -> pd.DataFrame:
    """Return `step_ratios` of the runs that lose packets in both phases.

    Args:
        records: runs of one length, without losses and with. Losses in the reduce phase alone are left out.
    """
    runs = [record for record in records if loss_rate_of(record) == 0 or not record["config"]["reliable_gather"]]
    return step_ratios(steps_to_accuracy(runs, target_accuracies(runs)))


def target_accuracies(records: list[dict], share: float = TARGET_SHARE) -> dict[str, float]:
    """Return each task's target accuracy: chance, plus a share of the mean final gain of lossless runs over chance.

    The target lies well below the final accuracy. While the learning rate decays, accuracy rises until the last step,
    so near the end runs would differ only in their last few steps.

    Raises:
        ValueError: if a task has no run without losses.
    """
    found = {}
    for task, runs in tidy(records).groupby("task", sort=False):
        lossless = runs[runs["loss_rate"] == 0]
        if lossless.empty:
            raise ValueError(f"{task} has no run without losses to set its target: add one")
        chance = float(lossless["majority_share"].iloc[0])
        found[str(task)] = chance + share * (float(lossless["accuracy_lossy"].mean()) - chance)
    return found


def steps_to_accuracy(records: list[dict], target: dict[str, float]) -> pd.DataFrame:
    """Find the step at which each run reaches its task's target.

    A target is reached at the first of two consecutive evaluations at or above it, or at the last evaluation. Between
    evaluations, and from chance at step 0, accuracy is interpolated linearly.

    All runs should have one length, so that their learning rates decay alike: a run planned to end at the target would
    decay earlier, and reach it earlier, with losses or without.

    Args:
        records: the runs' records.
        target: from `target_accuracies`.

    Returns:
        One row per run: `task`, `loss_rate`, `seed`, `steps` (NaN if never) and `last_step`.

    Raises:
        ValueError: if two records share task, rate and seed, a finished run has fewer than two evaluations, or the
            target is at most chance.
    """
    runs = tidy(records)[["task", "loss_rate", "seed", "majority_share"]]
    twice = runs[runs.duplicated(["task", "loss_rate", "seed"])]
    if len(twice):
        first = twice.iloc[0]
        raise ValueError(
            f"{first['task']} has two runs at {first['loss_rate']:g}, seed {first['seed']}: give the runs of one loss "
            "process"
        )
    rows = []
    for record, row in zip(records, runs.itertuples(), strict=True):
        curve = record["curves"]["eval"]
        if len(curve) < 2 and record["status"] == "finished":
            raise ValueError(
                f"a run of {row.task} was evaluated {len(curve)} times, fewer than 2: give it smaller eval_steps"
            )
        evaluated = [(e["step"], e["accuracy_lossy"]) for e in curve]
        if record["status"] == "not finite":  # its curve ends early; from there on it scores chance
            evaluated.append((record["config"]["max_steps"], row.majority_share))
        steps, accuracy = np.array([(0, row.majority_share), *evaluated], dtype=float).T
        reached = _first_held(steps, accuracy, target[str(row.task)])
        rows.append(
            {"task": row.task, "loss_rate": row.loss_rate, "seed": row.seed, "steps": reached, "last_step": steps[-1]}
        )
    return pd.DataFrame(rows)


def _first_held(steps: np.ndarray, accuracy: np.ndarray, target: float) -> float:
    """Return the interpolated step at which accuracy first reaches and holds the target, or NaN."""
    reached = accuracy >= target
    held = np.flatnonzero(reached & np.append(reached[1:], True))
    if not len(held):
        return float("nan")
    first = int(held[0])
    if first == 0:
        raise ValueError(f"target = {target:g} is not above an untrained model's accuracy: give a higher one")
    # the evaluation before does not hold the target, so it is below it
    return float(np.interp(target, accuracy[first - 1 : first + 1], steps[first - 1 : first + 1]))


def step_ratios(steps: pd.DataFrame) -> pd.DataFrame:
    """Divide the steps of each lossy run by those of the lossless run with its seed.

    Args:
        steps: from `steps_to_accuracy`. Seeds whose lossless run never reaches the target are left out.

    Returns:
        One row for each task and loss rate: `seeds` (pairs), `never` (pairs whose lossy run never reaches the target),
        and `ratio`, `low`, `high`, the geometric mean with Student's interval on logarithms. Rate 0 has ratio 1.

        A run that never reaches the target counts with its last step. Then `ratio` is a lower bound, `high` is
        infinite, and `low` is the smallest of the S seeds' ratios. The median is below it with probability 2^-S (sign
        test). With fewer than `SIGN_TEST_SEEDS` seeds, `low` is 0.
    """
    rows = []
    for task, runs in steps.groupby("task", sort=False):
        lossless = runs[runs["loss_rate"] == 0].set_index("seed")["steps"].dropna()
        one = {"ratio": 1.0, "low": 1.0, "high": 1.0}
        rows.append({"task": task, "loss_rate": 0.0, "seeds": len(lossless), "never": 0, **one})
        for rate, lossy in runs[runs["loss_rate"] > 0].groupby("loss_rate"):
            ours = lossy[lossy["seed"].isin(lossless.index)].set_index("seed")
            if ours.empty:
                continue
            never = int(ours["steps"].isna().sum())
            ratios = ours["steps"].fillna(ours["last_step"]) / lossless[ours.index]
            ratio, low, high = np.exp(t_interval(np.log(ratios.to_numpy(dtype=float))))
            if never:
                low, high = ratios.min() if len(ratios) >= SIGN_TEST_SEEDS else 0.0, np.inf
            interval = {"ratio": ratio, "low": low, "high": high}
            rows.append({"task": task, "loss_rate": rate, "seeds": len(ours), "never": never, **interval})
    return pd.DataFrame(rows)


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
    both = step_times[step_times["transport"] != BEST_EFFORT].merge(
        losing.drop(columns="transport"), on=setting, suffixes=("", "_losing")
    )
    ours, best_effort_s = both["seconds"], both["seconds_losing"]
    losing_s = best_effort_share * best_effort_s + (1 - best_effort_share) * ours
    price = ours / losing_s
    relative = np.hypot(both["standard_error"] / ours, both["standard_error_losing"] / best_effort_s)
    relative *= best_effort_share * best_effort_s / losing_s
    kilobytes = both["bandwidth_gbits"] * both["round_trip_us"] / 8
    table = both[["transport", *setting]].assign(kilobytes=kilobytes)
    return table.assign(price=price, standard_error=price * relative)


def price(study: Study) -> dict[str, Any]:
    """Return how many times longer reliable steps take, and when losing beats retransmitting."""
    step_times = pd.read_csv(study.results / "step_times.csv")
    prices = price_of_reliability(step_times)
    table, records = study.complete("01_training")
    ratios = None
    if not table.empty:
        longest = [record for record in records if record["config"]["max_steps"] == table["max_steps"].max()]
        ratios = step_ratios_of_both_phases(longest)
    study.draw(price_against_loss(prices, ratios), "price")
    return {"price": json_rows(prices), "message_bytes": int(step_times["message_bytes"].iloc[0])}


def price_against_loss(price: pd.DataFrame, step_ratios: pd.DataFrame | None = None) -> Figure:
    """Draw the ratios by which reliable steps take longer (lines), and by which lossy runs need more steps (black).

    Losing wins where black lies below a line, retransmitting wins where it lies above.
    There is one panel per transport, and one line for each product of bandwidth and round trip, which sets the price.

    Args:
        price: from `break_even.price_of_reliability`.
        step_ratios: from `break_even.step_ratios`, drawn with 95 % intervals. A hollow mark is a lower bound: some run
            never reached the target.
    """
    transports, products = list(price["transport"].unique()), sorted(price["kilobytes"].unique())
    figure, axes_1T = plt.subplots(
        1, len(transports), figsize=(COLUMN, 2.7), sharex=True, layout="constrained", squeeze=False
    )
    for ax, transport in zip(axes_1T[0], transports, strict=True):
        ours = price["transport"] == transport
        for number, kilobytes in enumerate(products):
            rows = price[ours & (price["kilobytes"] == kilobytes)].drop_duplicates("loss_rate")
            label = f"{kilobytes / 1000:g} MB" if kilobytes >= 1000 else f"{kilobytes:g} kB"
            marker = marker_of(number)
            ax.plot(rows["loss_rate"], rows["price"], marker=marker, color=f"C{number}", label=label, markersize=2.5)
        ax.set_title(transport)
        ax.set_yscale("log")
        loss_rate_axis(ax, price["loss_rate"])
        smallest, largest = 1.0, price.loc[ours, "price"].max()
        if step_ratios is not None:
            smallest = max(0.5, step_ratios["low"].min())
            largest = max(largest, step_ratios["ratio"].max())
            _step_ratios(ax, step_ratios)
        ax.set_ylim(0.8 * smallest, 1.3 * largest)
        ax.set_xlabel("packet loss rate, %")
    axes_1T[0, 0].set_ylabel("reliable / best effort")
    shared_legend(figure, axes_1T[0, 0], title="bandwidth × round trip", max_columns=3)
    return figure


def _step_ratios(ax: Axes, step_ratios: pd.DataFrame) -> None:
    """Plot each task's ratios in black, with intervals."""
    for number, (task, rows) in enumerate(step_ratios[step_ratios["loss_rate"] > 0].groupby("task", sort=False)):
        rate, ratio = rows["loss_rate"].to_numpy(), rows["ratio"].to_numpy()
        marker = MARKERS[::-1][number % len(MARKERS)]  # unlike those of the first lines
        values = rows[["ratio", "low", "high"]].clip(1e-3, 1e6)  # an infinite interval leaves the panel
        estimates(ax, rate, values, number, fmt="none", color="0.15", elinewidth=1, capsize=2)
        ax.plot(
            rate, ratio, linestyle=":", color="0.15", marker=marker, markersize=4, label=f"steps, {task_name(task)}"
        )
        bound = rows["never"].to_numpy() > 0
        ax.plot(rate[bound], ratio[bound], marker, color="0.15", markerfacecolor="white", markersize=4)


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
