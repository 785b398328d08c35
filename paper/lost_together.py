"""Does what is lost together tell rings, bursts and packet sizes apart?

`paper.second_order` says how: the loss of packet k costs x_k.H.x_k / 2, and x_k is all that it carried: the partial sum
of several ranks in a ring, several tokens in a large packet. The squared error, |x_k|^2, lacks the cross terms between
its parts. Bursts lose packets together: their losses have the covariance
p (1 - p) c^d at a distance of d packets, with c = 1 - (transition rates) of the channel of Gilbert (1960).

What was predicted, and what was found, stands beside the records, in `results/paper/lost_together/README.md`.
"""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from lossytp.network.checks import refuse_if
from lossytp.network.scope import Site
from lossytp.parallel.collectives import Message
from lossytp.study.statistics import Estimate, t_interval
from lossytp.tolerance.config import NO_REPAIR
from lossytp.tolerance.measure import Account, Lossless, Measurement, estimate_of
from lossytp.training.command_line import parse, run_as_command
from paper.models import ModelsConfig, factor, kept
from paper.second_order import SecondOrder
from paper.study import Claim, Results, Study, claim, json_rows, row_of

NETWORKS: dict[str, dict[str, Any]] = {
    "direct": {},
    "ring": {"algorithms": "ring"},
    "tree": {"algorithms": "tree"},
    "switch": {"algorithms": "switch"},
    "216 bytes": {"mtu_bytes": 216},
    "9,000 bytes": {"mtu_bytes": 9000},
    "bursts of 8": {"loss_type": "g-e", "mean_burst_packets": 8.0},
    "ring, 216 bytes": {"algorithms": "ring", "mtu_bytes": 216},
}


class LostTogetherConfig(ModelsConfig):
    """A model, its text, and the number of draws."""

    loss_rates: str | None = "0.01"
    """Packet loss rate of every link."""
    min_draws: int = 20
    """Smallest number of draws of losses for each network."""
    max_draws: int = 20
    """Largest number of draws of losses for each network."""
    output_dir: str = "results/paper/lost_together"
    """Folder for the records."""


class Squares(SecondOrder):
    """The second-order terms, and the sum of all packets' squared norms in the latest pass."""

    squares = 0.0

    def _scale_(self, message: Message, site: Site) -> None:
        for hop in message.hops:
            carried_M = message.rows_LN[message.rows_of(hop.positions), hop.start : hop.stop].sum(0)
            self.squares += float(carried_M.square().sum())
        super()._scale_(message, site)


def correlation(config: ModelsConfig) -> float:
    """Return the correlation of the losses of two consecutive packets."""
    if config.mean_burst_packets is None:
        return 0.0
    rate, end = config.rates()[0], 1 / config.mean_burst_packets
    return 1 - end - end * rate / (1 - rate)


def measured_on(config: LostTogetherConfig) -> dict[str, Any]:
    """Return the squares, the predicted and the measured slope on one network, in nats per unit of loss."""
    rate, measurement = config.rates()[0], Measurement(config)
    first, second, squares = [], [], 0.0
    for ids_BT in measurement.messages:
        terms = Squares(measurement, config, ids_BT, {}, config.probes)
        terms.correlation = correlation(config)
        first.append(terms.first_B())
        second.append(terms.mean_second_B())
        terms.squares = 0.0
        terms.scaled_B(0.0)
        squares += terms.squares
    predicted = t_interval(np.concatenate(first) + np.concatenate(second))
    account = Account(measurement, config.algorithms, "reduce")
    scores = np.concatenate([measurement.score(measurement.dense, ids_BT) for ids_BT in measurement.messages])
    row = account.rises(NO_REPAIR, rate, Lossless(scores.tolist(), [], []), [], lambda: print(end=".", flush=True))
    slope = Estimate(*(end / rate for end in estimate_of(row.rises, config)))
    return {"squares": squares, "predicted": predicted.as_json(), "slope": slope.as_json()}


def record_of(folder: Path, model: str, network: str) -> Path:
    """Return the file of a network's record."""
    return folder / f"{model}-{network.replace(', ', '-').replace(' ', '-')}.json"


def measure(config: LostTogetherConfig) -> dict[str, Any]:
    """Return the results by network; a network that has a record is not measured again.

    Raises:
        ValueError: if a setting is given that the networks differ in, or a record has other settings.
    """
    found = {}
    for name in sorted({name for changes in NETWORKS.values() for name in changes}):
        value = getattr(config, name)
        fault = f"is the network's: leave it out, since all of {', '.join(NETWORKS)} are measured"
        refuse_if(value != config.defaults()[name], name, value, fault)
    for network, changes in NETWORKS.items():
        file = record_of(Path(config.output_dir), Path(config.model_name).stem, network)
        changed = config.replace(**changes)
        found[network] = kept(file, changed, partial(measured_on, changed))
    return found


def table(found: dict[str, Any]) -> pd.DataFrame:
    """Tabulate slopes in multiples of the direct exchange's: measured, by the quadratic form, and by squares alone."""
    direct = found["direct"]
    rows = {
        network: {
            "measured": each["slope"]["value"] / direct["slope"]["value"],
            "half width": (each["slope"]["high"] - each["slope"]["low"]) / 2 / direct["slope"]["value"],
            "quadratic form": each["predicted"]["value"] / direct["predicted"]["value"],
            "squared error": each["squares"] / direct["squares"],
        }
        for network, each in found.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def answer(study: Study) -> dict[str, Any]:
    """Return the slopes of each network in multiples of the direct exchange's, for each model that has all records."""
    rows, folder = [], study.results / "lost_together"
    for file in sorted(folder.glob("*-direct.json")):
        model = file.name.removesuffix("-direct.json")
        files = {network: record_of(folder, model, network) for network in NETWORKS}
        if all(each.exists() for each in files.values()):
            found = table({network: json.loads(each.read_text(encoding="utf-8")) for network, each in files.items()})
            rows += json_rows(found.rename_axis("network").reset_index().assign(model=model))
    return {"lost_together": rows}


@claim
def the_quadratic_form_tells_networks_apart(results: Results) -> Claim:
    """Require the quadratic form within a quarter of all networks, and the squared error of routes alone."""
    rows = results["lost_together"]
    routed = [row for row in rows if row["network"] in ("ring", "tree", "switch")]
    farthest, squared, squared_routed = (
        max(factor(row["measured"] / row[predictor]) for row in of)
        for predictor, of in (("quadratic form", rows), ("squared error", rows), ("squared error", routed))
    )
    ring = max(row["measured"] for row in routed if row["network"] == "ring")
    numbers = {"farthest": farthest, "squared": squared, "squared, routed": squared_routed, "ring": ring}
    return Claim(max(farthest, squared_routed) < 1.25 and squared > 1.5, numbers)


@claim
def packet_size_has_no_sign(results: Results) -> Claim:
    """Require that small packets cost one model less, and large ones another, as predicted, beyond the interval."""
    rows = results["lost_together"]

    def margin(row: Mapping[str, Any]) -> float:  # of a quotient, whose two slopes have intervals
        direct = row_of(rows, model=row["model"], network="direct")["half width"]
        return math.hypot(row["half width"], row["measured"] * direct)

    small, large = ([row for row in rows if row["network"] == name] for name in ("216 bytes", "9,000 bytes"))
    cheaper = [
        {row["model"] for row in sized if row["measured"] + margin(row) < 1 and row["quadratic form"] < 1}
        for sized in (small, large)
    ]
    numbers = {"small": min(row["measured"] for row in small), "large": min(row["measured"] for row in large)}
    return Claim(bool(cheaper[0]) and bool(cheaper[1]) and cheaper[0] != cheaper[1], numbers)


def main() -> None:
    """Measure as the command line says."""
    torch.set_num_threads(1)
    print("\n", table(measure(parse(LostTogetherConfig, __doc__))).to_string(float_format="{:.2f}".format), sep="")


if __name__ == "__main__":
    run_as_command(main)
