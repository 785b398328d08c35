"""When losing beats retransmitting: more steps of the time of few, or as few as without losses, each of which waits.

Time to accuracy is steps to accuracy x seconds a step. Reliable transport needs the steps of a run without losses, best
effort those of a run at that loss rate (`step_ratios`, from records) and hardly the time a step of none
(`lossytp.study.step_times`). The two are measured apart and meet in `break_even`.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from lossytp.study.records import tidy
from lossytp.study.statistics import t_interval
from lossytp.study.step_times import BEST_EFFORT

SHARE = 0.9  # of what a run without losses gains over answering with the most frequent class
SIGN_TEST_SEEDS = 5  # whose smallest is a one-sided bound of 97 %
NETWORK = ["bandwidth_gbits", "round_trip_us"]
BEST_EFFORT_SHARE = {"both": 1.0, "reduce": 0.5}  # of the messages, by the phases that lose packets


def by_phases(records: list[dict], step_times: pd.DataFrame) -> tuple[dict[str, pd.DataFrame], dict[str, pd.DataFrame]]:
    """`step_ratios`, and `winners` of `break_even`, by the phases that lose packets, "both" and "reduce".

    Args:
        records: runs of one length that lose nothing, lose packets of the reduce phase, and lose them of both.
        step_times: from `step_times.step_times`.
    """
    ratios, won = {}, {}
    for phases, share in BEST_EFFORT_SHARE.items():
        runs = [
            record
            for record in records
            if record["config"]["loss_rate"] == 0 or record["config"]["reliable_gather"] is (phases == "reduce")
        ]
        ratios[phases] = step_ratios(steps_to_accuracy(runs, targets(records)))
        won[phases] = winners(break_even(step_times, ratios[phases], best_effort_share=share))
    return ratios, won


def targets(records: list[dict], share: float = SHARE) -> dict[str, float]:
    """By task the accuracy to be reached: chance, and `share` of the mean gain over it at the end without losses.

    Not one point below the end: while the learning rate falls, accuracy rises to the last step, and runs would differ
    in their last few steps alone. A target below is reached with steps to spare, which a run with losses can take.
    """
    found = {}
    for task, runs in tidy(records).groupby("task", sort=False):
        lossless = runs[runs["loss_rate"] == 0]
        if lossless.empty:
            raise ValueError(f"{task} has no run without losses: its target is a share of what such runs reach")
        chance = float(lossless["majority_share"].iloc[0])
        found[str(task)] = chance + share * (float(lossless["accuracy_lossy"].mean()) - chance)
    return found


def steps_to_accuracy(records: list[dict], target: dict[str, float]) -> pd.DataFrame:
    """When each run reaches its task's accuracy: `task`, `loss_rate`, `seed`, `steps` (NaN: never), `last_step`.

    Reached is a target when an evaluation and the next one are not below it; the last evaluation has no next one.
    Between evaluations, and from chance at step 0, accuracy is interpolated linearly. ValueError where two records are
    of one task, rate and seed, or a record has one evaluation only.

    Runs of one length are compared, whose learning rate falls alike: a run planned to end at the target would decay,
    and reach it, earlier, with losses or without.
    """
    runs = tidy(records)[["task", "loss_rate", "seed", "majority_share"]]
    twice = runs[runs.duplicated(["task", "loss_rate", "seed"])]
    if len(twice):
        first = twice.iloc[0]
        raise ValueError(
            f"two runs of {first['task']} at {first['loss_rate']:g}, seed {first['seed']}: give one process's"
        )
    rows = []
    for record, row in zip(records, runs.itertuples(), strict=True):
        curve = record["curves"]["eval"]
        if len(curve) < 2 and record["status"] == "finished":
            raise ValueError(f"a run of {row.task} was evaluated {len(curve)} times: give it eval_steps")
        evaluated = [(e["step"], e["accuracy_lossy"]) for e in curve]
        if record["status"] == "not finite":  # its curve ends there, and from then on it answers by chance
            evaluated.append((record["config"]["max_steps"], row.majority_share))
        steps, accuracy = np.array([(0, row.majority_share), *evaluated], dtype=float).T
        reached = _first_held(steps, accuracy, target[str(row.task)])
        rows.append(
            {"task": row.task, "loss_rate": row.loss_rate, "seed": row.seed, "steps": reached, "last_step": steps[-1]}
        )
    return pd.DataFrame(rows)


def _first_held(steps: np.ndarray, accuracy: np.ndarray, target: float) -> float:
    reached = accuracy >= target
    held = np.flatnonzero(reached & np.append(reached[1:], True))
    if not len(held):
        return float("nan")
    first = int(held[0])
    if first == 0:
        raise ValueError(f"target = {target:g} is what an untrained model reaches: give a higher one")
    # not held by the evaluation before, which is hence below the target
    return float(np.interp(target, accuracy[first - 1 : first + 1], steps[first - 1 : first + 1]))


def step_ratios(steps: pd.DataFrame) -> pd.DataFrame:
    """How many times the steps of the same seed without losses a run needs, by task and loss rate.

    Args:
        steps: from `steps_to_accuracy`.

    Returns `task`, `loss_rate`, `seeds` (pairs), `never` (pairs of which the run with losses does not get there),
    `ratio`, `low`, `high`: the geometric mean, and Student's interval on logarithms. A run that never gets there needs
    more than its last step: with any, `ratio` is a lower bound and `high` infinite, and `low` is the smallest of the
    seeds' ratios, below which the median is with probability 2^-S (the sign test), if there are `SIGN_TEST_SEEDS`,
    else 0. Rate 0 is 1. Seeds whose run without losses does not get there are left out.
    """
    rows = []
    for task, runs in steps.groupby("task", sort=False):
        lossless = runs[runs["loss_rate"] == 0].set_index("seed")["steps"].dropna()
        rows.append({"task": task, "loss_rate": 0.0, "seeds": len(lossless), "never": 0})
        rows[-1] |= {"ratio": 1.0, "low": 1.0, "high": 1.0}
        for rate, lossy in runs[runs["loss_rate"] > 0].groupby("loss_rate"):
            ours = lossy[lossy["seed"].isin(lossless.index)].set_index("seed")
            if ours.empty:
                continue
            never = int(ours["steps"].isna().sum())
            ratios = ours["steps"].fillna(ours["last_step"]) / lossless[ours.index]
            ratio, low, high = np.exp(t_interval(np.log(ratios.to_numpy(dtype=float))))
            if never:
                low, high = ratios.min() if len(ratios) >= SIGN_TEST_SEEDS else 0.0, np.inf
            rows.append({"task": task, "loss_rate": rate, "seeds": len(ours), "never": never})
            rows[-1] |= {"ratio": ratio, "low": low, "high": high}
    return pd.DataFrame(rows)


def price_of_reliability(
    step_times: pd.DataFrame, compute_share: float = 0.0, *, best_effort_share: float = 1.0
) -> pd.DataFrame:
    """How many times longer a step takes if all is to arrive, by setting: losing may cost so many times the steps.

    Args:
        step_times: from `step_times.step_times`, with the rate 0.
        compute_share: of a step without losses, what is computed and not sent, and takes the same time everywhere.
        best_effort_share: of the messages, which a loser sends best effort, and the others reliably: 1/2 where only
            the reduce phase may lose packets, whose messages the gather phase's follow, as many and as long.

    Returns `transport` (the reliable ones), `bandwidth_gbits`, `round_trip_us`, `loss_rate`, `price`, `standard_error`.
    """
    setting = [*NETWORK, "loss_rate"]
    losing = step_times[step_times["transport"] == BEST_EFFORT]
    lossless = losing[losing["loss_rate"] == 0].set_index(NETWORK)["seconds"].rename("lossless_s")
    both = step_times[step_times["transport"] != BEST_EFFORT].merge(
        losing.drop(columns="transport"), on=setting, suffixes=("", "_losing")
    )
    both = both.join(lossless, on=NETWORK)
    compute_s = compute_share / (1 - compute_share) * both["lossless_s"]
    ours, best_effort_s = compute_s + both["seconds"], compute_s + both["seconds_losing"]
    losing_s = best_effort_share * best_effort_s + (1 - best_effort_share) * ours
    price = ours / losing_s
    relative = np.hypot(both["standard_error"] / ours, both["standard_error_losing"] / best_effort_s)
    relative *= best_effort_share * best_effort_s / losing_s
    return both[["transport", *setting]].assign(price=price, standard_error=price * relative)


def break_even(
    step_times: pd.DataFrame,
    step_ratios: pd.DataFrame,
    *,
    best_effort_share: float,
    compute_shares: Sequence[float] = (0.0, 0.5),
) -> pd.DataFrame:
    """Seconds to accuracy of best effort over those of reliable transport: below 1 losing wins.

    Args:
        step_times: from `step_times.step_times`.
        step_ratios: from the function of that name. Logarithms are interpolated linearly in the rate between its rates;
            rates beyond are left out.
        best_effort_share: of the messages, which the runs with losses sent best effort: 1, or 1/2 where only the
            reduce phase lost packets.
        compute_shares: of a step without losses, what is computed and not sent.

    Returns a row for each task, compute share and setting: what `price_of_reliability` gives, and `steps_ratio`,
    `time_ratio`, `low`, `high` (the interval of the steps ratio; the price's error is small beside it), `at_least`
    (whether some run never gets there, so that the ratios are lower bounds), and `winner`: "losing" or "retransmitting"
    where the interval says so, else "open".
    """
    tables = []
    for task, ratios in step_ratios.sort_values("loss_rate").groupby("task", sort=False):
        rates = ratios["loss_rate"].to_numpy()
        for share in compute_shares:
            table = price_of_reliability(step_times, share, best_effort_share=best_effort_share)
            table = table[table["loss_rate"] <= rates[-1]]
            rate = table["loss_rate"].to_numpy()
            with np.errstate(divide="ignore"):  # one seed's interval begins at 0
                steps, low, high = (
                    np.exp(np.interp(rate, rates, np.log(ratios[name].to_numpy()))) for name in ("ratio", "low", "high")
                )
            price = table["price"].to_numpy()
            table.insert(0, "task", task)
            table.insert(1, "compute_share", share)
            winner = np.select([high < price, low > price], ["losing", "retransmitting"], "open")
            tables.append(
                table.assign(
                    steps_ratio=steps,
                    time_ratio=steps / price,
                    low=low / price,
                    high=high / price,
                    at_least=np.interp(rate, rates, ratios["never"].to_numpy()) > 0,
                    winner=winner,
                )
            )
    return pd.concat(tables, ignore_index=True)


def winners(table: pd.DataFrame) -> pd.DataFrame:
    """In how many of the products of bandwidth and round trip, on which alone they depend, each wins.

    Args:
        table: from `break_even`.

    A row for each task, transport, compute share and loss rate; columns `losing`, `retransmitting` and `open`.
    """
    where = ["task", "transport", "compute_share", "loss_rate"]
    product = (table["bandwidth_gbits"] * table["round_trip_us"]).rename("product")
    distinct = table.assign(product=product).drop_duplicates([*where, "product"])
    counts = distinct.groupby([*where, "winner"], sort=False).size().unstack(fill_value=0)
    return counts.reindex(columns=["losing", "retransmitting", "open"], fill_value=0).reset_index()
