"""Several models, one line each: the predicted slope, records, and their table."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from lossytp.network.scope import MODULES
from lossytp.study.run import execute
from lossytp.tolerance.measure import Measurement
from paper.models import ModelsConfig, depths, exchange_units_, line_rows, measure, records, sha256, sixths, table
from paper.second_order import SecondOrder
from tests.parallel.families import tiny

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "45_models.ipynb"
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of folly. "
PARTS = ["lossless", "predicted", "slope", "curve", "line", "repairs", "precision", "depth", "placement"]
LAYERS, HOPS, PACKETS = 4, 2, 2  # of gpt2-nano, of a sum over two ranks, and of a hop in `terms`


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT * 100)
    return {"text": str(file), "block_size": 8, "blocks": 2, "min_draws": 2, "max_draws": 2, "tensor_parallel_size": 2}


def config_of(small, folder, **values):
    return ModelsConfig(**{"model_name": "gpt2-nano", "output_dir": str(folder), **small, **values})


def chosen_but(*at_risk):
    """All packets, as those that are not scaled, but for one."""
    return {
        (layer, module): {
            hop: [packet for packet in range(PACKETS) if (layer, module, hop, packet) != at_risk] for hop in range(HOPS)
        }
        for layer in range(LAYERS)
        for module in MODULES
    }


@pytest.fixture
def terms(small, tmp_path):
    config = config_of(small, tmp_path, mtu_bytes=2092)  # 512 of 1,024 elements
    measurement = Measurement(config)
    return SecondOrder(measurement, config, measurement.messages[0], {}, 2)


def test_both_terms_are_sums_over_packets(terms):
    """Each packet alone, in one direction, gives what random directions of all of them estimate."""
    first_B, directions_SB = terms.first_B(), np.array([terms.second_B(seed) for seed in range(60)])
    alone = []
    for layer, module, hop, packet in np.ndindex(LAYERS, len(MODULES), HOPS, PACKETS):
        terms.chosen = chosen_but(layer, MODULES[module], hop, packet)
        alone.append((terms.first_B(), terms.second_B(0)))
    first_alone_B, second_alone_B = np.sum(alone, axis=0)
    assert first_B == pytest.approx(first_alone_B, abs=0.02 * abs(first_alone_B).max())
    error_B = directions_SB.std(0) / 60**0.5
    assert (abs(directions_SB.mean(0) - second_alone_B) < 4 * error_B).all()
    assert (error_B < 0.1 * second_alone_B).all(), "control: sharp enough to fail"


def test_the_first_term_is_the_rise_if_all_packets_shrink(terms):
    terms.step = 0.0
    before_B = terms.measurement.score(terms.model, terms.ids_BT)
    terms.step = -0.002
    after_B = terms.measurement.score(terms.model, terms.ids_BT)
    assert (after_B - before_B) / 0.002 == pytest.approx(terms.first_B(), rel=0.1, abs=0.02)
    assert abs(terms.first_B()).max() > 0.2, "control"


def test_ranks_that_exchange_hidden_units_compute_the_same():
    mlp = tiny("llama").model.layers[0].mlp
    x, before = torch.randn(3, mlp.hidden_size, dtype=torch.float64), copy.deepcopy(mlp)
    exchange_units_(mlp, 0, 2, 4)
    assert torch.allclose(mlp(x), before(x), atol=1e-12)
    shards, shards_before = (each.gate_proj.weight.chunk(4) for each in (mlp, before))
    assert all(torch.equal(shards[rank], shards_before[other]) for rank, other in enumerate((2, 1, 0, 3)))


def test_every_part_has_a_record_and_none_is_repeated(small, tmp_path, monkeypatch):
    config = config_of(small, tmp_path, block_size=32)
    shown = []
    found = measure(config, shown.append)
    assert [part for part in shown if part] == list(found) == PARTS
    files = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert sorted(file.name for file in files) == sorted(f"gpt2-nano-{part}.json" for part in PARTS)
    assert str(tmp_path) not in "".join(file.read_text() for file in files), "no path"
    monkeypatch.setattr("paper.models.Measurement", None)
    assert measure(config, shown.append) == found
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == files
    with pytest.raises(ValueError, match=r"gpt2-nano-lossless.json has seed = 1234, not 1: give that"):
        measure(config.replace(seed=1))
    with pytest.raises(ValueError, match=r"gpt2-nano-line.json has line_rates = "):
        measure(config.replace(line_rates="0.1"))
    predicted, curve = found["predicted"]["slope"]["value"], found["curve"]
    assert curve["0.001"]["value"] / 0.001 == pytest.approx(predicted, rel=0.05)
    assert list(curve) == list(found["line"]) == ["0.001", "0.003", "0.1", "0.2"]

    everything = records(tmp_path)
    row = table(everything).loc["gpt2-nano"]
    assert row["sha256"] == sha256("gpt2-nano")[:12]
    assert row["ratio"] == row["slope"] / row["predicted"]
    assert row["rate_0.01_delivered"] == pytest.approx(0.01 / row["slope"])
    assert (row["protect_layers(2, 2)"], row["share of protect_layers(2, 2)"]) == (
        pytest.approx(0, abs=1e-5),
        pytest.approx(1, rel=0.2),
    )
    assert len(depths(everything)) == LAYERS * len(MODULES)
    assert table([each for each in everything if each["part"] == "lossless"])["lossless"].notna().all()


def test_a_line_goes_through_the_first_rate_and_the_curve_is_the_predicted_one():
    slope = {"value": 4.0, "low": 3.0, "high": 5.0}
    results = {
        "slope": {"rate": 0.01, "slope": slope, "checks": {"0.03": {"value": 5.0, "low": 4.0, "high": 6.0}}},
        "line": {"0.1": {"value": 0.9, "low": 0.8, "high": 1.0}},
        "curve": {"0.1": {"value": 0.7, "low": 0.6, "high": 0.8}},
    }
    rows = line_rows([{"model": "gpt2-nano", "part": part, "result": result} for part, result in results.items()])
    assert rows["loss_rate"].tolist() == [0.01, 0.03, 0.1]
    assert rows["value"].tolist() == pytest.approx([0.04, 0.15, 0.9])
    assert rows["low"].tolist() == pytest.approx([0.03, 0.12, 0.8])
    assert rows["line"].tolist() == pytest.approx([0.04, 0.12, 0.4])
    assert rows["curve"].tolist() == pytest.approx([np.nan, np.nan, 0.7], nan_ok=True)


def test_sixths_cover_every_layer_once():
    assert sixths(30) == [(0, 5), (5, 10), (10, 15), (15, 20), (20, 25), (25, 30)]
    for layers in (1, 4, 8, 24):
        parts = sixths(layers)
        assert [layer for first, stop in parts for layer in range(first, stop)] == list(range(layers))
        assert len(parts) == min(6, layers)


@pytest.mark.slow
def test_the_notebook_tabulates_a_model_and_a_control(small, tmp_path):
    settings = {name: small[name] for name in ("text", "max_draws", "tensor_parallel_size")}
    values = {"models": ["gpt2-nano", "gpt2-nano-wide-scratch"], "sequences": 2, "tokens": 32, "draws": 2}
    execute(
        NOTEBOOK, tmp_path / "out.ipynb", {**values, "settings": settings, "results_dir": str(tmp_path / "records")}
    )
    assert len(list((tmp_path / "records").iterdir())) == 2 * len(PARTS)
