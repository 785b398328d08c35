"""What do losses cost in pretraining, in nats and in tokens?"""

import math
from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lossytp.study.statistics import t_interval
from lossytp.study.style import COLUMN, estimates
from lossytp.study.tables import LOSSLESS
from paper.comparisons import compare_arms, join_differences, json_rows, loss_rate_of
from paper.price import BEST_EFFORT_SHARE, price_of_reliability
from paper.study import MILLION, POINTS, Claim, Results, Study, claim, label_ends, row_of, rows_of
from paper.training_length import log_slowdown

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
        runs: one row per run, from `read_experiment`. Arms without losses have several numbers of steps.

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


def rises_by_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """Return how much higher each lossy run ends than the lossless run of its seed, evaluated without losses.

    Args:
        runs: one row per run, from `read_experiment`. Lossless runs have one number of steps.

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


# Draw what losses cost in pretraining.


LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)))  # arms differ in grey, too
HIGHEST = 8.2  # nats: all networks share the first steps, which leave the panel


def nats_against_tokens(arms: pd.DataFrame) -> Figure:
    """Draw the cross-entropy of pretrained models: a line over tokens without losses, and one mark per lossy arm.

    A dotted line joins each lossy arm to the number of lossless tokens that are as good. Vertical bars are intervals of
    the rise against the lossless runs of the same seeds. Horizontal bars are intervals of that number of tokens.

    Args:
        arms: from `nats_lost`, evaluated without losses.
    """
    figure, ax = plt.subplots(figsize=(COLUMN, 2.0), layout="constrained")
    lossless = arms[arms["loss_rate"] == 0].sort_values("tokens")
    ax.plot(lossless["tokens"] / MILLION, lossless["clean_mean"], color="0.2", marker="o", markersize=3)
    ends = [(float(lossless["clean_mean"].iloc[-1]), LOSSLESS, "0.2")]
    lossy = arms[arms["loss_rate"] > 0]
    for number, row in enumerate(lossy.to_dict("records")):
        color, mean = f"C{number}", row["clean_mean"]
        tokens = row["tokens"] / MILLION
        low, high = (mean + row[f"clean_{end}"] - row["clean"] for end in ("low", "high"))
        estimates(ax, [tokens], [[mean, low, high]], number + 1, color=color, markersize=4)
        if np.isfinite(row["clean_times_tokens"]):
            as_good = [tokens / row[f"clean_times_tokens{end}"] for end in ("", "_low", "_high")]
            ax.plot([as_good[0], tokens], [mean, mean], color=color, linewidth=0.8, linestyle=":")
            estimates(ax, [mean], [as_good], number, across=True, fmt="none")
        ends.append((float(mean), _network(row), color))
    ax.set_xscale("log")
    ax.set_xticks(ticks := sorted(lossless["tokens"] / MILLION), [f"{each:.3g}" for each in ticks])
    ax.minorticks_off()
    ax.set(xlabel="tokens of pretraining, millions", ylabel="cross-entropy, nats a token")
    label_ends(ax, ends)
    return figure


def _network(row: Mapping[Any, Any]) -> str:
    """Return the loss rate, the phases and the repair of an arm."""
    phases = "reduce phase" if row["reliable_gather"] else "both phases"
    phases += ",\nsharded stream" if row["sequence_parallel"] else ""
    name = f"{POINTS * row['loss_rate']:g} %, {phases}"
    return name if row["repair"] == "zero" else f"{name},\n{row['repair']}"


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


def pretraining(study: Study) -> dict[str, Any]:
    """Return how many nats losses cost in pretraining, and how many more tokens make up for them."""
    runs = study.arms_with_seeds(SMALL)
    if runs.empty or LOSSLESS not in set(runs["arm"]):
        return {}
    arms = nats_lost(runs)
    as_good = arms["clean_times_tokens"].notna()  # an arm that failed would squeeze the others into a corner
    study.draw(nats_against_tokens(arms[(arms["loss_rate"] == 0) | as_good]), "pretraining")
    step_times = pd.read_csv(study.results / "step_times.csv")
    rows = json_rows(arms)
    for row in rows:
        phases = "reduce" if row["reliable_gather"] else "both"
        row["waiting"] = waiting_times(step_times, loss_rate=row["loss_rate"], phases=phases)
    return {"pretraining": rows, "pretraining_turns": json_rows(turning_points(study.records[SMALL]))}


def pretraining_gpt2(study: Study) -> dict[str, Any]:
    """Return what losses in both phases cost GPT-2's own shape in pretraining, and when its loss departs."""
    enough = study.arms_with_seeds(GPT2[0])
    if enough.empty or LOSSLESS not in set(enough["arm"]):
        return {}
    runs = pd.concat([study.tables[name] for name in GPT2], ignore_index=True)
    records = [record for name in GPT2 for record in study.records[name]]
    small = training_curves(study.tables[SMALL], study.records[SMALL], NETWORKS)
    shape = training_curves(runs, records, NETWORKS)
    study.draw(losses_over_steps({"small model": small, "GPT-2's shape": shape}), "training_losses")
    return {
        "pretraining_gpt2": {
            "parameters": records[0]["parameters"],
            "steps": records[0]["config"]["total_steps"],
            "arms": json_rows(nats_lost(enough)),
            "rises": json_rows(rises_by_seed(runs)),
            "turns": json_rows(turning_points(records)),
            "departures": json_rows(departures(shape)),
        }
    }


# Claims about pretraining under loss.


LOST = ("losses on the way to a sum", 0.1)
SPREAD = "losses on the way to a sum with Hadamard"
BOTH_SPREAD = "losses on both ways with Hadamard"
BOTH_SHARDED = "losses on both ways of a sharded stream"
WASTED = {"clean": 1 / 3, "lossy": 2 / 5}  # share of the tokens, by evaluation
PAYS_UP_TO = 125.0  # kilobytes in flight
PAYS_FROM = 1250.0
FAILED = 0.1  # nats of training loss
GUESSED = {0.01: (0.005, 0.04), 0.03: (0.03, 0.10)}  # nats by loss rate, from predictions/fixed_beforehand.csv


@claim
def pretraining_loses_nats(results: Results) -> Claim:
    """Require that 10 % loss on the way to a sum costs nats, evaluated with losses and without."""
    row = _arm(results, *LOST)
    lows = {name: row[f"{name}_low"] for name in ("clean", "lossy")}
    return Claim(min(lows.values()) > 0, lows)


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
    """Require that pretraining fails at 3 and 10 % loss in both phases.

    It must end over a nat higher, and higher than half of the lossless tokens. The intervals must lie above both, and
    so above what was predicted for 10 %.
    """
    (half,) = rows_of(results["pretraining"], arm="no loss in half the steps")
    rows = {rate: _arm(results, BOTH, rate) for rate in (0.03, 0.1)}
    least = max(1.0, half["clean_high"])
    holds = all(row["clean_low"] > least and row["clean_times_tokens"] is None for row in rows.values())
    holds &= all(_fails(_turns(results, rate)) for rate in rows)
    numbers = {f"at least, {rate:g}": row["clean_low"] for rate, row in rows.items()}
    return Claim(holds, numbers | {"half of the tokens": half["clean_high"]})


@claim
def one_per_cent_over_both_phases_wastes_half(results: Results) -> Claim:
    """Require that 1 % loss in both phases does not fail, and ends higher than half of the lossless tokens.

    The intervals must be apart.
    """
    (half,) = rows_of(results["pretraining"], arm="no loss in half the steps")
    row = _arm(results, BOTH, 0.01)
    numbers = {"at least": row["clean_low"], "half of the tokens": half["clean_high"]}
    return Claim(row["clean_low"] > half["clean_high"] and _succeeds(_turns(results, 0.01)), numbers)


@claim
def training_diverges_as_the_rate_rises(results: Results) -> Claim:
    """Require that over 10 % loss in both phases each seed's training loss is least before the end of the warm-up.

    It must end higher than that.
    """
    rows = _turns(results, 0.1)
    holds = len(rows) >= 3 and all(row["step"] <= row["warmup_steps"] and row["last"] > row["least"] for row in rows)
    return Claim(holds, {f"seed {row['seed']}, least at step": row["step"] for row in rows})


@claim
def hadamard_softens_the_failure(results: Results) -> Claim:
    """Require that over 10 % loss in both phases, Hadamard lowers the rise, with intervals apart.

    It must not fail. The mean rise must be above that of half of the lossless tokens, with its interval, but the
    interval of the rise must reach below.
    """
    (half,) = rows_of(results["pretraining"], arm="no loss in half the steps")
    bare, spread = _arm(results, BOTH, 0.1), _arm(results, BOTH_SPREAD, 0.1)
    holds = half["clean_high"] < spread["clean"] and spread["clean_high"] < bare["clean_low"]
    holds &= spread["clean_low"] < half["clean"] and _succeeds(_turns(results, 0.1, repair="hadamard(64)"))
    numbers = {"rise": spread["clean"], "at most": spread["clean_high"], "half of the tokens": half["clean_high"]}
    return Claim(holds, numbers | {"bare, at least": bare["clean_low"]})


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
    holds &= _succeeds(turns) and not any(map(_rises, turns))
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
def larger_packets_fail_sooner(results: Results) -> Claim:
    """Require that over packets of 9000 bytes both seeds depart from lossless training in less than half the steps.

    Both must end more than half a nat higher than the lossless run.
    """
    usual, large = (_departures(results, network) for network in ("no repair", "jumbo packets"))
    rises = [row["clean"] for row in rows_of(results["pretraining_gpt2"]["rises"], arm=f"{BOTH} in jumbo packets")]
    latest, earliest = max(step or math.inf for step in large), min(step or math.inf for step in usual)
    holds = len(large) >= 2 and latest < earliest / 2 and min(rises) > 0.5
    return Claim(holds, {"usual, earliest": earliest, "large, latest": latest, "rise, at least": min(rises)})


@claim
def sharding_helps_less_in_fine_tuning(results: Results) -> Claim:
    """Require that with sequence parallelism, losses in both phases cost more than in the reduce phase, in both tasks.

    The intervals must be apart.
    """
    falls = results["comparisons"]["03_algorithms"]
    pairs = [
        (sharded["high"], reduce["low"])  # differences of accuracy, so falls are negative
        for sharded in rows_of(falls, arm="sequence-parallel, both phases")
        for reduce in rows_of(falls, arm="direct, 4 ranks", task=sharded["task"])
    ]
    margins = [reduce - sharded for sharded, reduce in pairs]
    return Claim(len(margins) == 2 and min(margins) > 0, {"least margin": min(margins)})


@claim
def hadamard_recovers_some_in_pretraining(results: Results) -> Claim:
    """Require that Hadamard lowers the rise at 10 % loss by less than half, with intervals apart."""
    bare, spread = _arm(results, *LOST), _arm(results, SPREAD, LOST[1])
    share = 1 - spread["clean"] / bare["clean"]
    holds = spread["clean_high"] < bare["clean_low"] and 0 < share < 0.5
    return Claim(holds, {"share recovered": share, "bare, at least": bare["clean_low"], "spread": spread["clean_high"]})


@claim
def lower_rates_waste_fewer_tokens(results: Results) -> Claim:
    """Require that 3 and 1 % loss cost nats, with means within the guesses, and waste fewer tokens the lower the rate.

    The intervals of all rates must lie above 0.
    """
    rows = {rate: _arm(results, LOST[0], rate) for rate in (0.01, 0.03, 0.1)}
    holds = all(least < rows[rate]["clean"] < most for rate, (least, most) in GUESSED.items())
    holds &= all(row["clean_low"] > 0 for row in rows.values())
    wasted = {f"wasted at {rate:g}": 1 - 1 / row["clean_times_tokens"] for rate, row in rows.items()}
    return Claim(holds and [*wasted.values()] == sorted(wasted.values()), wasted)


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


def _succeeds(turns: list[dict[str, Any]]) -> bool:
    """Return whether there are three seeds, and pretraining does not fail."""
    return len(turns) >= 3 and not all(map(_rises, turns))


def _rises(turn: dict[str, Any]) -> bool:
    """Return whether a seed's training loss ends more than `FAILED` above its least value.

    Lossless training must rise by at least as much less between these two steps.
    """
    rise = turn["last"] - turn["least"]
    return bool(rise > FAILED and rise - turn["lossless_rise"] > FAILED)
