"""What packet loss costs several models, and how much of it a pass without losses predicts.

python -m paper.models --model_name smollm2-135m
python -m paper.models --model_name path/to/model.gguf

Each model has one record for each part. What has a record is not measured again. Weights from a file whose
origin nobody has checked are known by its SHA-256 alone, and no claim may rest on them alone.

The predicted slope is written before the slope is measured (`paper.second_order`).

Larger rates are predicted in two ways before they are measured. The line is p times the slope at 1 %. The curve takes
the two moments of what arrives, (1 - p) x_k with variance p (1 - p): the rise of a pass in which each packet is
multiplied by 1 - p, plus p (1 - p) times the second term.

Critical packets (`lossytp.tolerance`) are delivered, in the prediction and while losses are drawn.

Shapes: N sequences, B of them in one message, T tokens of each, V words, M elements of a message.
"""

import copy
import hashlib
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from pydantic import Field
from torch import nn

from lossytp.network.scope import MODULES
from lossytp.parallel.plans import blocks_of
from lossytp.study.statistics import Estimate, t_interval
from lossytp.study.style import COLUMN, estimates, shared_legend
from lossytp.tolerance.config import NO_REPAIR, Setup, ToleranceConfig
from lossytp.tolerance.measure import Account, Lossless, Measured, Measurement, Rises, estimate_of
from lossytp.tolerance.packets import Found, Packet, chosen_in
from lossytp.tolerance.report import report_of
from lossytp.training.command_line import parse, run_as_command
from lossytp.training.files import check_writable, write_atomically
from lossytp.training.groups import NetworkSettings
from lossytp.training.models import GENERATION, MODELS, build_model, load_tokenizer
from lossytp.training.record import commit
from lossytp.training.settings import Count, Share
from lossytp.training.shapes import SCRATCH, gguf_file
from paper.second_order import SecondOrder
from paper.study import Claim, Results, Study, claim, json_rows, row_of

PARTS_OF_DEPTH = 6
WEIGHTS = "model.safetensors"
NOT_KEPT = ("model_name", "output_dir")  # paths
ONLY_OF = {  # settings that matter to one part alone
    "predicted": ("probes",),
    "repairs": ("repairs", "repair_rate"),
    "depth": ("depth_rate", "depth_messages"),
    "line": ("line_rates",),
}
ROUNDED = ("bf16", "int8", "fp8", "int4")  # what is sent, as a yardstick


class ModelsConfig(ToleranceConfig):
    """A model, its text, and what to measure of it."""

    blocks: Annotated[int, Field(ge=2)] | None = 32
    """Number of sequences, from the text's beginning."""
    min_draws: Count = 5
    """Smallest number of draws of losses for each row."""
    max_draws: Count = 10
    """Largest number of draws of losses for each row."""
    repairs: str = (
        "protect_layers(1, 1),protect_layers(2, 2),protect_first(1),protect_first(4),protect(0.01),protect(0.1),"
        "hadamard(64),retransmit(1),protect(0.1) + retransmit(1),retransmit(2)"
    )
    """Repairs, separated by commas."""
    repair_rate: Share = 0.1
    """Packet loss rate at which repairs are measured."""
    depth_rate: Share = 0.2
    """Packet loss rate of the map by depth, where one module of one sixth of the layers loses packets."""
    depth_messages: Count = 1
    """Messages of the map by depth, from the text's beginning."""
    probes: Count = 2
    """Random directions of the predicted slope."""
    line_rates: str = "0.001,0.003,0.1,0.2"
    """Packet loss rates that are predicted from the slope at one rate, and then measured, separated by commas."""
    output_dir: str = "results/paper/models"
    """Folder for the records."""


class PartOfModel(Account):
    """An account in which one module of some layers loses packets, and all else is reliable."""

    layers, module = "", ""

    def _settings(self, repair: str, rate: float, phase: str | None = None) -> NetworkSettings:
        settings = super()._settings(repair, rate, phase)
        return settings.replace(lossy_layers=self.layers, lossy_module=self.module) if self.layers else settings


class Model:
    """One model on one text. It is loaded when a part has no record.

    Args:
        name: the model's in records.
        config: its settings.
        show: called with the name of every part before it is measured, and with "" after every draw.
    """

    def __init__(self, name: str, config: ModelsConfig, show: Callable[[str], object]) -> None:
        self.name, self.config, self.show = name, config, show
        self.folder = Path(config.output_dir)

    @cached_property
    def account(self) -> PartOfModel:
        """Return the account of the model over a direct exchange, in the reduce phase."""
        return PartOfModel(Measurement(self.config), "direct", "reduce")

    def record(self, part: str, measure: Callable[[], Any]) -> Any:
        """Return what a part's record holds. Without a record, measure it, and write one.

        Raises:
            ValueError: if the record has other settings.
        """
        others = [name for other, names in ONLY_OF.items() if other != part for name in names]

        def measured() -> dict[str, Any]:
            self.show(part)
            result = measure()
            return {
                "model": self.name,
                "part": part,
                "weights_sha256": sha256(self.config.model_name),
                "tensor_parallel_size": self.account.measurement.ranks,
                "layers": len(blocks_of(self.account.measurement.dense)),
                "first_tokens": self.account.measurement.first_tokens.get("first_tokens", []),
                "result": result,
            }

        return kept(self.folder / f"{self.name}-{part}.json", self.config, measured, left_out=others)["result"]

    def lossless(self) -> dict[str, Any]:
        """Score the text without losses, and find the critical packets; keep those at critical packets' places."""
        lossless = self.account.lossless()
        found = self.account.find(lossless)
        places = {packet[:2] for packet, _ in found.critical}
        packets, alone = ([each for each in kind if each[:2] in places] for kind in (lossless.packets, lossless.alone))
        return found._asdict() | {"scores": lossless.scores, "packets": packets, "alone": alone}

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Yield each part and its result, in the order of measuring: the prediction before the slope."""
        values = self.record("lossless", self.lossless)
        packets, alone = ([Packet(*each) for each in values[name]] for name in ("packets", "alone"))
        lossless = Lossless(values["scores"], packets, alone)
        critical = [(Packet(*packet), rise) for packet, rise in values["critical"]]
        found = Found(critical, values["others"], values["unexplained"])
        yield "lossless", values
        for part in ("predicted", "slope", "curve", "line", "repairs", "precision", "depth", "placement"):
            yield part, self.record(part, partial(getattr(self, part), lossless, found))

    def terms(self, found: Found) -> Iterator["SecondOrder"]:
        """Yield what predicts the rise of each message, without the critical packets."""
        critical = [packet for packet, _ in found.critical]
        for number, ids_BT in enumerate(self.account.measurement.messages):
            chosen = chosen_in(critical, number)
            yield SecondOrder(self.account.measurement, self.config, ids_BT, chosen, self.config.probes)

    def predicted(self, lossless: Lossless, found: Found) -> dict[str, Any]:
        """Predict the slope from passes without losses, as this module says."""
        terms = [(each.first_B(), each.mean_second_B()) for each in self.terms(found)]
        first_N, second_N = map(np.concatenate, zip(*terms, strict=True))
        terms_N = {"slope": first_N + second_N, "first_order": first_N, "second_order": second_N}
        return {name: t_interval(each_N).as_json() for name, each_N in terms_N.items()}

    def line_rates(self) -> list[float]:
        """Return the rates of the line, in ascending order."""
        return self.config.replace(loss_rates=self.config.line_rates).rates()

    def curve(self, lossless: Lossless, found: Found) -> dict[str, Any]:
        """Predict the rises at the rates of the line, as this module says."""
        rates, rises = self.line_rates(), []
        for terms in self.terms(found):
            second_B, score_B = terms.mean_second_B(), terms.scaled_B(0.0)
            rises.append([terms.scaled_B(-rate) - score_B + rate * (1 - rate) * second_B for rate in rates])
        rises_KN = np.concatenate(rises, axis=1)
        return {str(rate): t_interval(rises_N).as_json() for rate, rises_N in zip(rates, rises_KN, strict=True)}

    def line(self, lossless: Lossless, found: Found) -> dict[str, Any]:
        """Measure the rises at these rates."""
        rows = {rate: self.rises(NO_REPAIR, rate, lossless, found) for rate in self.line_rates()}
        return {str(rate): estimate_of(row.rises, self.config).as_json() for rate, row in rows.items()}

    def precision(self, lossless: Lossless, found: Found) -> dict[str, Any]:
        """Measure what rounding costs alone, if all that is sent is rounded."""
        scores = {}
        for wire_dtype in ROUNDED:
            settings = self.config.replace(wire_dtype=wire_dtype).network(Setup("direct", "reduce", NO_REPAIR, 0.0))
            model, _ = self.account.measurement.over(settings)
            messages = self.account.measurement.messages
            scores[wire_dtype] = np.concatenate([self.account.measurement.score(model, ids_BT) for ids_BT in messages])
        return {name: t_interval(each_N - np.array(lossless.scores)).as_json() for name, each_N in scores.items()}

    def rises(self, repair: str, rate: float, lossless: Lossless, found: Found, scale: float = 0.0) -> Rises:
        """Draw losses with the critical packets delivered, if the repair lets them be chosen."""
        critical = [packet for packet, _ in found.critical]
        return self.account.rises(repair, rate, lossless, critical, partial(self.show, ""), scale)

    def slope(self, lossless: Lossless, found: Found) -> dict[str, Any]:
        """Measure the slope at the first rate, and check the line at the others."""
        rows = [self.rises(NO_REPAIR, rate, lossless, found) for rate in self.config.rates()]
        measured = Measured("direct", "reduce", lossless, found, rows, {}, None)
        return report_of(measured, self.config).as_json() | {"draws": [len(row.rises) for row in rows]}

    def repairs(self, lossless: Lossless, found: Found) -> list[dict[str, Any]]:
        """Measure what each repair leaves, and the share of packets that it sends reliably.

        A reliable packet is sent again 1 / (1 - p) - 1 times on average, so the share follows from what was sent again.
        """
        rate, bare, scale = self.config.repair_rate, 0.0, 0.0
        rows: list[dict[str, Any]] = []
        for repair in (NO_REPAIR, *self.config.repair_names()):
            row = self.rises(repair, rate, lossless, found, scale)
            rise = estimate_of(row.rises, self.config)
            if repair == NO_REPAIR:
                bare, scale = row.packets, abs(rise.value)
            more = {"reliable_share": (row.packets / bare - 1) * (1 - rate) / rate, "critical_delivered": row.delivered}
            rows.append({"repair": repair, "rise": rise.as_json(), **more})
        return rows

    def depth(self, lossless: Lossless, found: Found) -> list[dict[str, Any]]:
        """Measure the rise with one module of one sixth of the layers lossy, on the text's first messages."""
        messages, account = self.config.depth_messages, self.account
        few = copy.copy(account.measurement)
        few.messages = few.messages[:messages]
        scores = lossless.scores[: sum(map(len, few.messages))]
        critical = [packet for packet, _ in found.critical if packet.message < messages]
        rows = []
        for first, stop in sixths(len(blocks_of(few.dense))):
            for module in MODULES:
                part = PartOfModel(few, "direct", "reduce")
                part.layers, part.module = f"{first}:{stop}", module
                how = (lossless._replace(scores=scores), critical, partial(self.show, ""))
                row = part.rises(NO_REPAIR, self.config.depth_rate, *how, scale=1.0)
                rise = estimate_of(row.rises, self.config).as_json()
                rows.append({"module": module, "layers": [first, stop], "rise": rise})
        return rows

    def placement(self, lossless: Lossless, found: Found) -> dict[str, Any] | None:
        """Count critical packets of messages of one sequence, before and after their ranks exchange units of the MLP.

        A rank that makes a packet then owns its chunk, and does not send it. None if there are no critical packets.
        """
        if not found.critical:
            return None
        single = Account(Measurement(self.config.replace(batch_size=1)), "direct", "reduce")
        before = single.lossless()
        critical = single.find(before).critical
        for layer, src, dst in sorted({(packet.layer or 0, packet.src, packet.dst) for packet, _ in critical}):
            exchange_units_(blocks_of(single.measurement.dense)[layer].mlp, src, dst, single.measurement.ranks)
        del single._over_watched  # it has the units where they were
        after = single.lossless()
        change = np.abs(np.array(after.scores) - before.scores).max()
        counts = {"before": len(critical), "after": len(single.find(after).critical)}
        return counts | {"sequences": len(before.scores), "score_changed_by": float(change)}


def exchange_units_(mlp: Any, one: int, other: int, ranks: int) -> None:
    """Exchange the hidden units of two ranks, which changes nothing of what the MLP computes."""
    layers = [layer for layer in mlp.modules() if isinstance(layer, nn.Linear)]
    width = max(layers[0].weight.shape)
    order = np.arange(width).reshape(ranks, -1)
    order[[one, other]] = order[[other, one]]
    for layer in layers:
        axis = layer.weight.shape.index(width)
        layer.weight.data = layer.weight.data.index_select(axis, torch.from_numpy(order.ravel()))
        assert layer.bias is None or axis == 1, "a bias of hidden units would have to move too"


def kept(
    file: Path, config: ModelsConfig, measure: Callable[[], dict[str, Any]], left_out: Iterable[str] = ()
) -> dict[str, Any]:
    """Return a file's record. Without one, measure it, and write it with the settings, but for those `left_out`.

    Raises:
        ValueError: if the record has other settings, or its folder cannot be written.
    """
    values = config.as_dict() | {"text": config.text_name()}
    settings = {name: value for name, value in values.items() if name not in {*NOT_KEPT, *left_out}}
    if file.exists():
        record = json.loads(file.read_text(encoding="utf-8"))
        differ = [name for name, value in settings.items() if record["settings"].get(name) != value]
        if differ:
            ours, theirs = settings[differ[0]], record["settings"].get(differ[0])
            raise ValueError(f"{file} has {differ[0]} = {theirs!r}, not {ours!r}: give that, or another output_dir")
        return record
    check_writable(str(file.parent))  # before hours go into it
    record = measure() | {"settings": settings, "commit": commit()}
    write_atomically(file, json.dumps(record, indent=1, allow_nan=False) + "\n")
    return record


def sixths(layers: int) -> list[tuple[int, int]]:
    """Return the bounds of six parts of the layers, or of each layer if there are fewer."""
    ends = np.linspace(0, layers, min(PARTS_OF_DEPTH, layers) + 1).round().astype(int).tolist()
    return list(pairwise(ends))


def sha256(model_name: str) -> str:
    """Return the SHA-256 of the file that holds a model's weights."""
    folders = (Path(model_name), MODELS / model_name)
    file = gguf_file(model_name) or next((each / WEIGHTS for each in folders if (each / WEIGHTS).is_file()), None)
    if file is None:
        raise ValueError(f"model_name = {model_name!r} has no {WEIGHTS}: give a GGUF file, or a folder with one")
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def measure(config: ModelsConfig, show: Callable[[str], object] = lambda part: None) -> dict[str, Any]:
    """Return the results of a model by part: those of its records, and what has none is measured.

    Raises:
        ValueError: as `lossytp.tolerance` does, or if a record has other settings.
    """
    if not config.model_name.endswith(SCRATCH):
        name = Path(config.model_name).stem if gguf_file(config.model_name) else Path(config.model_name).name
        return dict(Model(name, config, show).parts())
    with tempfile.TemporaryDirectory() as folder:  # a control without massive activations: a shape, with drawn weights
        tokenizer = load_tokenizer(config.model_name)
        build_model(config.model_name, GENERATION, tokenizer=tokenizer, dropout=0.0, seed=0).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return dict(Model(config.model_name, config.replace(model_name=folder), show).parts())


def records(folder: Path) -> list[dict[str, Any]]:
    """Return all records of a folder, by the names of their files."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]


def table(found: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Tabulate what is known of each model, one row a model; slopes and damages are in nats a token.

    `ratio` is the measured slope over the predicted one, and `mean_share` the first of the predicted terms over the
    second. `rate_X` is the loss rate that costs X nats with the critical packets lost, and `rate_X_delivered` with them
    delivered. A repair has its rise, and its share of reliable packets.
    """
    rows: dict[str, dict[str, Any]] = {}
    for record in found:
        row, result = rows.setdefault(record["model"], {}), record["result"]
        row |= {"sha256": record["weights_sha256"][:12], "ranks": record["tensor_parallel_size"]}
        if record["part"] == "lossless":
            row["lossless"] = float(np.mean(result["scores"]))
        elif record["part"] == "predicted":
            row |= {f"predicted_{end}": nats for end, nats in result["slope"].items()}
            row["predicted"] = row.pop("predicted_value")
            row["mean_share"] = result["first_order"]["value"] / result["second_order"]["value"]
        elif record["part"] == "slope":
            row |= {name: result["slope"][of] for name, of in (("slope", "value"), ("low", "low"), ("high", "high"))}
            row |= {"critical": result["critical"][0], "damage": (result["damage"] or {}).get("value")}
            for nats, rates in result["rates"].items():
                row |= {f"rate_{nats}": rates["lost"]["value"], f"rate_{nats}_delivered": rates["delivered"]["value"]}
        elif record["part"] == "repairs":
            for each in result:
                row |= {each["repair"]: each["rise"]["value"], f"share of {each['repair']}": each["reliable_share"]}
    frame = pd.DataFrame.from_dict(rows, orient="index")
    return frame.assign(ratio=frame["slope"] / frame["predicted"]) if {"slope", "predicted"} <= set(frame) else frame


def depths(found: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Tabulate the maps by depth: the rise by model and module, from the first part of the layers to the last."""
    rows = [
        {"model": record["model"], "module": each["module"], "first layer": each["layers"][0], **each["rise"]}
        for record in found
        if record["part"] == "depth"
        for each in record["result"]
    ]
    return pd.DataFrame(rows, columns=["model", "module", "first layer", *Estimate._fields])


def owners(lossless: dict[str, Any], ranks: int, batch_size: int) -> dict[str, int]:
    """Count sequences, and critical ones, by whether the main sender of critical packets owns their first token."""
    critical = [Packet(*packet) for packet, _ in lossless["critical"]]
    most = statistics.mode(packet.src for packet in critical)
    owned_N = [number % batch_size * ranks // batch_size == most for number in range(len(lossless["scores"]))]
    harmed = [owned_N[number] for number in {each.message * batch_size + each.sequence for each in critical}]
    counts = {"owned": sum(owned_N), "owned, critical": sum(harmed)}
    return counts | {"others": owned_N.count(False), "others, critical": harmed.count(False)}


CAPTIONS = {
    "gpt2-nano": "GPT-2 1.3 M",
    "gpt2-micro": "GPT-2 7 M",
    "gpt2-micro-scratch": "random weights",
    "smollm2-135m": "SmolLM2 135 M",
    "gemma3-270m": "Gemma 3 270 M",
    "qwen2.5-coder-0.5b": "Qwen2.5 0.5 B",
}
"""Models as figures name them, in the order of their colours."""
REPAIRS = {
    "zero": "none",
    "hadamard(64)": "Hadamard mixing",
    "protect_first(1)": "first token reliable",
    "protect_first(4)": "first 4 tokens reliable",
    "protect(0.01)": "strongest 1 % reliable",
    "protect(0.1)": "strongest 10 % reliable",
    "protect_layers(1, 1)": "first, last layer reliable",
    "protect_layers(2, 2)": "first, last 2 layers reliable",
    "retransmit(1)": "one resend",
    "protect(0.1) + retransmit(1)": "priority resend",
    "retransmit(2)": "two resends",
}
"""Repairs as figures name them, from top to bottom."""
GEMMA = "gemma3_text"  # a tiny model of its shape
PRIORITY = "protect(0.1) + retransmit(1)"
REPAIRED = ("smollm2-135m", "gemma3-270m")  # real models on which repairs and all rates are measured


def results_of(found: Iterable[dict[str, Any]], part: str, names: Iterable[str] = CAPTIONS) -> dict[str, Any]:
    """Return the results of one part by model, in the order of `names`."""
    results = {record["model"]: record["result"] for record in found if record["part"] == part}
    return {name: results[name] for name in names if name in results}


def line_rows(found: list[dict[str, Any]]) -> pd.DataFrame:
    """Tabulate the measured rises at every rate, beside the line through the first rate's and the predicted curve.

    Columns: `model`, `loss_rate`, the rise (`value`, `low`, `high`), `line`, `curve`; nats a token.
    """
    rows = []
    for model, result in results_of(found, "slope").items():
        first, slope = result["rate"], result["slope"]
        rises = {first: slope, **{float(rate): each for rate, each in result["checks"].items()}}
        rises = {rate: {end: rate * each[end] for end in Estimate._fields} for rate, each in rises.items()}
        rises |= {float(rate): rise for rate, rise in results_of(found, "line").get(model, {}).items()}
        curve = results_of(found, "curve").get(model, {})
        for rate, rise in sorted(rises.items()):
            predicted = {"line": rate * slope["value"], "curve": curve.get(str(rate), {}).get("value")}
            rows.append({"model": model, "loss_rate": rate, **rise, **predicted})
    return pd.DataFrame(rows)


def line_figure(rows: pd.DataFrame, models: pd.DataFrame) -> Figure:
    """Draw the rise against the loss rate, and the slope that passes without losses predict against the measured one.

    Args:
        rows: from `line_rows`.
        models: from `table`, with intervals on both axes. A slope that is not positive has no place on them.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(2 * COLUMN, 2.4), layout="constrained")
    trained = models[models["slope"] > 0].dropna(subset=["predicted"])
    slopes = trained[["slope", "low", "high", "predicted", "predicted_low", "predicted_high"]].astype(float) / 100
    ends = np.array([0.4 * slopes["slope"].min(), 2 * slopes["slope"].max()])
    right.plot(ends, ends, color="0.6", linewidth=0.8)
    for number, (model, name) in enumerate(CAPTIONS.items()):
        if model not in slopes.index:
            continue
        slope, low, high, predicted, *expected = slopes.loc[model].to_numpy()
        rises = rows[(rows["model"] == model) & (rows["low"] > 0)]
        rates = np.sort(rises["loss_rate"].to_numpy())[[0, -1]]
        left.plot(rates, 100 * slope * rates, color=f"C{number}", linewidth=0.8)
        estimates(left, rises["loss_rate"], rises[["value", "low", "high"]], number, label=f"{name}: {slope:#.2g}")
        across = np.abs(np.array(expected) - predicted).reshape(2, 1)
        estimates(right, [predicted], [[slope, low, high]], number, xerr=across)
    left.set(xscale="log", yscale="log", xlabel="packet loss rate", ylabel="rise, nats a token")
    left.set_title("Loss costs in proportion to its rate")
    right.set_title("Passes without losses predict how much")
    left.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g} %"))
    right.set(xscale="log", yscale="log", xlabel="predicted, nats for each 1 %", ylabel="measured, nats for each 1 %")
    for axis in (left.xaxis, left.yaxis, right.xaxis, right.yaxis):
        axis.set_minor_formatter(NullFormatter())
    for axis in (left.yaxis, right.xaxis, right.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda nats, _: f"{nats:g}"))  # powers would be too small to read
    shared_legend(figure, left, title="nats for each 1 % of loss", loc="outside right center", ncols=1)
    return figure


def repairs_figure(found: list[dict[str, Any]], rate: float) -> Figure:
    """Draw what each repair leaves in the models that others trained, beside the packets that it sends in addition."""
    repaired = {name: rows for name, rows in results_of(found, "repairs").items() if not name.startswith("gpt2")}
    count = max(len(repaired), 1)
    how: dict[str, Any] = {"layout": "constrained", "sharey": True, "squeeze": False}
    figure, axes = plt.subplots(1, count, figsize=(COLUMN * min(count, 2), 2.1), **how)
    for ax, (model, rows) in zip(axes[0], repaired.items(), strict=False):
        by_name = {row["repair"]: row for row in rows}
        names = [name for name in REPAIRS if name in by_name]
        places = -np.arange(len(names))
        values = [[by_name[name]["rise"][end] for end in Estimate._fields] for name in names]
        estimates(ax, places, values, list(CAPTIONS).index(model), across=True)
        ax.set_yticks(places, [REPAIRS[name] for name in names])
        more = [100 * by_name[name]["reliable_share"] * rate / (1 - rate) for name in names]
        ax.secondary_yaxis("right").set_yticks(places, [f"+{each:.1f} %" for each in more])
        ax.set(title=CAPTIONS[model], xlabel=f"rise at {100 * rate:g} %, nats")
        ax.set_xlim(left=0)
    figure.suptitle("What each repair leaves, and packets sent in addition", fontsize="medium")
    return figure


def answer(study: Study) -> dict[str, Any]:
    """Return the models' table, the line, repairs and depth, and draw their figures."""
    found = records(study.results / "models")
    rows, models = line_rows(found), table(found)
    models = models.reindex([name for name in CAPTIONS if name in models.index])
    settings, lossless, norms = found[0]["settings"], results_of(found, "lossless"), records(study.results / "norms")
    study.draw(line_figure(rows, models), "line")
    study.draw(repairs_figure(found, ModelsConfig().repair_rate), "repairs")
    return {
        "names": CAPTIONS,
        "sequences": settings["blocks"],
        "tokens": settings["block_size"] or Measurement.BLOCK_SIZE,
        "mtu_bytes": settings["mtu_bytes"],
        "repair_rate": ModelsConfig().repair_rate,
        "models": json_rows(models.rename_axis("model").reset_index()),
        "line": json_rows(rows),
        "repairs": results_of(found, "repairs"),
        "bursts": results_of(records(study.results / "models_bursts"), "repairs")["smollm2-135m"],
        "precision": results_of(found, "precision"),
        "depths": json_rows(depths(found)),
        "placement": {name: each for name, each in results_of(found, "placement").items() if each is not None},
        "owners": owners(lossless["smollm2-135m"], int(models["ranks"]["smollm2-135m"]), settings["batch_size"]),
        "critical": {name: len(each["critical"]) / len(each["scores"]) for name, each in lossless.items()},
        "norms": {part: results_of(norms, part, ("qwen3", "olmo2", GEMMA)) for part in ("predicted", "slope")},
    }


# The claims of the paper that rest on these results. A model with random weights is a control, and no model.


def trained(results: Results) -> list[dict[str, Any]]:
    """Return the rows of the models that are trained, and whose slope is measured."""
    return [row for row in results["models"] if not row["model"].endswith(SCRATCH) and row["slope"] is not None]


def factor(value: float) -> float:
    """Return how many times a ratio is off, in either direction."""
    return max(value, 1 / value)


@claim
def rises_lie_on_a_line(results: Results) -> Claim:
    """Require that every trained model's slope at 3 % is within a quarter of that at 1 %, in three models at least."""
    rows = [row for row in results["line"] if row["loss_rate"] == 0.03 and not row["model"].endswith(SCRATCH)]
    off = {row["model"]: factor(row["value"] / row["line"]) for row in rows}
    return Claim(len(off) >= 3 and max(off.values()) < 1.25, off)


@claim
def the_line_holds_to_ten_per_cent(results: Results) -> Claim:
    """Require rises up to 10 % within a factor of 1.45 of the line, and at 20 % two off both the line and the curve."""
    rows = [row for row in results["line"] if not row["model"].endswith(SCRATCH)]
    off = [factor(row["value"] / row["line"]) for row in rows if row["loss_rate"] <= 0.1]
    ended = [row_of(rows, model=name, loss_rate=0.2) for name in REPAIRED]
    times, (smollm2, gemma) = ([row["value"] / row[of] for row in ended] for of in ("line", "curve"))
    holds = sum(row["loss_rate"] == 0.1 for row in rows) >= 4 and max(off) < 1.45 < min(times) and max(times) < 1.6
    return Claim(holds and smollm2 > 1.45 and gemma > max(times), {"farthest": max(off), "beyond": max(times)})


@claim
def slopes_differ(results: Results) -> Claim:
    """Require ten times between the extremes, apart, a third between SmolLM2 and Gemma, not, and Qwen's far below."""
    rows = sorted(trained(results), key=lambda row: row["slope"])
    smollm2, gemma, qwen = (row_of(rows, model=name) for name in ("smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b"))
    times, real = rows[-1]["slope"] / rows[0]["slope"], smollm2["slope"] / gemma["slope"]
    apart = rows[-1]["low"] > rows[0]["high"] and 1.25 < real < 1.45 and smollm2["low"] < gemma["high"]
    numbers = {"times": times, "real": real, "qwen": smollm2["slope"] / qwen["slope"]}
    return Claim(times > 10 and apart and qwen["high"] < gemma["low"] / 2, numbers)


@claim
def random_weights_bear_any_loss(results: Results) -> Claim:
    """Require that the control's slope is under a tenth of every trained model's."""
    controls = [row["high"] for row in results["models"] if row["model"].endswith(SCRATCH)]
    least, most = min(row["slope"] for row in trained(results)), max(controls, default=math.inf)
    return Claim(most < least / 10, {"at most": most, "least": least})


@claim
def a_lossless_pass_predicts_the_slope(results: Results) -> Claim:
    """Require five slopes within two fifths of the predicted ones, in their order, and a mean's term under a tenth."""
    rows = sorted(trained(results), key=lambda row: row["slope"])
    off, predicted = {row["model"]: factor(row["ratio"]) for row in rows}, [row["predicted"] for row in rows]
    holds = len(off) == 5 and max(off.values()) < 1.4 and predicted == sorted(predicted)
    holds &= max(abs(row["mean_share"]) for row in rows) < 0.1
    return Claim(holds, {**off, "farthest": max(off.values())})


@claim
def a_model_that_normalises_sums_costs_more(results: Results) -> Claim:
    """Require a slope above the prediction and above another model's, whose prediction is equal, at two rates.

    A third model's slope must lie between, and be too high for its prediction as well. The three predictions must be
    within a quarter of each other.
    """
    expected, other, third = (results["norms"]["predicted"][shape]["slope"] for shape in ("olmo2", "qwen3", GEMMA))
    slopes = {shape: [each["slope"], *each["checks"].values()] for shape, each in results["norms"]["slope"].items()}
    pairs = list(zip(slopes["olmo2"], slopes["qwen3"], strict=True))
    between = zip(pairs, slopes[GEMMA], strict=True)
    apart = all(
        ours["value"] > each["value"] > max(theirs["value"], 1.3 * third["value"]) for (ours, theirs), each in between
    )
    apart &= all(ours["low"] > max(theirs["high"], expected["high"]) for ours, theirs in pairs)
    times = [ours["value"] / theirs["value"] for ours, theirs in pairs]
    off = [ours["value"] / expected["value"] for ours, _ in pairs]
    values = [each["value"] for each in (expected, other, third)]
    holds = len(pairs) == 2 and apart and factor(values[0] / values[1]) < 1.1 and max(values) < 1.25 * min(values)
    return Claim(holds, {"least": min(times), "most": max(times), "off": min(off), "off at most": max(off)})


@claim
def one_real_model_has_critical_packets(results: Results) -> Claim:
    """Require that most sequences of SmolLM2 have a critical packet, and none of another model, two of them real."""
    critical = {name: number for name, number in results["critical"].items() if not name.endswith(SCRATCH)}
    others = [number for name, number in critical.items() if name != "smollm2-135m"]
    real = [name for name in critical if not name.startswith("gpt2")]
    excluded = 1 - 0.025 ** (1 / results["sequences"])  # Clopper and Pearson (1934), for none of so many
    holds = critical["smollm2-135m"] > 0.5 and max(others) == 0 and len(real) >= 3
    return Claim(holds, {"most": critical["smollm2-135m"], "excluded": excluded})


@claim
def an_owner_sends_nothing(results: Results) -> Claim:
    """Require a critical packet in one sequence of those that the sending rank owns, and in all other sequences."""
    owned = results["owners"]
    return Claim(owned["owned, critical"] == 1 < owned["owned"] and owned["others, critical"] == owned["others"], owned)


@claim
def damage_sits_at_the_ends(results: Results) -> Claim:
    """Require that the outer sixths of SmolLM2's layers do over half of the damage, and the inner two under an eighth.

    Each outer sixth must do twice as much as each of the inner two.
    """
    rows = pd.DataFrame(row for row in results["depths"] if row["model"] == "smollm2-135m")
    damage = rows.groupby("first layer")["value"].sum().to_numpy()
    share, inner = (float(damage[part].sum() / damage.sum()) for part in ([0, -1], [2, 3]))
    holds = share > 0.5 and inner < 0.125 and min(damage[[0, -1]]) > 2 * max(damage[[2, 3]])
    return Claim(bool(holds), {"share": share, "inner": inner})


def left(results: Results, *models: str) -> list[dict[str, dict[str, float]]]:
    """Return the rise that each repair leaves each model."""
    return [{row["repair"]: row["rise"] for row in results["repairs"][model]} for model in models]


@claim
def two_resends_leave_least(results: Results) -> Claim:
    """Require that two resends leave two real models less than any other repair, lost critical packets included.

    Intervals must be apart, and hold the rise at the loss rate that two resends leave. Priority resend must leave 2.5
    to 5.5 times as much. In bursts, two resends must leave less than priority resend, and under 0.02 nats.
    """
    rises, best, rate = left(results, *REPAIRED), "retransmit(2)", results["repair_rate"] ** 3
    row = row_of(results["models"], model="smollm2-135m")
    added = {"smollm2-135m": rate * row["critical"] * row["damage"], "gemma3-270m": 0.0}
    holds = True
    for name, each in zip(REPAIRED, rises, strict=True):
        ours, line = each[best], row_of(results["line"], model=name, loss_rate=0.001)["value"]
        holds &= abs(rate - 0.001) < 1e-9 and ours["low"] < line < ours["high"]
        holds &= ours["high"] + added[name] < min(each[other]["low"] for other in each if other != best)
        priority = each[PRIORITY]["value"]
        holds &= 2.5 * (ours["value"] + added[name]) < priority < 5.5 * ours["value"]
    in_bursts = {row["repair"]: row["rise"] for row in results["bursts"]}
    holds &= in_bursts[best]["high"] < min(0.02, in_bursts[PRIORITY]["low"] - added["smollm2-135m"])
    return Claim(holds, {"added": added["smollm2-135m"]})


@claim
def reliable_ends_remove_a_part(results: Results) -> Claim:
    """Require that reliable ends leave under half of SmolLM2's rise, over half of Gemma's, intervals apart."""
    rises, ends = left(results, *REPAIRED), "protect_layers(2, 2)"
    apart = all(each[ends]["high"] < each["zero"]["low"] for each in rises)
    smollm2, gemma = (each[ends]["value"] / each["zero"]["value"] for each in rises)
    return Claim(apart and smollm2 < 0.5 < gemma, {"smollm2": smollm2, "gemma": gemma})


@claim
def first_tokens_remove_no_bulk(results: Results) -> Claim:
    """Require that the first token's packets leave over three quarters of the rise, critical packets apart."""
    shares = [each["protect_first(1)"]["value"] / each["zero"]["value"] for each in left(results, *REPAIRED)]
    return Claim(min(shares) > 0.75, {"share": min(shares)})


@claim
def hadamard_helps_some_and_harms_another(results: Results) -> Claim:
    """Require that Hadamard mixing leaves 0.4 to 0.6 of our GPT-2s' rises, and adds to Gemma's, intervals apart."""
    *ours, gemma = left(results, "gpt2-nano", "gpt2-micro", "gemma3-270m")
    shares = [each["hadamard(64)"]["value"] / each["zero"]["value"] for each in (*ours, gemma)]
    holds = all(0.4 < share < 0.6 for share in shares[:-1]) and gemma["hadamard(64)"]["low"] > gemma["zero"]["high"]
    return Claim(holds, {"gemma": shares[-1]})


@claim
def one_per_cent_costs_more_than_int8_and_less_than_int4(results: Results) -> Claim:
    """Require this of two real models, intervals apart."""
    rows = {row["model"]: {end: row[end] / 100 for end in ("low", "high")} for row in results["models"] if row["slope"]}
    pairs = [(rows[name], results["precision"][name]) for name in REPAIRED]
    holds = all(bits["int8"]["high"] < row["low"] and row["high"] < bits["int4"]["low"] for row, bits in pairs)
    return Claim(holds, {})


@claim
def exchanged_units_end_the_collapse(results: Results) -> Claim:
    """Require that each single sequence of SmolLM2 has a critical packet, and none once ranks exchanged units."""
    counts = results["placement"]["smollm2-135m"]
    ended = counts["before"] == counts["sequences"] and not counts["after"] and counts["score_changed_by"] < 1e-5
    return Claim(ended, counts)


def main() -> None:
    """Measure as the command line says."""
    config = parse(ModelsConfig, __doc__)
    measure(config, lambda part: print(part or ".", end="\n" if part else "", flush=True))
    print("\n", table(records(Path(config.output_dir))).T.to_string(), sep="")


if __name__ == "__main__":
    run_as_command(main)
