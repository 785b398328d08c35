"""Answer what losses cost in pretraining: in nats, and in tokens."""

import numpy as np
import pandas as pd

from lossytp.study.analysis.break_even import BEST_EFFORT_SHARE, price_of_reliability
from lossytp.study.analysis.training_length import log_slowdown
from lossytp.study.comparisons import compare_arms, join_differences
from lossytp.study.records import LOSSLESS, loss_rate_of
from lossytp.study.statistics import t_interval

WHERE = ["arm", "loss_rate"]
EVALUATIONS = ("clean", "lossy")
OF_RUN = ["loss_rate", "repair", "mtu_bytes", "sequence_parallel", "seed", "warmup_steps"]  # beside a turning point
SMOOTHED = 5  # points of a training curve
DEPARTED = 0.25  # nats above the lossless run
AXES = ("", "_linear")  # of the tokens, on which lossless runs are interpolated: logarithmic, or linear


def nats_lost(runs: pd.DataFrame) -> pd.DataFrame:
    """Return what each arm costs against the lossless arm, paired by seed.

    A lossless run on fewer tokens is as good as a lossy one. The arm's `times_tokens` says how many times fewer. It is
    interpolated between the lossless runs of a seed, on a logarithmic axis of tokens. A run that diverged has
    no cross-entropy: rises leave its seed out, and its arm has neither a mean nor `times_tokens`.

    Args:
        runs: one row per run, from `records.read_experiment`. Arms without losses have several numbers of steps.

    Returns:
        One row per arm: `arm`, `loss_rate`, `repair`, `reliable_gather`, `sequence_parallel`, `seeds`, `tokens`. For
        the evaluation without losses, the mean cross-entropy is `clean_mean`, its rise `clean` with `clean_low`,
        `clean_high` and p-values as in `comparisons.drops_and_gains`. `clean_times_tokens` has an interval in
        `clean_times_tokens_low` and `clean_times_tokens_high`; on a linear axis it is `clean_times_tokens_linear`. It
        is missing for the whole arm if the arm's run of any seed diverged, is worse than the seed's shortest lossless
        run, or is better than all of the seed's lossless runs. The same columns exist for `lossy`.
    """
    runs = runs.assign(tokens=runs["max_steps"] * runs["batch_size"] * runs["block_size"])
    found = runs.drop_duplicates(WHERE)[[*WHERE, "repair", "reliable_gather", "sequence_parallel", "tokens"]]
    for evaluation in EVALUATIONS:
        outcome = f"cross_entropy_{evaluation}"
        rises = compare_arms(runs, reference=LOSSLESS, outcome=outcome, within=("task",))
        found = join_differences(found, rises, WHERE, evaluation)
        if "seeds" not in found:
            found = found.merge(rises[[*WHERE, "seeds"]], on=WHERE, how="left")
        found = found.merge(
            rises[[*WHERE, "mean"]].rename(columns={"mean": f"{evaluation}_mean"}), on=WHERE, how="left"
        )
        for axis in AXES:
            times = _times_tokens(runs, outcome, linear=axis == "_linear")
            found = found.merge(times.add_prefix(f"{evaluation}_times_tokens{axis}"), on=WHERE, how="left")
    return found


def _times_tokens(runs: pd.DataFrame, outcome: str, *, linear: bool) -> pd.DataFrame:
    """Return, by arm and loss rate, how many times fewer lossless tokens are as good, as "", "_low" and "_high"."""
    runs = runs.assign(score=-runs[outcome])
    lossless = runs[runs["loss_rate"] == 0].pivot(index="seed", columns="tokens", values="score").dropna()
    rows = []
    for (arm, rate), ours in runs[runs["loss_rate"] > 0].groupby(WHERE, sort=False):
        ours = ours[ours["seed"].isin(lossless.index)]
        runs_of_arm = ours[["seed", "tokens", "score"]].itertuples(index=False, name=None)
        logs = [log_slowdown(lossless.loc[seed], tokens, score, linear=linear) for seed, tokens, score in runs_of_arm]
        value, low, high = np.exp(t_interval(np.array(logs)))
        rows.append({"arm": arm, "loss_rate": rate, "": value, "_low": low, "_high": high})
    return pd.DataFrame(rows, columns=[*WHERE, "", "_low", "_high"]).set_index(WHERE)


def turning_points(records: list[dict]) -> pd.DataFrame:
    """Return where the training loss of runs that lose packets in both phases was least, and where it ended.

    Args:
        records: of pretraining, with their curves of the training loss. Runs without losses have reliable gathers.

    Returns:
        One row per run: `loss_rate`, `repair`, `mtu_bytes`, `sequence_parallel`, `seed`, `warmup_steps`; the `step` at
        which the running median of `SMOOTHED` points of the curve is least; this `least` loss, and the `last` one, in
        nats a token; and `lossless_rise`, by which the lossless run on the same batches rises between these steps. It
        is missing without such a run.
    """
    lossless = {_batches(each["config"]): _smooth_curve(each) for each in records if loss_rate_of(each) == 0}
    rows = []
    for record in records:
        config, smooth = record["config"], _smooth_curve(record)
        if not config["reliable_gather"]:
            row = {name: config[name] for name in OF_RUN} | {"loss_rate": loss_rate_of(record)}
            row |= {"step": smooth.idxmin(), "least": smooth.min(), "last": smooth.iloc[-1]}
            same = lossless.get(_batches(config))
            rise = None if same is None else same.iloc[-1] - same[row["step"]]
            rows.append(row | {"lossless_rise": rise})
    return pd.DataFrame(rows, columns=[*OF_RUN, "step", "least", "last", "lossless_rise"])


def _batches(config: dict) -> tuple[int, int]:
    """Return the settings on which an experiment's batches and their number depend."""
    return config["seed"], config["total_steps"]


def training_curves(runs: pd.DataFrame, records: list[dict], networks: dict[tuple[str, float], str]) -> pd.DataFrame:
    """Return the training loss of some networks' runs over the steps, as running medians of `SMOOTHED` points.

    Args:
        runs: one row per run, from `records.read_experiment`.
        records: of the same runs, in the same order.
        networks: the names of the networks to return, by arm and loss rate.

    Returns:
        One row per run and point, in the order of `networks`: `network`, `seed`, `step`, `loss` in nats a token.
    """
    curves = []
    for where, name in networks.items():
        for arm, rate, seed, record in zip(runs["arm"], runs["loss_rate"], runs["seed"], records, strict=True):
            if (arm, rate) == where:
                curves.append(_smooth_curve(record).reset_index().assign(network=name, seed=seed))
    return pd.concat(curves, ignore_index=True) if curves else pd.DataFrame(columns=["network", "seed", "step", "loss"])


def departures(curves: pd.DataFrame) -> pd.DataFrame:
    """Return the step from which each run's training loss stays `DEPARTED` nats above the lossless run of its seed.

    Both read the same batches, so a passage that is hard to predict moves neither away from the other.

    Args:
        curves: from `training_curves`; the lossless network is named `records.LOSSLESS`.

    Returns:
        One row per lossy run with a lossless run of its seed: `network`, `seed`, and `step`. It is missing if the run
        ends within `DEPARTED` nats.
    """
    by_run = {where: run.set_index("step")["loss"] for where, run in curves.groupby(["network", "seed"], sort=False)}
    rows = []
    for (network, seed), loss in by_run.items():
        if network != LOSSLESS and (LOSSLESS, seed) in by_run:
            close = loss - by_run[LOSSLESS, seed] <= DEPARTED
            after = close[::-1].cummax()[::-1]  # whether this point or a later one is close
            step = None if close.iloc[-1] else int(after.index[~after][0])
            rows.append({"network": network, "seed": seed, "step": step})
    return pd.DataFrame(rows, columns=["network", "seed", "step"])


def rises_by_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """Return how much higher each lossy run ends than the lossless run of its seed, evaluated without losses.

    Args:
        runs: one row per run, from `records.read_experiment`. Lossless runs have one number of steps.

    Returns:
        One row per lossy run: `arm`, `loss_rate`, `mtu_bytes`, `seed`, `clean` in nats a token.
    """
    lossless = runs[runs["arm"] == LOSSLESS].set_index("seed")["cross_entropy_clean"]
    lossy = runs[runs["loss_rate"] > 0]
    rises = lossy["cross_entropy_clean"] - lossy["seed"].map(lossless)
    return lossy[["arm", "loss_rate", "mtu_bytes", "seed"]].assign(clean=rises)


def _smooth_curve(record: dict) -> pd.Series:
    """Return the running median of a run's training loss, by step."""
    curve = pd.DataFrame(record["curves"]["train_loss"]).set_index("step")["loss"]
    return curve.rolling(SMOOTHED, center=True, min_periods=1).median()


def waiting_times(step_times: pd.DataFrame, *, loss_rate: float, phases: str) -> list[dict[str, float]]:
    """Return how many times longer steps take if lost packets are sent again, by the amount of data in flight.

    Waiting reaches the same cross-entropy sooner where this is below the arm's `times_tokens`. Steps are all
    communication, which favours losing: waiting for retransmissions then costs most.

    Args:
        step_times: from `step_times.step_times`.
        loss_rate: one of its loss rates.
        phases: "reduce" or "both", the phases that may lose packets.

    Returns:
        For each bandwidth times round trip, in ascending order, its `kilobytes` and the `times` with selective repeat.
    """
    prices = price_of_reliability(step_times, best_effort_share=BEST_EFFORT_SHARE[phases])
    prices = prices[(prices["loss_rate"] == loss_rate) & (prices["transport"] == "selective repeat")]
    times = prices.groupby("kilobytes")["price"].first()
    return [{"kilobytes": float(each), "times": float(price)} for each, price in times.items()]  # type: ignore[arg-type]
