"""What do losses cost in pretraining, in the small model and in GPT-2's shape, beside sequence parallelism?"""

import math
from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lossytp.study.statistics import t_interval
from lossytp.study.style import COLUMN
from lossytp.study.tables import LOSSLESS
from paper.study import (
    Claim,
    Results,
    Study,
    claim,
    compare_arms,
    join_differences,
    json_rows,
    label_ends,
    loss_rate_of,
    row_of,
    rows_of,
)

SMALL = "11_pretraining"
GPT2 = ("18_pretraining_gpt2", "18_pretraining_gpt2_jumbo")
BOTH = "losses on both ways"
NETWORKS = {  # the figure's arms and loss rates, with their names in it
    (LOSSLESS, 0.0): LOSSLESS,
    (BOTH, 0.1): "no repair",
    (f"{BOTH} with Hadamard", 0.1): "Hadamard",
    (f"{BOTH} of a sharded stream", 0.1): "sharded",
    (f"{BOTH} in jumbo packets", 0.1): "jumbo packets",
}
WHERE = ["arm", "loss_rate"]
EVALUATIONS = ("clean", "lossy")
OF_RUN = ["loss_rate", "repair", "mtu_bytes", "sequence_parallel", "seed", "warmup_steps"]  # beside a turning point
SMOOTHED = 5  # points of a training curve
DEPARTED = 0.25  # nats above the lossless run
AXES = ("", "_linear")  # of the tokens, on which lossless runs are interpolated: logarithmic, or linear
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)))  # arms differ in grey, too
HIGHEST = 8.2  # nats: all networks share the first steps, which leave the panel


def answer(study: Study) -> dict[str, Any]:
    """Return how many nats losses cost, how many more tokens make up for them, and when training fails.

    Raises:
        ValueError: if no arm of the small model has enough seeds.
    """
    runs = study.arms_with_seeds(SMALL)
    if runs.empty:
        fault = f"no arm of {SMALL} has enough seeds in {study.results}"
        raise ValueError(f"{fault}: run ./run_all.sh {study.profile} first")
    _, table, records = study.runs(SMALL)
    others = [study.runs(name) for name in GPT2]
    shape_runs = pd.concat([each for _, each, _ in others], ignore_index=True)
    shape_records = [record for _, _, each in others for record in each]
    curves = training_curves(shape_runs, shape_records, NETWORKS)
    panels = {"small model": training_curves(table, records, NETWORKS), "GPT-2's shape": curves}
    study.draw(losses_over_steps(panels), "training_losses")
    return {
        "pretraining": json_rows(nats_lost(runs)),
        "pretraining_turns": json_rows(turning_points(records)),
        "pretraining_gpt2": {
            "parameters": shape_records[0]["parameters"],
            "steps": shape_records[0]["config"]["total_steps"],
            "arms": json_rows(nats_lost(study.arms_with_seeds(GPT2[0]))),
            "turns": json_rows(turning_points(shape_records)),
            "departures": json_rows(departures(curves)),
        },
    }


def nats_lost(runs: pd.DataFrame) -> pd.DataFrame:
    """Return what each arm costs against the lossless arm, paired by seed.

    A lossless run on fewer tokens is as good as a lossy one. The arm's `times_tokens` says how many times fewer. It is
    interpolated between the lossless runs of a seed, on a logarithmic axis of tokens. A run that diverged has
    no cross-entropy: rises leave its seed out, and its arm has neither a mean nor `times_tokens`.

    Args:
        runs: one row per run, from `read_experiment`. Arms without losses have several numbers of steps.

    Returns:
        One row per arm: `arm`, `loss_rate`, `repair`, `reliable_gather`, `sequence_parallel`, `seeds`, `tokens`. For
        the evaluation without losses, the mean cross-entropy is `clean_mean`, its rise `clean` with `clean_low`,
        `clean_high` and p-values as in `compare_arms`. `clean_times_tokens` has an interval in
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
        means = rises[[*WHERE, "mean"]].rename(columns={"mean": f"{evaluation}_mean"})
        found = found.merge(means, on=WHERE, how="left")
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


def log_slowdown(lossless: "pd.Series[float]", length: float, score: float, *, linear: bool = False) -> float:
    """Return log(`length` / length of the lossless training of equal score); NaN if no lossless scores span `score`.

    Args:
        lossless: the score by length, such as a number of steps; a better score is higher.
        length: the length of the lossy training.
        score: its score.
        linear: interpolates on a linear axis of lengths, not on a logarithmic one.
    """
    reached, lengths = np.maximum.accumulate(lossless.to_numpy()), lossless.index.to_numpy(dtype=float)
    if not reached[0] <= score <= reached[-1]:
        return float("nan")
    if linear:
        return float(np.log(length / np.interp(score, reached, lengths)))
    return float(np.log(length) - np.interp(score, reached, np.log(lengths)))


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
        runs: one row per run, from `read_experiment`.
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
        curves: from `training_curves`; the lossless network is named `LOSSLESS`.

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


def _smooth_curve(record: dict) -> pd.Series:
    """Return the running median of a run's training loss, by step."""
    curve = pd.DataFrame(record["curves"]["train_loss"]).set_index("step")["loss"]
    return curve.rolling(SMOOTHED, center=True, min_periods=1).median()


def losses_over_steps(panels: Mapping[str, pd.DataFrame]) -> Figure:
    """Draw the training loss over the steps: a panel for each model, a style for each network, a line for each seed.

    Losses above `HIGHEST` leave the panel.

    Args:
        panels: from `training_curves`, by the model's name.
    """
    figure, axes_1P = plt.subplots(1, len(panels), figsize=(COLUMN, 1.7), layout="constrained", squeeze=False)
    networks = list(dict.fromkeys(network for curves in panels.values() for network in curves["network"]))
    for ax, (model, curves) in zip(axes_1P[0], panels.items(), strict=True):
        ends = []
        for network, ours in curves.groupby("network", sort=False):
            number = networks.index(str(network))
            color = f"C{number}" if number else "0.2"
            look: dict[str, Any] = {"linestyle": LINES[number % len(LINES)], "color": color, "linewidth": 0.7}
            for _, of_seed in ours.groupby("seed"):
                ax.plot(of_seed["step"], of_seed["loss"], **look)
            last = ours[ours["step"] == ours["step"].max()]
            ends.append((float(last["loss"].mean()), str(network), color))
        ax.set(title=model, xlabel="training steps")
        ax.set_ylim(top=HIGHEST)
        label_ends(ax, ends)
    axes_1P[0, 0].set_ylabel("training loss, nats a token")
    return figure


# Claims.


LOST = ("losses on the way to a sum", 0.1)
BOTH_SPREAD = f"{BOTH} with Hadamard"
BOTH_SHARDED = f"{BOTH} of a sharded stream"
WASTED = {"clean": 1 / 3, "lossy": 2 / 5}  # share of the tokens, by evaluation
FAILED = 0.1  # nats of training loss
GUESSED = {0.01: (0.005, 0.04), 0.03: (0.03, 0.10)}  # nats by loss rate, from predictions/fixed_beforehand.csv


@claim
def pretraining_wastes_tokens(results: Results) -> Claim:
    """Require that about a third of the tokens is wasted without losses in evaluation, and about two fifths with them.

    Means must lie within 0.05 of these shares, and intervals within 0.1.
    """
    row = _arm(results, *LOST)
    numbers: dict[str, float] = {}
    holds = True
    for evaluation, wasted in WASTED.items():
        name = f"{evaluation}_times_tokens"
        low, value, high = (1 - 1 / (row[name + end] or math.inf) for end in ("_low", "", "_high"))  # null: beyond
        holds &= abs(value - wasted) < 0.05 and wasted - 0.1 < low and high < wasted + 0.1
        numbers |= {f"{evaluation}, low": low, evaluation: value, f"{evaluation}, high": high}
    return Claim(holds, numbers)


@claim
def pretraining_fails_over_both_phases(results: Results) -> Claim:
    """Require that pretraining fails at 3 and 10 % loss in both phases, and at 1 % ends a nat higher, on average.

    It must end higher than half of the lossless tokens, and at 3 and 10 % over a nat higher. The intervals must lie
    above both, and so above what was predicted for 10 %.
    """
    (half,) = rows_of(results["pretraining"], arm="no loss in half the steps")
    rows, rarely = {rate: _arm(results, BOTH, rate) for rate in (0.03, 0.1)}, _arm(results, BOTH, 0.01)
    least = max(1.0, half["clean_high"])
    holds = all(row["clean_low"] > least and row["clean_times_tokens"] is None for row in rows.values())
    holds &= all(_fails(_turns(results, rate)) for rate in rows)
    holds &= rarely["clean"] > 1 and rarely["clean_low"] > half["clean_high"]
    numbers = {f"at least, {rate:g}": row["clean_low"] for rate, row in rows.items()}
    return Claim(holds, numbers | {"half of the tokens": half["clean_high"], "one per cent": rarely["clean"]})


@claim
def a_sharded_stream_trains(results: Results) -> Claim:
    """Require that over 10 % loss in both phases a sharded stream does not fail, and costs as the reduce phase does.

    Its mean must lie in the interval of the reduce phase, within 0.05 nats of its mean. It must end lower than half of
    the lossless tokens, and than ranks with their own streams, with Hadamard and without. All these
    intervals must be apart. At 1 % it must end lower still. That rise must be shown only if evaluation loses packets.
    """
    (half,) = rows_of(results["pretraining"], arm="no loss in half the steps")
    rare, often = (_arm(results, BOTH_SHARDED, rate) for rate in (0.01, 0.1))
    others = [_arm(results, BOTH, 0.1), _arm(results, BOTH_SPREAD, 0.1)]
    least = min(half["clean_low"], *(row["clean_low"] for row in others))
    holds = rare["clean_low"] < 0 and rare["clean_high"] < often["clean_low"] and often["clean_high"] < least
    reduce, rarely_reduced = (_arm(results, LOST[0], rate) for rate in (0.1, 0.01))
    holds &= rare["lossy_low"] > 0
    holds &= abs(rare["clean"] - rarely_reduced["clean"]) < 0.01
    holds &= reduce["clean_low"] < often["clean"] < reduce["clean_high"]
    holds &= abs(often["clean"] - reduce["clean"]) < 0.05
    turns = _turns(results, 0.1, sharded=True)
    holds &= len(turns) >= 3 and not any(map(_rises, turns))
    numbers = {"1 %, at most": rare["clean_high"], "10 %, at least": often["clean_low"]}
    return Claim(holds, numbers | {"10 %, at most": often["clean_high"], "others, at least": least})


@claim
def the_shape_of_gpt2_fails_too(results: Results) -> Claim:
    """Require that 10 % loss in both phases costs GPT-2's shape over half a nat, with its interval, and that it fails.

    Each of three seeds must depart from lossless training within 25 steps of step 300.
    """
    row = row_of(results["pretraining_gpt2"]["arms"], arm=BOTH, loss_rate=0.1)
    steps = _departures(results, "no repair")
    holds = row["clean_low"] > 0.5 and _fails(rows_of(results["pretraining_gpt2"]["turns"], mtu_bytes=1500))
    holds &= len(steps) >= 3 and all(abs((step or math.inf) - 300) <= 25 for step in steps)
    return Claim(holds, {"at least": row["clean_low"], "seeds": len(steps)})


@claim
def lower_rates_waste_fewer_tokens(results: Results) -> Claim:
    """Require that 3 and 1 % loss cost nats, with means within the guesses, and waste fewer tokens the lower the rate.

    The intervals of all rates must lie above 0.
    """
    rows = {rate: _arm(results, LOST[0], rate) for rate in (0.01, 0.03, 0.1)}
    holds = all(least < rows[rate]["clean"] < most for rate, (least, most) in GUESSED.items())
    holds &= all(row["clean_low"] > 0 for row in rows.values())
    wasted = {f"wasted at {rate:g}": 1 - 1 / row["clean_times_tokens"] for rate, row in rows.items()}
    holds &= [*wasted.values()] == sorted(wasted.values())
    return Claim(holds, wasted | {"p": rows[0.01]["clean_p_holm"]})


def _arm(results: Results, arm: str, loss_rate: float) -> dict[str, Any]:
    return row_of(results["pretraining"], arm=arm, loss_rate=loss_rate)


def _departures(results: Results, network: str) -> list[int | None]:
    """Return the steps at which the seeds of GPT-2's shape depart from lossless training; None if one does not."""
    return [row["step"] for row in rows_of(results["pretraining_gpt2"]["departures"], network=network)]


def _turns(results: Results, loss_rate: float, *, repair: str = "zero", sharded: bool = False) -> list[dict[str, Any]]:
    """Return where the training loss of the small model turned, for each seed, in both phases."""
    rows = rows_of(results["pretraining_turns"], loss_rate=loss_rate, repair=repair, mtu_bytes=1500)
    return [row for row in rows if row["sequence_parallel"] == sharded]


def _fails(turns: list[dict[str, Any]]) -> bool:
    """Return whether pretraining fails, as the paper defines it: the training loss of each of three seeds rises."""
    return len(turns) >= 3 and all(map(_rises, turns))


def _rises(turn: dict[str, Any]) -> bool:
    """Return whether a seed's training loss ends more than `FAILED` above its least value.

    Lossless training must rise by at least as much less between these two steps.
    """
    rise = turn["last"] - turn["least"]
    return bool(rise > FAILED and rise - turn["lossless_rise"] > FAILED)
