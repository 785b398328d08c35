"""Pretrain a model, and measure how much loss it bears: in inference, and fine-tuned.

Models compare only if the bytes that are lost together are the same share of a token. So a packet carries a third of a
token's activations at every size.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lossytp.network.packets import Wire
from lossytp.study.analysis.sizes import FINE_TUNED
from lossytp.study.measurements.inference_rise import InferenceProbe
from lossytp.study.records import final_accuracies
from lossytp.training.config import PretrainConfig, TrainConfig
from lossytp.training.loop import run
from lossytp.training.pretraining.text import text_pattern
from lossytp.training.record import read_record
from lossytp.training.shapes import shape_of

PACKETS_PER_TOKEN = 3
BYTES = {True: 2, False: 4}  # of an activation, by whether training uses bf16


def rises_in_inference(
    config: PretrainConfig,
    settings: Mapping[str, Any],
    *,
    loss_rates: Sequence[float],
    draws: int,
    known: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Return how much losses raise the pretrained model's cross-entropy, in packets of two sizes.

    Args:
        config: the finished pretraining of a named shape.
        settings: of fine-tuning; its batches have the probe's shape.
        loss_rates: of the evaluations.
        draws: of losses.
        known: an earlier table. If it has all rows of this very model, they are returned: results keep no models.

    Returns:
        One row per draw: `run` (the name of the run's folder), `model_name`, `tokens` (of pretraining), `pretrained`
        (the cross-entropy in the record), `lossless` (the cross-entropy on the probe's text without losses),
        `mtu_bytes`, `whole_packets` (True for packets of 1500 bytes), `loss_rate`, `draw`, and `rise` (nats a token).

    Raises:
        ValueError: if the model is not pretrained yet.
    """
    folder = Path(config.output_dir)
    record = read_record(folder)
    if record is None:
        raise ValueError(f"{folder} has no record: pretrain the model first")
    pretrained = record["final"]["cross_entropy_clean"]
    asked = [(whole, rate, draw) for whole in (False, True) for rate in loss_rates for draw in range(draws)]
    if known is not None:
        same = (known["run"] == folder.name) & np.isclose(known["pretrained"], pretrained, rtol=1e-5)
        ours = known[same].set_index(["whole_packets", "loss_rate", "draw"])
        if set(asked) <= set(ours.index):
            return ours.loc[asked].reset_index()[list(known)]
    fine = TrainConfig.from_dict({**settings, "model_name": config.output_dir, "bf16": False})
    text = text_pattern(config)
    probe = InferenceProbe(config.output_dir, batch_size=fine.batch_size, length=fine.max_length, text=text)
    rows = []
    for whole in (False, True):
        size = TrainConfig.mtu_bytes if whole else packet_bytes(config, bf16=False)
        for rate in loss_rates:
            network = TrainConfig.from_dict({**fine.as_dict(), "loss_rate": rate, "mtu_bytes": size})
            shared = {"run": folder.name, "model_name": config.model_name, "tokens": config.tokens}
            shared |= {"pretrained": pretrained, "lossless": probe.lossless}
            shared |= {"mtu_bytes": size, "whole_packets": whole, "loss_rate": rate}
            rows += [shared | {"draw": draw, "rise": rise} for draw, rise in enumerate(probe.rises(network, draws))]
    return pd.DataFrame(rows)


def fine_tuned(
    config: PretrainConfig, settings: Mapping[str, Any], *, loss_rates: Sequence[float], seeds: int
) -> pd.DataFrame:
    """Return how accurate the pretrained model is once it is fine-tuned over lossy networks.

    Runs that are finished are not repeated. Their folders lie in the pretrained model's.

    Args:
        config: the pretraining of a named shape; it runs unless it is finished.
        settings: of fine-tuning.
        loss_rates: of training and evaluation.
        seeds: of fine-tuning.

    Returns:
        One row per run: `model_name`, `parameters`, `tokens` of pretraining, `pretrained`, the cross-entropy of the
        pretrained model, `loss_rate`, `mtu_bytes`, `seed`, and the run's `records.final_accuracies`.

    Raises:
        ValueError: if a folder holds a run with other settings, or the model of a missing run was deleted.
    """
    pretrained = run(config)
    shared: dict[str, Any] = {"model_name": config.model_name, "parameters": pretrained["parameters"]}
    shared |= {"tokens": config.tokens, "pretrained": pretrained["final"]["cross_entropy_clean"]}
    size = packet_bytes(config, bf16=settings.get("bf16", False))
    rows = []
    for seed in range(seeds):
        for rate in loss_rates:
            folder = f"{config.output_dir}/{FINE_TUNED}{rate:g}_seed{seed}"
            here = {"model_name": config.output_dir, "output_dir": folder}
            values = {**settings, **here, "loss_rate": rate, "mtu_bytes": size, "seed": seed}
            record = read_record(Path(folder))  # readable without the model, which results do not keep
            if record is None:
                record = run(TrainConfig.from_dict(values))
            _check_settings(folder, record, values)
            rows.append(shared | {"loss_rate": rate, "mtu_bytes": size, "seed": seed} | final_accuracies(record))
    return pd.DataFrame(rows)


def _check_settings(folder: str, record: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise ValueError if a finished run has other settings, but for the place of its model."""
    for name, value in values.items():
        if name != "model_name" and record["config"].get(name, value) != value:
            raise ValueError(
                f"{folder} holds a run with {name} = {record['config'][name]!r}, not {value!r}: delete this folder, or "
                "give another output_dir"
            )


def packet_bytes(config: PretrainConfig, *, bf16: bool) -> int:
    """Return the size of a packet that carries a third of a token's activations, header included.

    Raises:
        ValueError: if the model's shape is not known by its name.
    """
    shape = shape_of(config.model_name)
    if shape is None:
        raise ValueError(f"model_name = {config.model_name!r} has no known width: give a named shape")
    return Wire.header_bytes + BYTES[bf16] * round(shape.width / PACKETS_PER_TOKEN)
