"""What do losses cost a real model's texts, and which packet must not be lost?

The records are of SmolLM2-135M-Instruct on 16 blocks of WikiText-2. `python -m paper.inference` and the notebook
17_real_model of commit 47369f72 measured them; `python -m lossytp.tolerance` measures the same of any model.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lossytp.study.statistics import t_interval
from lossytp.study.style import COLUMN
from lossytp.tolerance import COLLAPSE_NATS
from paper.study import POINTS, Claim, Results, Study, claim, json_rows, row_of, rows_of

USUAL = {"algorithm": "direct", "phase": "reduce", "losses": "single"}  # of most rows
NOTHING, BEST, FEW = "zero", "protect(0.1) + hadamard(64)", "protect(0.01) + hadamard(64)"
DELIVERED = "protect(0.01)"  # delivers the strong packet, and nothing else that matters
ADVISED = "protect(0.1) + retransmit(1)"
LEAST_DRAWN = 0.003  # loss rate


def answer(study: Study) -> dict[str, Any]:
    """Return what losses cost the model in inference, what repairs leave, and what its strongest packet costs."""
    folder = study.results / "real_model"
    table = rises(folder)
    study.draw(rises_of_texts(texts(folder / "tolerance.json")), "texts")
    return {
        "real_model": json_rows(table),
        "strongest_packet": strongest_packet(folder / "damage_by_packet.csv"),
    }


def rises(folder: Path) -> pd.DataFrame:
    """Return the rows of all tolerance records below a folder.

    Returns:
        Columns `model_name`, `ranks`, `losses` ("single", "bursts of 8" or another loss type), `algorithm`, `phase`,
        `repair`, `loss_rate`, `draws`, `blocks`, the `packets` of a draw, and the `lossless` cross-entropy. Then the
        `rise` in nats a token, with Student's 95 % interval over draws as `low` and `high`; that of the `median` block,
        the `smallest` and the `largest`; and `collapsed`, the share of blocks that rise by over `COLLAPSE_NATS`.

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


def texts(file: Path) -> pd.DataFrame:
    """Return the rise of each block in each draw, over the usual network without a repair and with `DELIVERED`.

    Args:
        file: a tolerance record of single losses.

    Returns:
        Columns `loss_rate`, `repair`, `rise` in nats a token.
    """
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    where = {name: USUAL[name] for name in ("algorithm", "phase")}
    ours = [row for repair in (NOTHING, DELIVERED) for row in rows_of(rows, **where, repair=repair)]
    found = [
        {"loss_rate": row["loss_rate"], "repair": row["repair"], "rise": rise}
        for row in ours
        for rise in np.ravel(row["rises"]).tolist()
    ]
    return pd.DataFrame(found)


def rises_of_texts(table: pd.DataFrame) -> Figure:
    """Draw a dot for each block and draw: two clouds, the lost and the delivered strong packet beside each other.

    Args:
        table: from `texts`.
    """
    figure, ax = plt.subplots(figsize=(COLUMN, 2.3), layout="constrained")
    rates = sorted(rate for rate in table["loss_rate"].unique() if rate >= LEAST_DRAWN)
    scatter = np.random.default_rng(0)
    looks = {
        NOTHING: ("any packet may be lost", -0.2, "C3", "o"),
        DELIVERED: ("strongest 1 % delivered", 0.2, "C0", "D"),
    }
    pairs = set(table.loc[table["repair"] == DELIVERED, "loss_rate"])
    for repair, (label, aside, color, marker) in looks.items():
        ours = table[(table["repair"] == repair) & table["loss_rate"].isin(rates)]
        x = ours["loss_rate"].map(lambda rate, aside=aside: rates.index(rate) + aside * (rate in pairs))
        x += scatter.uniform(-0.13, 0.13, len(ours))
        ax.plot(x, ours["rise"], marker, color=color, markersize=2, markeredgewidth=0, alpha=0.6, label=label)
    ax.axhline(COLLAPSE_NATS, color="0.5", linewidth=0.8, linestyle="--", zorder=0)
    ax.annotate("collapse", (-0.4, COLLAPSE_NATS), xytext=(0, 2), textcoords="offset points", fontsize=6.5, color="0.3")
    ax.set_yscale("symlog", linthresh=0.1, linscale=0.6)  # on a linear axis, the lower clouds would be bars
    ax.set_ylim(-0.03, 70)
    ax.set_yticks(ticks := [0, 0.1, 1, 10], [f"{each:g}" for each in ticks])
    ax.set_xlim(-0.5, len(rates) - 0.5)
    ax.set_xticks(range(len(rates)), [f"{POINTS * rate:g}" for rate in rates])
    ax.set(xlabel="packet loss rate, %", ylabel="rise of a text, nats a token")
    ax.set_title("One packet decides whether a text collapses")
    ax.legend(loc="upper left", fontsize=6.5, markerscale=2, handletextpad=0.1)
    return figure


def _losses(config: dict[str, Any]) -> str:
    if config.get("mean_burst_packets") is not None:
        return f"bursts of {config['mean_burst_packets']:g}"
    return "single" if config.get("loss_type", "ber") == "ber" else str(config["loss_type"])


def _row(row: dict[str, Any]) -> dict[str, Any]:
    rises_SN = np.array(row["rises"])
    estimate = t_interval(rises_SN.mean(axis=1))
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
        "collapsed": float((rises_SN > COLLAPSE_NATS).mean()),
    }


def strongest_packet(file: Path) -> dict[str, Any]:
    """Summarise what it costs to lose one packet of one sum: the strongest, and others.

    Args:
        file: a table of packets, each lost alone from one sum, with `bin`, `norm` and `rise`.

    Returns:
        `layer`, `module`, `blocks`; `norm` of the strongest packet, the mean over blocks, and `usual_norm`, the largest
        of a packet below the strongest tenth; `rise` if the strongest is lost, its mean over blocks, and `least_rise`;
        and `usual_rise`, the largest if a usual packet is lost. In `harmless` blocks, a packet is a hundred times as
        strong as usual ones, and its loss costs under 0.1 nats. Rises are in nats a token.
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
        "harmless": table[(table["norm"] > 100 * usual["norm"].max()) & (table["rise"] < 0.1)]["block"].nunique(),
    }


# Claims.


def real_row(results: Results, **wanted: Any) -> dict[str, Any]:
    """Return the one row with these values, of the usual network where they do not say otherwise."""
    return row_of(results["real_model"], **USUAL | wanted)


def _real(results: Results) -> Iterator[tuple[float, dict[str, dict[str, Any]]]]:
    """Yield each loss rate at which repairs were tried on the real model's usual network, with its rows by repair."""
    rows = rows_of(results["real_model"], **USUAL)
    for rate in sorted({row["loss_rate"] for row in rows if row["repair"] != "zero"}):
        yield rate, {row["repair"]: row for row in rows_of(rows, loss_rate=rate)}


@claim
def norm_is_not_damage(results: Results) -> Claim:
    """Require that ten blocks at least have a packet a hundred times as strong as usual that costs under 0.1 nats."""
    harmless = results["strongest_packet"]["harmless"]
    return Claim(harmless >= 10, {"harmless": harmless})


@claim
def single_packets_destroy_blocks(results: Results) -> Claim:
    """Require that the strongest packet, lost alone, collapses every block, and that no usual packet costs 0.1 nats."""
    packet = results["strongest_packet"]
    numbers = {name: packet[name] for name in ("norm", "usual_norm", "least_rise", "usual_rise")}
    return Claim(packet["least_rise"] > COLLAPSE_NATS and packet["usual_rise"] < 0.1, numbers)


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
def hadamard_does_not_help_the_real_model(results: Results) -> Claim:
    """Require that Hadamard doubles the median block's rise at each rate. Nothing shows that its mean is lower."""
    numbers: dict[str, float] = {}
    holds = True
    ratios = []
    for rate, by_repair in _real(results):
        hadamard, none = by_repair["hadamard(64)"], by_repair["zero"]
        holds &= hadamard["high"] >= none["low"] and hadamard["median"] > 2 * none["median"]
        ratios.append(hadamard["median"] / none["median"])
        numbers |= {f"hadamard at {rate:g}": hadamard["rise"], f"none at {rate:g}": none["rise"]}
    return Claim(holds, numbers | {"least ratio of medians": min(ratios)})


@claim
def an_erasure_code_leaves_collapses(results: Results) -> Claim:
    """Require that a code of ten packets for eight halves the rise at 10 % loss, and that some block collapses."""
    code, none = (real_row(results, loss_rate=0.1, repair=repair) for repair in ("fec(10, 8)", NOTHING))
    holds = 0 < code["collapsed"] < none["collapsed"] and code["rise"] < none["rise"] / 2
    return Claim(holds, {"rise": code["rise"], "collapsed": code["collapsed"]})


@claim
def protection_and_retransmission_repair_most(results: Results) -> Claim:
    """Require that protection with one retransmission leaves less than a tenth of the rise at 10 % loss, uncollapsed.

    Protection with spreading must leave more, with intervals apart, and send fewer packets. One retransmission alone
    must leave a rise as small within the intervals.
    """
    repairs = (ADVISED, "retransmit(1)", BEST, NOTHING)
    both, again, spread, none = (real_row(results, loss_rate=0.1, repair=repair) for repair in repairs)
    holds = both["high"] < none["rise"] / 10 and both["collapsed"] == 0
    holds &= both["high"] < spread["low"] and spread["packets"] < both["packets"] and both["low"] <= again["high"]
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
