"""What do losses cost a pretrained real model, in inference and after training under loss?"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lossytp.network.repairs import repair_named
from lossytp.study.statistics import share_interval, t_interval
from lossytp.study.style import COLUMN, estimates, marker_of, shared_legend
from lossytp.study.tables import LOSSLESS
from lossytp.tolerance import COLLAPSE_NATS
from paper.comparisons import json_rows, loss_rate_of
from paper.study import POINTS, USUAL, Claim, Results, Study, claim, real_row, row_of, rows_of
from paper.timing import round_trips

NETWORK = ["algorithm", "phase", "loss_rate"]
FITTED = (0.03, 0.1)  # loss rates of the usual network through which the law of the median block goes


def rises(folder: Path) -> pd.DataFrame:
    """Return the rows of all tolerance records below a folder.

    Returns:
        Columns `model_name`, `ranks`, `losses` ("single", "bursts of 8" or another loss type), `algorithm`, `phase`,
        `repair`, `loss_rate`, `draws`, `blocks`, the `packets` of a draw, and the `lossless` cross-entropy. Then the
        `rise` in nats a token, with Student's 95 % interval over draws as `low` and `high`; the rise of the `median`
        block, the `smallest` and the `largest`; and `collapsed`, the share of blocks that rise by more than
        `COLLAPSE_NATS`, with its binomial interval as `collapsed_low` and `collapsed_high`.

    Raises:
        ValueError: if a record lacks what a tolerance record has.
    """
    rows: list[dict[str, Any]] = []
    for file in sorted(folder.rglob("tolerance.json")):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            shared = {"model_name": record["config"]["model_name"], "ranks": record["tensor_parallel_size"]}
            shared |= {"losses": _losses(record["config"]), "lossless": record["lossless_cross_entropy"]}
            rows += [shared | _row(row) for row in record["rows"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not a tolerance record ({error!r}): measure it again") from error
    return pd.DataFrame(rows)


def usual(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `rises` that lose single packets of the reduce phase in a direct exchange."""
    return table[(table[list(USUAL)] == pd.Series(USUAL)).all(axis=1)]


def repaired(table: pd.DataFrame) -> pd.DataFrame:
    """Return the usual network's rows at the loss rates at which repairs were tried."""
    ours = usual(table)
    return ours[ours["loss_rate"].isin(ours.loc[ours["repair"] != "zero", "loss_rate"])]


def predict_medians(errors: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """Predict the median block's rise over unrepaired networks, from the errors of their sums.

    A power law goes through the usual network's medians at the loss rates `FITTED`.

    Args:
        errors: one row per network: algorithm, phase, loss_rate, and `squared_error` and `stream_error` of
            `paper.sums`.
        measured: from `rises`, with these two rates.

    Returns:
        The errors, with `median_by_squared_error` and `median_by_stream_error`, in nats a token.
    """
    known = usual(measured).query("repair == 'zero'").set_index("loss_rate")["median"]
    ours = errors[(errors["algorithm"] == "direct") & (errors["phase"] == "reduce")].set_index("loss_rate")
    predicted = errors.copy()
    for name in ("squared_error", "stream_error"):
        predicted[f"median_by_{name}"] = _through_fitted(known, ours[name], errors[name])
    return predicted


def times_law(table: pd.DataFrame, errors: pd.DataFrame) -> pd.DataFrame:
    """Return the median block's rise over the law's prediction, for networks that lose single packets.

    Args:
        table: from `rises`.
        errors: one row per network and repair, as for `predict_medians`.

    Returns:
        The rows of both, with `times_law`. Repairs that remember earlier messages may have none, because
        `paper.sums` measures single sums.

    Raises:
        ValueError: if another row has no errors.
    """
    single = table[table["losses"] == USUAL["losses"]]
    key = [*NETWORK, "repair"]
    joined = single.merge(errors, on=key, how="left", validate="one_to_one", indicator="found")
    missing = joined["found"] == "left_only"
    excused = joined["repair"].map(lambda repair: repair_named(repair).remembers)
    unknown = joined[missing & ~excused]
    if len(unknown):
        algorithm, phase, rate, repair = unknown[key].iloc[0]
        raise ValueError(
            f"{algorithm}, {phase}, loss rate {rate:g}, {repair} was measured, but the errors of its sums were not: "
            "run notebooks/17_real_model.ipynb again"
        )
    joined = joined[~missing].drop(columns="found").reset_index(drop=True)
    bare = usual(joined).query("repair == 'zero'").set_index("loss_rate")
    law = _through_fitted(bare["median"], bare["stream_error"], joined["stream_error"])
    return joined.assign(times_law=joined["median"] / law)


def _through_fitted(medians: pd.Series, errors: pd.Series, x: pd.Series) -> pd.Series:
    """Return the power law at `x` that goes through the medians and errors, both by loss rate, at `FITTED`."""
    less, more = FITTED
    exponent = np.log(medians[more] / medians[less]) / np.log(errors[more] / errors[less])
    return medians[more] * (x / errors[more]) ** exponent


def against_predicted(table: pd.DataFrame, predicted: pd.DataFrame) -> pd.DataFrame:
    """Return the unrepaired networks that were predicted, with what was measured.

    Args:
        table: from `rises`.
        predicted: from `predict_medians`.

    Returns:
        The predicted rows with `median`, `rise`, `low`, `high` and `collapsed`; `fitted` says whether the law goes
        through the row. For comparison, `median_by_loss_rate` comes from a power law of the loss rate alone.

    Raises:
        ValueError: if a predicted network was not measured.
    """
    bare = table[(table["repair"] == "zero") & (table["losses"] == USUAL["losses"])]
    wanted = [*NETWORK, "median", "rise", "low", "high", "collapsed"]
    joined = predicted.merge(bare[wanted], on=NETWORK, validate="one_to_one", how="left")
    if joined["median"].isna().any():
        algorithm, phase, rate = joined.loc[joined["median"].isna(), NETWORK].iloc[0]
        raise ValueError(
            f"{algorithm}, {phase}, loss rate {rate:g} was predicted, but not measured: run 17_real_model.ipynb"
        )
    fitted = joined["loss_rate"].isin(FITTED) & (joined["algorithm"] == "direct") & (joined["phase"] == "reduce")
    known = joined[fitted].set_index("loss_rate")["median"]
    by_rate = _through_fitted(known, pd.Series(FITTED, FITTED), joined["loss_rate"])
    return joined.assign(fitted=fitted, median_by_loss_rate=by_rate)


def _losses(config: dict[str, Any]) -> str:
    if config.get("mean_burst_packets") is not None:
        return f"bursts of {config['mean_burst_packets']:g}"
    return "single" if config.get("loss_type", "ber") == "ber" else str(config["loss_type"])


def _row(row: dict[str, Any]) -> dict[str, Any]:
    rises_SN = np.array(row["rises"])
    estimate = t_interval(rises_SN.mean(axis=1))
    collapsed = share_interval(int((rises_SN > COLLAPSE_NATS).sum()), rises_SN.size)
    return {
        **{name: row[name] for name in ("algorithm", "phase", "repair", "loss_rate")},
        "draws": len(rises_SN),
        "blocks": rises_SN.shape[1],
        "packets": row["packets_a_draw"],
        "rise": estimate.value,
        "median": float(np.median(rises_SN)),
        "low": estimate.low,
        "high": estimate.high,
        "smallest": float(rises_SN.min()),
        "largest": float(rises_SN.max()),
        "collapsed": collapsed.value,
        "collapsed_low": collapsed.low,
        "collapsed_high": collapsed.high,
    }


def strongest_packet(file: Path) -> dict[str, Any]:
    """Summarise what it costs to lose one packet of one sum: the strongest, and others.

    Args:
        file: a table of `paper.sums.by_norm`, for one layer and module.

    Returns:
        `layer`, `module`, `blocks`; `norm` of the strongest packet, the mean over blocks, and `usual_norm`, the largest
        of a packet below the strongest tenth; `rise` if the strongest is lost, its mean over blocks, and
        `least_rise`; and `usual_rise`, the largest if one of the usual packets is lost. Rises are in nats a token.
    """
    table = pd.read_csv(file)
    strongest, usual = table[table["bin"] == "strongest"], table[table["bin"] == "rest"]
    return {
        "layer": int(table["layer"].iloc[0]),
        "module": str(table["module"].iloc[0]),
        "blocks": int(table["block"].nunique()),
        "norm": float(strongest["norm"].mean()),
        "usual_norm": float(usual["norm"].max()),
        "rise": float(strongest["rise"].mean()),
        "least_rise": float(strongest["rise"].min()),
        "usual_rise": float(usual["rise"].max()),
    }


# Say what training under loss changes in a real model, from the table of `train_and_measure`.


NOTHING, BEST, FEW = "zero", "protect(0.1) + hadamard(64)", "protect(0.01) + hadamard(64)"


def _named(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(trained_over=table["trained_with"].where(table["trained_at"] > 0, LOSSLESS))


# Draw what losses cost a real model: in inference, by the error of its sums, and after training.


EXTRA_MARKERS = "+x1"  # of kinds of repair, apart from those of networks
RISE = ["rise", "low", "high"]
COLLAPSED = ["collapsed", "collapsed_low", "collapsed_high"]
NAMES = {"zero": "nothing"}  # of repairs that figures name otherwise


def real_model_rises(table: pd.DataFrame) -> Figure:
    """Draw the rise of a pretrained model's cross-entropy and the share of collapsed blocks, by repair and loss rate.

    Bars are 95 % intervals.

    Args:
        table: from `rises`, of one model, algorithm and phase. Each repair has a row at the largest
            loss rate.
    """
    largest = table[table["loss_rate"] == table["loss_rate"].max()].sort_values("rise", ascending=False, kind="stable")
    repairs = sorted(largest["repair"], key=lambda repair: repair != "zero")  # nothing on top, then the best last
    figure, axes = plt.subplots(
        1, 2, figsize=(COLUMN, 0.8 + 0.19 * len(repairs)), sharey=True, layout="constrained", width_ratios=(2, 1)
    )
    rates = sorted(table["loss_rate"].unique())
    for number, rate in enumerate(rates):
        rows = table[table["loss_rate"] == rate]
        places = [repairs.index(repair) + 0.36 * (number - (len(rates) - 1) / 2) for repair in rows["repair"]]
        label = f"{POINTS * rate:g} % loss"
        for ax, values in zip(axes, (rows[RISE], POINTS * rows[COLLAPSED]), strict=True):
            estimates(ax, places, values, number, across=True, label=label)
    axes[0].set_yticks(range(len(repairs)), [NAMES.get(each, each) for each in repairs])
    axes[0].set_ylim(len(repairs) - 0.5, -0.5)
    axes[0].set(xlabel="rise, nats a token")
    axes[1].set(xlabel="collapsed, %")
    axes[1].margins(x=0.15)
    shared_legend(figure, axes[0])
    for ax in axes:
        ax.axvline(0, color="0.6", linewidth=0.8, zorder=0)
    return figure


def real_model_law(networks: pd.DataFrame, repaired: pd.DataFrame) -> Figure:
    """Draw the median block's rise against the error of the sums: unrepaired networks on one line, and repairs.

    Args:
        networks: from `against_predicted`. The line joins their predictions.
        repaired: rows of `times_law`.
    """
    figure, ax = plt.subplots(figsize=(COLUMN, 2.3), layout="constrained")
    law = networks.sort_values("stream_error")  # a power law is straight on these axes
    ax.plot(law["stream_error"], law["median_by_stream_error"], color="0.2", linewidth=1, zorder=0)
    kinds = networks["algorithm"].where(networks["phase"] == "reduce", networks["algorithm"] + ", both phases")
    for number, kind in enumerate(dict.fromkeys(kinds)):
        for fitted, rows in networks[kinds == kind].groupby("fitted"):
            color = f"C{number}"
            ax.plot(
                rows["stream_error"], rows["median"], marker=marker_of(number), color=color, linestyle="none",
                markersize=4, markerfacecolor=color if fitted else "white", label=None if fitted else kind,
            )  # fmt: skip
    by_kind = dict(list(repaired.groupby(repaired["repair"].map(_kind))))
    for marker, (kind, rows) in zip(EXTRA_MARKERS[: len(by_kind)], by_kind.items(), strict=True):
        ax.plot(
            rows["stream_error"],
            rows["median"],
            marker=marker,
            color="0.35",
            linestyle="none",
            markersize=4,
            label=kind,
        )
    ax.set(xscale="log", yscale="log", xlabel="squared error of a sum, relative to the stream")
    ax.set_ylabel("rise of the median block,\nnats a token")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=5.5, handletextpad=0.2, borderpad=0)
    return figure


def _kind(repair: str) -> str:
    """Return the kind of a repair: whether it spreads a message over its packets, and whether it protects some."""
    if "hadamard" not in repair:
        return "repairs that do not spread"
    return "spread, strongest protected" if "protect" in repair else "spread (Hadamard)"


def real_model(study: Study) -> dict[str, Any]:
    """Return what losses cost the pretrained real model in inference, what predicts it, and what repairs it."""
    folder = study.results / "real_model"
    table = rises(folder)
    if table.empty:
        return {}
    study.draw(real_model_rises(repaired(table)), "real_model")
    networks = against_predicted(table, pd.read_csv(folder / "predicted.csv"))
    by_law = times_law(table, pd.read_csv(folder / "sum_errors.csv"))
    repairs = usual(by_law).query("repair != 'zero'")
    study.draw(real_model_law(networks, repairs), "real_model_law")
    predicted = networks[NETWORK].itertuples(index=False, name=None)
    later = by_law[(by_law["repair"] == "zero") & ~by_law[NETWORK].agg(tuple, axis=1).isin(list(predicted))]
    return {
        "real_model": json_rows(table),
        "real_networks": json_rows(networks),
        "real_repairs": json_rows(repairs),
        "real_networks_later": json_rows(later),  # measured after the predictions
        "strongest_packet": strongest_packet(folder / "damage_by_packet.csv"),
    }


# Claims about a real pretrained model.


@claim
def hadamard_does_not_help_the_real_model(results: Results) -> Claim:
    """Require that Hadamard raises the median block more than no repair does. Nothing shows that its mean is lower."""
    numbers: dict[str, float] = {}
    holds = True
    ratios = []
    for rate, by_repair in _real(results):
        hadamard, none = by_repair["hadamard(64)"], by_repair["zero"]
        holds &= hadamard["high"] >= none["low"] and hadamard["median"] > none["median"]
        ratios.append(hadamard["median"] / none["median"])
        numbers |= {f"hadamard at {rate:g}": hadamard["rise"], f"none at {rate:g}": none["rise"]}
    return Claim(holds, numbers | {"least ratio of medians": min(ratios)})


@claim
def protection_ends_the_collapse(results: Results) -> Claim:
    """Require that blocks collapse without a repair, and none does with protection, alone or with Hadamard."""
    numbers: dict[str, float] = {}
    holds = True
    for rate, by_repair in _real(results):
        none = by_repair["zero"]
        for repair in ("protect(0.01)", FEW):
            holds &= by_repair[repair]["collapsed"] == 0 and by_repair[repair]["rise"] < none["rise"]
        numbers[f"collapsed at {rate:g}"] = none["collapsed"]
    return Claim(holds and min(numbers.values()) > 0, numbers)


@claim
def protection_holds_on_other_losses(results: Results) -> Claim:
    """Require that no block collapses under bursts, shared and recorded losses once the strongest are protected.

    Without a repair some do. The mean rise must be lower, with intervals apart unless the losses are recorded: there
    they must overlap.
    """
    pairs = [
        [real_row(results, losses=losses, repair=repair) for repair in ("zero", FEW)]
        for losses in sorted({row["losses"] for row in results["real_model"]} - {USUAL["losses"]})
    ]
    holds = len(pairs) == 3
    for none, few in pairs:
        recorded = none["losses"].startswith("trace")
        holds &= none["collapsed"] > 0 == few["collapsed"]
        holds &= few["rise"] < none["rise"] and recorded == (few["high"] >= none["low"])
    return Claim(holds, {none["losses"]: few["rise"] for none, few in pairs})


@claim
def both_phases_stay_costly(results: Results) -> Claim:
    """Require that 10 % loss both ways collapses every block, and that all still rise by 2 nats with protection.

    With protection the mean must be lower, and the largest rise close to a collapse.
    """
    wanted = {"phase": "both", "algorithm": "direct", "loss_rate": 0.1}
    none, few = (real_row(results, **wanted, repair=repair) for repair in ("zero", FEW))
    numbers = {"collapsed": none["collapsed"]} | {name: few[name] for name in ("smallest", "low", "largest")}
    holds = none["collapsed"] == 1 and few["smallest"] > 2 and few["high"] < none["low"]
    return Claim(holds and few["largest"] < 1.2 * COLLAPSE_NATS, numbers)


@claim
def advised_repair_holds_on_other_losses(results: Results) -> Claim:
    """Require that protection with one retransmission collapses no block, and leaves less than no repair and `FEW`.

    On eight networks at least, of all kinds of losses, both phases and three algorithms; intervals apart. `FEW` was not
    measured on each. In both phases more than 0.1 nats must remain.
    """
    network = ("algorithm", "phase", "losses", "loss_rate")
    rows = rows_of(results["real_model"], repair=ADVISED)
    holds = len(rows) >= 8 and len({row["losses"] for row in rows}) == 4
    holds &= {row["algorithm"] for row in rows} == {"direct", "ring", "switch"} and "both" in {r["phase"] for r in rows}
    for row in rows:
        same = rows_of(results["real_model"], **{name: row[name] for name in network})
        others = [each for each in same if each["repair"] in (NOTHING, FEW)]
        holds &= row["collapsed"] == 0 and bool(others) and all(row["high"] < each["low"] for each in others)
        holds &= NOTHING in {each["repair"] for each in others} and (row["phase"] == "reduce" or row["low"] > 0.1)
    return Claim(holds, {", ".join(f"{row[name]}" for name in network): row["rise"] for row in rows})


@claim
def one_retransmission_is_a_lower_rate(results: Results) -> Claim:
    """Require that one retransmission at 10 % loss and no repair at 1 % rise alike, and that no block collapses."""
    again, less = (
        real_row(results, loss_rate=0.1, repair="retransmit(1)"),
        real_row(results, loss_rate=0.01, repair="zero"),
    )
    alike = again["low"] < less["high"] and less["low"] < again["high"]
    return Claim(alike and again["collapsed"] == 0, {"once more": again["rise"], "at 1 %": less["rise"]})


@claim
def protection_and_retransmission_repair_most(results: Results) -> Claim:
    """Require that protection with one retransmission leaves less than a tenth of the rise at 10 % loss, uncollapsed.

    Protection with spreading must leave more, with intervals apart, and send fewer packets. One retransmission alone
    must leave a rise as small within the intervals, and wait less. Protection must wait one round trip less than if
    every packet is sent until it arrives.
    """
    repairs = (ADVISED, "retransmit(1)", BEST, NOTHING)
    both, again, spread, none = (real_row(results, loss_rate=0.1, repair=repair) for repair in repairs)
    holds = both["high"] < none["rise"] / 10 and both["collapsed"] == 0
    holds &= both["high"] < spread["low"] and spread["packets"] < both["packets"] and both["low"] <= again["high"]
    for waits in results["real_training_round_trips"].values():
        holds &= 0.9 < waits[UNTIL_IT_ARRIVES] - waits[repairs[0]] < 1.1 and waits["retransmit(1)"] < waits[repairs[0]]
    return Claim(holds, {"both": both["high"], "spread": spread["low"], "nothing": none["rise"]})


@claim
def return_sums_reliably(results: Results) -> Claim:
    """Require that 1 % loss in both phases raises the cross-entropy more than in one, with intervals apart.

    The median block, which does not collapse, must rise more than twice as much.
    """
    one, both = (real_row(results, loss_rate=0.01, repair=NOTHING, phase=phase) for phase in ("reduce", "both"))
    holds = both["low"] > one["high"] and both["median"] > 2 * one["median"]
    return Claim(holds, {"one phase, at most": one["high"], "both, at least": both["low"]})


@claim
def rare_collapses_add_to_the_mean(results: Results) -> Claim:
    """Require that no block collapsed at 1 % loss, where losing the strongest packet would add about 0.1 nats.

    At 10 % loss this sum must agree: what the strongest packet adds is at least a third of the rise, and not all.
    """
    strongest = results["strongest_packet"]["rise"]
    few, many = (real_row(results, loss_rate=rate, repair=NOTHING) for rate in (0.01, 0.1))
    added = 0.01 * strongest
    holds = few["collapsed"] == 0 < many["collapsed"] and 0.08 < added < 0.12 and few["high"] < 0.1 < few["low"] + added
    holds &= many["rise"] / 3 < 0.1 * strongest < many["rise"]
    return Claim(holds, {"added": added, "share at 10 %": 0.1 * strongest / many["rise"]})


@claim
def random_protection_is_not_enough(results: Results) -> Claim:
    """Require that, at the highest rate, blocks collapse and rise more if as many packets are protected at random."""
    *_, (_, by_repair) = _real(results)
    control, protected = by_repair["protect(0.01, 'random')"], by_repair["protect(0.01)"]
    numbers = {"collapsed": control["collapsed"], "least rise": control["low"], "protected": protected["high"]}
    return Claim(control["collapsed"] > 0 and control["low"] > protected["high"], numbers)


@claim
def single_packets_destroy_blocks(results: Results) -> Claim:
    """Require that the strongest packet, lost alone, collapses every block, and that no usual packet costs 0.1 nats."""
    packet = results["strongest_packet"]
    numbers = {name: packet[name] for name in ("norm", "usual_norm", "least_rise", "usual_rise")}
    return Claim(packet["least_rise"] > COLLAPSE_NATS and packet["usual_rise"] < 0.1, numbers)


@claim
def law_predicts_the_real_model(results: Results) -> Claim:
    """Require that the stream's error predicts medians to a factor of 1.25, and too little in both phases.

    In both phases, each measured median must be over 1.25 times its prediction. In the reduce phase, a law of the loss
    rate alone must be farther off.
    """
    new = [row for row in results["real_networks"] if not row["fitted"]]
    one, both = ([row for row in new if row["phase"] == phase] for phase in ("reduce", "both"))
    farthest = {name: max(_times(row, name) for row in one) for name in ("stream_error", "squared_error", "loss_rate")}
    costlier = [row["median"] / row["median_by_stream_error"] for row in both]
    costlier += [row["times_law"] for row in results["real_networks_later"] if row["phase"] == "both"]
    numbers = {"networks": len(one), **farthest, "least in both": min(costlier), "most in both": max(costlier)}
    holds = farthest["stream_error"] < min(1.25, farthest["loss_rate"]) and min(costlier) > 1.25
    return Claim(holds, numbers)


def _times(row: dict[str, Any], name: str) -> float:
    """Return by what factor the measured median is off from its prediction."""
    ratio: float = row["median"] / row[f"median_by_{name}"]
    return max(ratio, 1 / ratio)


@claim
def law_covers_repairs(results: Results) -> Claim:
    """Require that repairs that do not spread lie within a tenth of the law, and that spreading doubles the rise.

    Protection that also spreads must lie at about two thirds of it.
    """
    kinds: dict[tuple[bool, bool], list[float]] = {}
    for row in results["real_repairs"]:
        kinds.setdefault(("protect" in row["repair"], "hadamard" in row["repair"]), []).append(row["times_law"])
    groups = {
        "neither": kinds[False, False] + kinds[True, False],
        "spread": kinds[False, True],
        "protected": kinds[True, True],
    }
    bounds = {"neither": (0.9, 1.1), "spread": (1.9, 2.2), "protected": (0.6, 0.7)}
    holds = all(low < min(groups[name]) and max(groups[name]) < high for name, (low, high) in bounds.items())
    return Claim(holds, {f"{name}, {end.__name__}": end(each) for name, each in groups.items() for end in (min, max)})


@claim
def law_fails_at_small_losses(results: Results) -> Claim:
    """Require that the law predicts less than three quarters of the median's rise at 0.1 % loss."""
    row = row_of(results["real_networks_later"], phase="reduce")
    holds = row["loss_rate"] == 0.001 and row["times_law"] > 4 / 3
    return Claim(holds, {"loss rate": row["loss_rate"], "times the law": row["times_law"]})


# Train a real model over a lossy network, and measure whether it does without its strongest packets.
#
# Three measurements: the model's accuracy over the network with each repair, its accuracy without losses, and how far
# its strongest packet stands out among the packets of the same sum (`paper.sums`).
UNTIL_IT_ARRIVES = "retransmit(100)"
ADVISED = "protect(0.1) + retransmit(1)"
RETRANSMITTING = ("retransmit(1)", ADVISED, UNTIL_IT_ARRIVES)


def expected_round_trips(record: Mapping[str, Any], repair: str) -> float:
    """Return for how many round trips a message of a training run would wait with a repair, on average.

    A message travels over all links at once, and waits for the last packet of any. Protected packets are counted over
    all links together, where each link would round their number up.
    """
    traffic = record["network"]["training"]
    packets = (traffic["packets"] - traffic["extra"]) / traffic["messages"]["called"]
    return round_trips(repair_named(repair), loss_rate_of(record), round(packets))


def _real(results: Results) -> Iterator[tuple[float, dict[str, dict[str, Any]]]]:
    """Yield each loss rate at which repairs were tried on the real model's usual network, with its rows by repair."""
    rows = rows_of(results["real_model"], **USUAL)
    for rate in sorted({row["loss_rate"] for row in rows if row["repair"] != "zero"}):
        yield rate, {row["repair"]: row for row in rows_of(rows, loss_rate=rate)}
