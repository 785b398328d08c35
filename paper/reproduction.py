"""Do this machine's runs agree with the published ones? Seven runs, one row of the line, and one packet."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lossytp.network.scope import Site
from lossytp.parallel.collectives import Message
from lossytp.study.grid import Experiment
from lossytp.study.statistics import t_interval
from lossytp.study.style import COLUMN, marker_of
from lossytp.study.tables import ACCURACIES, final_accuracies
from lossytp.tolerance.config import NO_REPAIR, Setup
from lossytp.tolerance.measure import Measurement
from lossytp.tolerance.packets import Packet, Watch, chosen_in, standing_out
from lossytp.training.files import write_atomically
from lossytp.training.record import commit, environment, read_record
from paper.models import Model, ModelsConfig
from paper.study import HEADLINE, POINTS, Study, json_rows, loss_rate_axis

PUBLISHED = Path(__file__).parents[1] / "results" / "paper"
ACCURACY_BOUND = 0.01  # two kinds of processor differed by at most 0.0033 in 26 pairs of the paper's runs
NATS_BOUND = 0.01
MEASURES = {"accuracy_lossy": "accuracy with losses", "accuracy_clean": "accuracy without"}
YES, NO, OTHER_DATA = "yes", "no", "other data"
LINE = "line.json"
MODEL = {"model_name": "gpt2-nano", "text": "stdlib", "blocks": 16, "loss_rates": "0.01,0.1"}  # which everybody has
DRAWS = 3


def answer(study: Study) -> dict[str, Any]:
    """Return the values of this machine beside the published ones, and whether they agree."""
    experiments = [study.runs(name)[0] for name in study.experiments]
    lines = [line(folder / LINE) for folder in (study.results, PUBLISHED)]
    table = pd.concat([compare_runs(experiments, PUBLISHED), compare_lines(*lines)], ignore_index=True)
    _, here, _ = study.runs(HEADLINE)
    _, curve, _ = Study("paper", PUBLISHED, study.grids, study.output).runs(HEADLINE)
    task = here["task"].iloc[0]
    study.draw(reproduced_on_published(curve[curve["task"] == task], here), "reproduction")
    return {
        "verdict": verdict(table),
        "task": task,
        "accuracy_bound": ACCURACY_BOUND,
        "nats_bound": NATS_BOUND,
        "rows": json_rows(table),
        "environment": environment(),
        "commit": commit(),
    }


def compare_runs(experiments: Iterable[Experiment], published: Path) -> pd.DataFrame:
    """Compare every cell's record with the published one of the same name.

    Packets lost must be equal: they depend on the seed alone. Accuracies may differ by `ACCURACY_BOUND`, because other
    processors round differently. Accuracies of a run that diverged are those of `final_accuracies`; if only one
    of the two diverged or stopped early, no value agrees. Cells with other data, such as another Python's text, cannot
    be compared.

    Args:
        experiments: whose cells are finished.
        published: the results folder with the published records, below "runs".

    Returns:
        One row per cell and measure: `task`, `arm`, `loss_rate`, `seed`, `measure`, `published`, `here`, `difference`
        and `agrees` ("yes", "no" or "other data").

    Raises:
        ValueError: if a record is missing.
    """
    rows: list[dict[str, Any]] = []
    for cell in (cell for experiment in experiments for cell in experiment.cells):
        folder = Path(cell.config.output.output_dir)
        here, there = _record(folder), _record(published / "runs" / folder.name)
        same_data = here["data"]["sha256"] == there["data"]["sha256"]
        what = {"task": cell.config.task, "arm": cell.arm, "loss_rate": cell.config.network.process_rate}
        what["seed"] = cell.config.network.seed
        both = [final_accuracies(record) for record in (there, here)]
        values: list[tuple[str, float, float, float]] = [
            (MEASURES[name], before, now, ACCURACY_BOUND)
            for name in ACCURACIES
            if (before := both[0][name]) is not None and (now := both[1][name]) is not None  # None in pretraining
        ]
        lost = [record["network"]["training"]["lost"] for record in (there, here)]
        values.append(("packets lost in training", *lost, 0))
        same_end = here["status"] == there["status"]
        rows += [what | _compared(*each, same_data, same_end) for each in values]
    return pd.DataFrame(rows)


def line(file: Path) -> dict[str, Any]:
    """Return the slope of a model that everybody has, and the cost of its strongest packet; measure them if need be.

    Args:
        file: the record. It is written if it is missing.
    """
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    config = ModelsConfig.from_dict({**MODEL, "min_draws": DRAWS, "max_draws": DRAWS})
    model = Model("gpt2-nano", config, lambda part: None)
    lossless = model.account.lossless()
    slope = model.slope(lossless, model.account.find(lossless))
    record = {
        "slope": slope["slope"]["value"],
        "strongest": strongest_packet(model.account.measurement, model.config, lossless.scores),
        "settings": {**MODEL, "draws": DRAWS, "seed": model.config.seed},
        "commit": commit(),
        "environment": environment(),
    }
    write_atomically(file, json.dumps(record, indent=1, allow_nan=False) + "\n")
    return record


def strongest_packet(measurement: Measurement, config: ModelsConfig, scores: list[float]) -> dict[str, float]:
    """Return the norm of the first message's strongest packet over its sum's median, and the rise if it alone is lost.

    Args:
        measurement: the model and the text.
        config: its settings.
        scores: the cross-entropy of each sequence without losses.
    """
    setup = Setup("direct", "reduce", NO_REPAIR, config.rates()[0])
    settings, ids_BT = config.network(setup), measurement.messages[0]
    model, network = measurement.over(settings, repair=Watch())
    packets: list[Packet] = []

    def see(message: Message, site: Site) -> None:
        routes = settings.comm().algorithm.reduce
        packets.extend(standing_out(message, site, routes, number=0, shape=tuple(ids_BT.shape), times=0.0))

    network.alone, network.see = True, see
    measurement.score(model, ids_BT)
    strongest = max(packets, key=lambda packet: packet.ratio)
    network.see, network.chosen = None, chosen_in([strongest], 0)
    rise = float(measurement.score(model, ids_BT)[strongest.sequence]) - scores[strongest.sequence]
    return {"ratio": strongest.ratio, "rise": rise}


def compare_lines(here: dict[str, Any], published: dict[str, Any]) -> pd.DataFrame:
    """Compare two records of `line`.

    The text is the sources of Python's standard library, so records of different Pythons cannot be compared.

    Returns:
        Rows as `compare_runs` returns them; `task` is the model's name.

    Raises:
        ValueError: if the records have different settings.
    """
    if here["settings"] != published["settings"]:
        raise ValueError(f"{LINE} has other settings than the published one: delete it to measure again")
    same_data = published["environment"]["python"] == here["environment"]["python"]
    what = {"task": MODEL["model_name"], "arm": "the line", "loss_rate": 0.01, "seed": here["settings"]["seed"]}
    records = (published, here)
    slopes, rises = [each["slope"] / POINTS for each in records], [each["strongest"]["rise"] for each in records]
    return pd.DataFrame(
        [
            what | _compared("nats for each per cent", slopes[0], slopes[1], NATS_BOUND, same_data),
            what | {"arm": "strongest packet"} | _compared("rise in nats", rises[0], rises[1], NATS_BOUND, same_data),
        ]
    )


def verdict(table: pd.DataFrame) -> str:
    """Return one sentence: how many of the values agree, and what to do about those that do not."""
    counts = table["agrees"].value_counts()
    agree, differ, other = (int(counts.get(each, 0)) for each in (YES, NO, OTHER_DATA))
    text = f"{agree} of {agree + differ} values agree with the published ones"
    if other:
        text += f"; {other} have other data, because this Python's texts differ, and are not compared"
    if differ:
        text += ": see the rows that say no, and report them with the records"
    return text


def _record(folder: Path) -> dict[str, Any]:
    record = read_record(folder)
    if record is None:
        raise ValueError(f"{folder} has no record.json: run its cell first")
    return record


def _compared(
    measure: str, published: float, here: float, bound: float, same_data: bool, same_end: bool = True
) -> dict[str, Any]:
    difference = here - published
    agrees = YES if same_end and abs(difference) <= bound else NO
    return {
        "measure": measure,
        "published": published,
        "here": here,
        "difference": difference,
        "agrees": agrees if same_data else OTHER_DATA,
    }


def reproduced_on_published(published: pd.DataFrame, here: pd.DataFrame) -> Figure:
    """Draw accuracy against loss rate: the published mean with its 95 % interval, and this machine's single runs.

    A hollow mark is the published run of the same cell. Where both agree, one covers the other.

    Args:
        published: one row per published run, with `loss_rate`, `seed` and `accuracy_lossy`.
        here: the same columns for this machine's runs.
    """
    figure, ax = plt.subplots(figsize=(COLUMN, 2.4), layout="constrained")
    seeds = published["seed"].nunique()
    estimates = published.groupby("loss_rate")["accuracy_lossy"].apply(lambda values: t_interval(values.to_numpy()))
    mean, low, high = np.array(estimates.tolist()).T
    ax.plot(estimates.index, mean, marker=marker_of(0), color="C0", label=f"published, {seeds} seeds", markersize=3)
    ax.fill_between(estimates.index, low, high, color="C0", alpha=0.2, linewidth=0)
    cells = here.merge(published, on=["loss_rate", "seed"], suffixes=("", "_published"))
    for number, (seed, runs) in enumerate(cells.groupby("seed"), 1):
        rates, marker = runs["loss_rate"], marker_of(number)
        style: dict[str, Any] = {"linestyle": "none", "marker": marker, "color": f"C{number}"}
        ax.plot(rates, runs["accuracy_lossy_published"], **style, markersize=7, markerfacecolor="none")
        ax.plot(rates, runs["accuracy_lossy"], **style, markersize=3.5, label=f"here, seed {seed}")
    loss_rate_axis(ax, published["loss_rate"])
    ax.set_xlabel("packet loss rate, %")
    ax.set_ylabel("test accuracy")
    ax.legend(loc="lower left")
    return figure
