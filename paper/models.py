"""What packet loss costs several models, and how much of it a pass without losses predicts.

python -m paper.models --model_name smollm2-135m
python -m paper.models --model_name path/to/model.gguf

Each model has one record for each of five parts. What has a record is not measured again. Weights from a file whose
origin nobody has checked are known by its SHA-256 alone, and no claim may rest on them alone.

The predicted slope is written before the slope is measured. Each packet k at risk carries a part x_k of a sum, and
losing it adds -x_k. With g and H the gradient and the Hessian of the cross-entropy with respect to the sums, to second
order and for small loss rates p, where no two losses meet,

    rise = p * sum_k (-g.x_k + x_k.H.x_k / 2).

The second term is half the trace of H times the covariance of the error, which is p * sum_k x_k x_k^T: the linearity
theorem of quantisation (Malinovskii et al., "HIGGS", NAACL 2025, arXiv:2411.17525) for another noise. Zeros also have
a mean, -p x_k, and so the first term, which quantisation lacks. H is taken as the Gauss-Newton matrix: x.H.x is the
mean over tokens of the variance, under the model's own prediction of a token, of the logits' directional derivative.
Random signs s_k replace the sum over packets by one direction (Hutchinson 1989): E[d.H.d] for d = sum_k s_k x_k. Both
derivatives are central differences: a pass in which each packet is multiplied by 1 + eps s_k, and one by 1 - eps s_k.

Critical packets (`lossytp.tolerance`) are delivered, in the prediction and while losses are drawn.

Shapes: N sequences, B of them in one message, T tokens of each, V words, M elements of a message.
"""

import copy
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from lossytp.network.scope import MODULES, Site
from lossytp.parallel.collectives import Message
from lossytp.parallel.plans import blocks_of
from lossytp.study.statistics import Estimate, t_interval
from lossytp.tolerance.config import NO_REPAIR, Setup, ToleranceConfig
from lossytp.tolerance.measure import Account, Lossless, Measured, Measurement, Rises, estimate_of
from lossytp.tolerance.packets import Found, Packet, Watch, chosen_in
from lossytp.tolerance.report import report_of
from lossytp.training.command_line import parse, run_as_command
from lossytp.training.files import write_atomically
from lossytp.training.groups import NetworkSettings
from lossytp.training.models import GENERATION, MODELS, build_model, load_tokenizer
from lossytp.training.record import commit
from lossytp.training.settings import Count, Share
from lossytp.training.shapes import SCRATCH, gguf_file
from paper.study import Study, json_rows

EPSILON = 0.01  # relative step of the central differences
PARTS_OF_DEPTH = 6
WEIGHTS = "model.safetensors"
NOT_KEPT = ("model_name", "output_dir")  # paths


class ModelsConfig(ToleranceConfig):
    """A model, its text, and what to measure of it."""

    blocks: Annotated[int, Field(ge=2)] | None = 32
    """Number of sequences, from the text's beginning."""
    min_draws: Count = 5
    """Smallest number of draws of losses for each row."""
    max_draws: Count = 10
    """Largest number of draws of losses for each row."""
    repairs: str = "protect_layers(2, 2),protect(0.1),protect_first(1)"
    """Repairs, separated by commas."""
    repair_rate: Share = 0.1
    """Packet loss rate at which repairs are measured."""
    depth_rate: Share = 0.2
    """Packet loss rate of the map by depth, where one module of one sixth of the layers loses packets."""
    depth_messages: Count = 1
    """Messages of the map by depth, from the text's beginning."""
    probes: Count = 2
    """Random directions of the predicted slope."""
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
        file = self.folder / f"{self.name}-{part}.json"
        settings = {key: value for key, value in self.config.with_text().as_dict().items() if key not in NOT_KEPT}
        if file.exists():
            record = json.loads(file.read_text(encoding="utf-8"))
            differ = [key for key, value in settings.items() if record["settings"].get(key) != value]
            if differ:
                raise ValueError(f"{file} has another {differ[0]}: give the same, or another output_dir")
            return record["result"]
        self.show(part)
        result = measure()
        record = {
            "model": self.name,
            "part": part,
            "weights_sha256": sha256(self.config.model_name),
            "tensor_parallel_size": self.account.measurement.ranks,
            "layers": len(blocks_of(self.account.measurement.dense)),
            "first_tokens": self.account.measurement.first_tokens.get("first_tokens", []),
            "settings": settings,
            "commit": commit(),
            "result": result,
        }
        write_atomically(file, json.dumps(record, indent=1, allow_nan=False) + "\n")
        return result

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
        for part, measure in (("predicted", self.predicted), ("slope", self.slope), ("repairs", self.repairs)):
            yield part, self.record(part, partial(measure, lossless, found))
        yield "depth", self.record("depth", partial(self.depth, lossless, found))

    def predicted(self, lossless: Lossless, found: Found) -> dict[str, Any]:
        """Predict the slope from passes without losses, as this module says."""
        measurement, critical = self.account.measurement, [packet for packet, _ in found.critical]
        first, second = [], []
        for number, ids_BT in enumerate(measurement.messages):
            terms = SecondOrder(measurement, self.config, ids_BT, chosen_in(critical, number))
            first.append(terms.first_B())
            second.append(np.mean([terms.second_B(seed) for seed in range(self.config.probes)], axis=0))
        terms_N = {"first_order": np.concatenate(first), "second_order": np.concatenate(second)}
        estimates = {name: t_interval(each_N).as_json() for name, each_N in terms_N.items()}
        return {"slope": t_interval(sum(terms_N.values(), np.zeros(1))).as_json(), **estimates}

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


class SecondOrder:
    """The two terms of the predicted slope on the B sequences of one message, without its chosen packets."""

    def __init__(self, measurement: Measurement, config: ModelsConfig, ids_BT: Tensor, chosen: Any) -> None:
        settings = config.network(Setup("direct", "reduce", NO_REPAIR, config.rates()[0]))
        self.model, self.network = measurement.over(settings, repair=Watch())
        self.network.alone, self.network.see = True, self._scale_
        self.measurement, self.ids_BT, self.chosen = measurement, ids_BT, chosen
        self.step, self.signs, self.generator = 0.0, False, torch.Generator()

    def _scale_(self, message: Message, site: Site) -> None:
        """Multiply each packet at risk by 1 + step, or by 1 + step * s_k with random signs."""
        for number, hop in enumerate(message.hops):
            packets = hop.num_packets(message.capacity)
            step_P = torch.full((packets,), self.step)
            if self.signs:
                step_P *= 2 * torch.randint(0, 2, (packets,), generator=self.generator) - 1
            step_P[self.chosen.get((site.layer, site.module), {}).get(number, [])] = 0
            step_M = step_P.repeat_interleave(message.capacity)[: hop.stop - hop.start].to(message.rows_LN)
            message.rows_LN[message.rows_of(hop.positions), hop.start : hop.stop] *= 1 + step_M

    def first_B(self) -> np.ndarray:
        """Return the rise of each sequence per unit of loss rate by the error's mean, -sum_k g.x_k."""
        self.signs, scores = False, []
        for self.step in (-EPSILON, EPSILON):
            scores.append(self.measurement.score(self.model, self.ids_BT))
        return (scores[0] - scores[1]) / (2 * EPSILON)

    def second_B(self, seed: int) -> np.ndarray:
        """Return an estimate of sum_k x_k.H.x_k / 2 of each sequence, from one direction."""
        self.signs, logits = True, []
        with torch.inference_mode():
            for self.step in (EPSILON, -EPSILON, 0.0):
                self.generator.manual_seed(seed)
                logits.append(self.model(input_ids=self.ids_BT, use_cache=False).logits)
            found = []
            for up_TV, down_TV, here_TV in zip(*logits, strict=True):
                slope_TV, chance_TV = (up_TV - down_TV)[:-1].float() / (2 * EPSILON), here_TV[:-1].float().softmax(-1)
                mean_T1 = (chance_TV * slope_TV).sum(-1, keepdim=True)
                found.append(float((chance_TV * (slope_TV - mean_T1).square()).sum(-1).mean()) / 2)
        return np.array(found)


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

    `ratio` is the measured slope over the predicted one. `rate_X` is the loss rate that costs X nats with the critical
    packets lost, and `rate_X_delivered` with them delivered. A repair has its rise, and its share of reliable packets.
    """
    rows: dict[str, dict[str, Any]] = {}
    for record in found:
        row, result = rows.setdefault(record["model"], {}), record["result"]
        row |= {"sha256": record["weights_sha256"][:12], "ranks": record["tensor_parallel_size"]}
        if record["part"] == "lossless":
            row["lossless"] = float(np.mean(result["scores"]))
        elif record["part"] == "predicted":
            row["predicted"] = result["slope"]["value"]
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


def answer(study: Study) -> dict[str, Any]:
    """Return the table of the models, and the maps by depth."""
    found = records(study.results / "models")
    return {"models": json_rows(table(found).rename_axis("model").reset_index()), "depths": json_rows(depths(found))}


def main() -> None:
    """Measure as the command line says."""
    config = parse(ModelsConfig, __doc__)
    measure(config, lambda part: print(part or ".", end="\n" if part else "", flush=True))
    print("\n", table(records(Path(config.output_dir))).T.to_string(), sep="")


if __name__ == "__main__":
    run_as_command(main)
