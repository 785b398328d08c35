"""Test settings of the tensor-parallel ranks' messages, from the first step to the record, also over processes.

A run with a record is not repeated. Functions named `on_rank_...` run in every process.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lossytp.parallel.own_streams import PerRank
from lossytp.training.batches import evaluation_batches
from lossytp.training.engine import Engine, build_optimizer
from lossytp.training.loop import run
from tests.training.parallel_runs import ALL_REDUCES, BLOCKS, PARALLELISMS, curve, spied, task_in, the_data, train

pytestmark = pytest.mark.slow

SHORT = {"tensor_parallel_size": 2, "max_steps": 4}
LOSSY = {"loss_rate": 0.1}
OWN = {"reliable_gather": False}
DRIFTING = {**OWN, "replicated_gradients": "none"}
OPTIONS: dict[str, dict[str, Any]] = {
    "own streams": OWN,
    "own streams, lossy gradients": {**OWN, "replicated_gradients": "lossy"},
    "own copies": DRIFTING,
    "own copies, resynchronised": {**DRIFTING, "resync_every": 2},
    "own streams, masked backward": {**OWN, "masked_backward": True},
    "own streams around a ring": {**OWN, "algorithm": "ring"},
    "own streams by a tree, local": {**OWN, "algorithm": "tree", "repair": "local"},
    "shards": {"sequence_parallel": True},
    "shards, lossy gather": {"sequence_parallel": True, **OWN},
    "elements": {"control": "elements"},
    "noise": {"control": "noise"},
    "adjoint": {"exact_adjoint": True},
    "stale": {"repair": "stale"},
    "counted": {"repair": "rescale_counted"},
    "fec": {"repair": "fec(10, 8)"},
    "hadamard": {"repair": "hadamard(64)"},
    "retransmit": {"repair": "retransmit(1)"},
    "forward": {"lossy_direction": "forward"},
}


def short(folder: Path, **values: Any) -> dict[str, Any]:
    return train(folder, {**SHORT, **values})


def traffic(record: dict[str, Any]) -> dict[str, Any]:
    return record["network"]["training"]


def evaluations(record: dict[str, Any], name: str) -> list[Any]:
    return [point[name] for point in record["curves"]["eval"]]


@pytest.mark.parametrize("name", OPTIONS)
def test_without_losses_options_change_nothing(folder: Path, name: str) -> None:
    plain, record = short(folder), short(folder, **OPTIONS[name])
    assert curve(record) == pytest.approx(curve(plain), rel=1e-6)
    assert record["final"] == pytest.approx(plain["final"], rel=1e-5)
    lossy = short(folder, **LOSSY, **OPTIONS[name])
    assert curve(lossy) != pytest.approx(curve(plain), rel=1e-3)
    for point in record["curves"]["eval"]:
        assert point["score_spread_clean"] == point["score_spread_lossy"] == 0
        assert point["replica_drift"] == pytest.approx(0, abs=1e-6)
        assert point["stream_distance"] == (pytest.approx([0] * BLOCKS, abs=1e-6) if "own" in name else None)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("stale", "shards")])
def test_with_losses_every_option_matters(folder: Path, name: str) -> None:
    """Left out are stale, without earlier values since lengths differ, and shards, which lose what sums lose."""
    plain, record = short(folder, **LOSSY), short(folder, **LOSSY, **OPTIONS[name])
    assert curve(record) != pytest.approx(curve(plain), rel=1e-4)


def test_stale_fills_in_earlier_values_if_lengths_repeat(toy: Callable, tmp_path: Path) -> None:
    zero, stale = (
        train_toy(toy, tmp_path / repair, loss_rate=0.2, repair=repair, max_steps=8, eval_steps=4)
        for repair in ("zero", "stale")
    )
    assert traffic(stale) == traffic(zero)
    assert curve(stale)[0] == curve(zero)[0], "nothing has arrived before"
    assert curve(stale) != pytest.approx(curve(zero), rel=1e-3)


def train_toy(toy: Callable, where: Path, **values: Any) -> dict[str, Any]:
    return run(toy(output_dir=str(where), **values))


def test_bf16_on_the_wire_halves_the_packets_and_still_learns(toy: Callable, tmp_path: Path) -> None:
    learning = {"max_steps": 40, "learning_rate": 3e-3, "loss_rate": 0.01}
    full, half, fp32 = (
        train_toy(toy, tmp_path / str(dtype), wire_dtype=dtype, **learning) for dtype in (None, "bf16", "fp32")
    )
    assert curve(fp32) == curve(full)
    assert 0.5 <= traffic(half)["packets"] / traffic(full)["packets"] < 0.6
    assert half["final"]["accuracy_clean"] == 1.0
    clean = [train_toy(toy, tmp_path / f"clean {dtype}", wire_dtype=dtype) for dtype in (None, "bf16")]
    assert curve(clean[1]) == pytest.approx(curve(clean[0]), rel=0.02)
    assert curve(clean[1]) != curve(clean[0])


@pytest.mark.parametrize("wire_dtype", ["int8", "fp8", "int4"])
def test_a_model_learns_over_blocks_with_scales(toy: Callable, tmp_path: Path, wire_dtype: str) -> None:
    """Gradients are sent in blocks, too, and packets get lost."""
    learning = {"max_steps": 40, "learning_rate": 3e-3, "loss_rate": 0.01}
    full, blocks = (train_toy(toy, tmp_path / str(dtype), wire_dtype=dtype, **learning) for dtype in (None, wire_dtype))
    packets = traffic(blocks)["by_direction"]["backward"], traffic(full)["by_direction"]["backward"]
    assert packets[0]["packets"] < 0.4 * packets[1]["packets"]
    assert curve(blocks) != curve(full)
    assert blocks["final"]["accuracy_clean"] == 1.0
    assert blocks["config"]["wire_dtype"] == wire_dtype


def test_only_links_between_nodes_lose_packets(folder: Path) -> None:
    record = short(folder, **LOSSY, tensor_parallel_size=4, ranks_per_node=2)
    lossy = {link for link, row in traffic(record)["by_link"].items() if row["lost"]}
    assert lossy == {
        f"{src}->{dst}" for one, other in ((0, 2), (0, 3), (1, 2), (1, 3)) for src, dst in ((one, other), (other, one))
    }
    assert record["config"]["ranks_per_node"] == 2


def test_a_repairs_extra_packets_are_counted(folder: Path) -> None:
    plain = traffic(short(folder, **LOSSY))
    assert plain["extra"] == 0
    assert plain["missing"] == plain["lost"]
    fec = traffic(short(folder, **LOSSY, repair="fec(10, 8)"))
    assert fec["packets"] == plain["packets"] + fec["extra"]
    assert fec["extra"] >= plain["packets"] / 4
    assert 0 < fec["missing"] < fec["lost"] / 3
    again = traffic(short(folder, **LOSSY, repair="retransmit(1)"))
    assert again["packets"] == plain["packets"] + again["extra"]
    assert 0 < again["missing"] < again["lost"] / 3


def test_controls_lose_elements_or_nothing(folder: Path) -> None:
    plain, elements, noise = (
        traffic(short(folder, **LOSSY, control=control)) for control in (None, "elements", "noise")
    )
    assert elements["packets"] > 300 * plain["packets"]
    assert elements["observed_loss_rate"] == pytest.approx(0.1, abs=0.002)
    assert (noise["packets"], noise["messages"]["called"]) == (0, 0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"lossy_direction": "forward"}, {"by_direction": {"forward"}}),
        ({"lossy_direction": "backward"}, {"by_direction": {"backward"}}),
        ({"lossy_module": "attention"}, {"by_module": {"attention"}}),
        ({"lossy_module": "mlp", "lossy_direction": "backward"}, {"by_module": {"mlp"}, "by_direction": {"backward"}}),
        ({"lossy_layers": "1:3"}, {"by_layer": {"1", "2"}}),
        ({**OWN, "lossy_phase": "reduce"}, {"by_phase": {"reduce"}}),
        ({**OWN, "lossy_phase": "gather"}, {"by_phase": {"gather"}}),
        (
            {"sequence_parallel": True, **OWN, "lossy_phase": "gather"},
            {"by_operation": {"all_gather"}},
        ),
    ],
)
def test_only_the_chosen_part_loses_packets(folder: Path, values: dict, expected: dict) -> None:
    """All other messages are reliable, and not counted."""
    everywhere = {name: value for name, value in values.items() if not name.startswith("lossy_")}
    whole, part = (traffic(short(folder, **LOSSY, **each)) for each in (everywhere, values))
    share = 1.0
    for table, names in expected.items():
        assert part[table].keys() == names
        share *= len(names) / len(whole[table])
        assert all(row["lost"] > 0 for row in part[table].values())
    assert part["packets"] == whole["packets"] * share
    for table in ("by_direction", "by_module", "by_layer", "by_link"):
        if table not in expected:
            assert part[table].keys() == whole[table].keys()


def test_only_the_chosen_links_lose_packets(folder: Path) -> None:
    links = traffic(short(folder, **LOSSY, tensor_parallel_size=4, lossy_links="0>1,3>2"))["by_link"]
    assert len(links) == 12
    assert {link for link, row in links.items() if row["lost"]} == {"0->1", "3->2"}
    ring = traffic(short(folder, **LOSSY, tensor_parallel_size=4, lossy_links="0>1", algorithm="ring"))["by_link"]
    assert {link: row["lost"] > 0 for link, row in ring.items()} == {
        "0->1": True,
        "1->2": False,
        "2->3": False,
        "3->0": False,
    }
    down = traffic(short(folder, **LOSSY, lossy_links="-1>0", algorithm="switch", **OWN))["by_link"]
    assert {link for link, row in down.items() if row["lost"]} == {"-1->0"}


EVERY_STEP = ("stale", "noise", "elements", "own copies", "own streams", "shards, lossy gather", "adjoint")


@pytest.mark.parametrize("name", EVERY_STEP)
def test_evaluating_never_shifts_training(toy: Callable, tmp_path: Path, name: str) -> None:
    """Nor does it change the values of stale, the random numbers of noise, or dropout."""
    rare, often = (
        train_toy(toy, tmp_path / str(each), loss_rate=0.2, dropout=0.1, eval_steps=each, **OPTIONS[name])
        for each in (None, 1)
    )
    assert curve(often) == curve(rare)
    assert traffic(often) == traffic(rare)
    assert often["final"] == rare["final"]


def test_copies_drift_unless_their_gradients_are_reliable_and_resynchronising_limits_it(folder: Path) -> None:
    each_step = {**LOSSY, **OWN, "eval_steps": 1}
    drifts = {
        name: evaluations(short(folder, **each_step, **values), "replica_drift")
        for name, values in {
            "reliable": {},
            "lossy": {"replicated_gradients": "lossy"},
            "none": {"replicated_gradients": "none"},
            "resync": {"replicated_gradients": "none", "resync_every": 2},
        }.items()
    }
    assert drifts["reliable"] == [0] * 4
    assert all(drift > 0 for drift in drifts["none"])
    assert drifts["lossy"][-1] > 0  # in an early step all of the few nonzero gradients may arrive
    assert drifts["resync"][:2] == drifts["none"][:2]  # measured before the copies are resynchronised
    assert all(0 < less < more for less, more in zip(drifts["resync"][2:], drifts["none"][2:], strict=True))


def test_lossy_gradients_are_separate_messages(folder: Path) -> None:
    plain, lossy = (
        traffic(short(folder, **LOSSY, **OPTIONS[name])) for name in ("own streams", "own streams, lossy gradients")
    )
    assert lossy["messages"]["called"] == plain["messages"]["called"] + 2 * SHORT["max_steps"]  # reduce and gather
    assert plain["messages"]["called"] == 2 * SHORT["max_steps"] * ALL_REDUCES
    assert lossy["by_layer"].keys() - plain["by_layer"].keys() == {"None"}
    assert lossy["by_layer"]["None"]["packets"] == lossy["packets"] - plain["packets"]


def test_more_losses_drive_streams_farther_apart(folder: Path) -> None:
    few, many = (evaluations(short(folder, loss_rate=rate, **OWN), "stream_distance")[-1] for rate in (0.01, 0.1))
    assert len(few) == BLOCKS
    assert all(0 < less < more < 1 for less, more in zip(few, many, strict=True))
    assert evaluations(short(folder, **LOSSY), "stream_distance") == [None]


def test_streams_that_are_not_finite_are_recorded_so(folder: Path) -> None:
    record = short(folder, **LOSSY, **OWN, learning_rate=1e30, eval_steps=1, warmup_steps=0)
    assert record["status"] == "not finite"
    assert evaluations(record, "stream_distance")[-1] == [None] * BLOCKS


def test_accuracy_is_the_mean_over_ranks_and_its_spread_is_recorded(folder: Path) -> None:
    """Each rank is scored on its own logits."""
    seen: list[torch.Tensor] = []
    logits = Engine.logits

    def look(engine: Engine, batch: dict) -> torch.Tensor | None:
        seen.append(logits(engine, dict(batch)))
        return seen[-1]

    values = {"loss_rate": 0.4, "max_steps": 3, "tensor_parallel_size": 4, **OWN}
    with patch.object(Engine, "logits", look):
        record = short(folder / "scored", **values)
    clean, lossy = seen
    assert clean.shape == lossy.shape == (4, 30, 2)
    with task_in(folder / "scored"):
        test = the_data().test
    labels = torch.cat([test.batch(indices)["labels"] for indices in evaluation_batches(test, batch_size=64)])
    right = (lossy.argmax(-1) == labels).double().mean(-1)
    point = record["curves"]["eval"][-1]
    assert point["accuracy_lossy"] == pytest.approx(right.mean().item(), abs=1e-12)
    assert point["score_spread_lossy"] == pytest.approx((right.max() - right.min()).item(), abs=1e-12)
    assert point["score_spread_lossy"] > 0
    assert point["score_spread_clean"] == 0
    entropy = torch.nn.functional.cross_entropy(lossy.double().flatten(0, 1), labels.repeat(4))
    assert point["cross_entropy_lossy"] == pytest.approx(entropy.item(), rel=1e-6)


def test_copies_of_norms_do_not_decay_as_norms_do_not(folder: Path) -> None:
    decaying: dict[str, set[str]] = {}
    for name in ("own streams", "own copies"):
        engines: list[Engine] = []
        with spied(before=engines.append):
            short(folder / "decay", max_steps=1, **OPTIONS[name])
        model = engines[0].module
        with task_in(folder):
            optimizer = build_optimizer(model, learning_rate=1e-3, weight_decay=0.01)
        names = {id(parameter): each for each, parameter in model.named_parameters()}
        groups = [group for group in optimizer.param_groups if group["weight_decay"]]
        decaying[name] = {names[id(parameter)] for group in groups for parameter in group["params"]}
        assert any(isinstance(module, PerRank) for module in model.modules()) == (name == "own copies")
    assert decaying["own copies"] == decaying["own streams"]
    assert not [name for name in decaying["own copies"] if "ln_" in name]


APART = ("own streams", "own streams, lossy gradients", "own copies", "own copies, resynchronised")


IN_PROCESSES = ("own streams", "own copies", "own streams, lossy gradients", "shards", "shards, lossy gather", "noise")


@pytest.mark.parametrize("name", [*IN_PROCESSES, "stale", "counted", "adjoint", "own streams by a tree, local"])
def test_processes_train_as_virtual_ranks_do(processes: Callable, folder: Path, name: str) -> None:
    """Each process has two of the four ranks, so that virtual and real ranks mix."""
    values = {"tensor_parallel_size": 4, "max_steps": 4, "eval_steps": 2, "loss_rate": 0.05, **OPTIONS[name]}
    here, there = train(folder / "virtual", values), processes(2, train, folder / "apart", values)[0]
    assert curve(there) == pytest.approx(curve(here), rel=1e-5)
    assert there["network"] == here["network"]
    assert there["final"] == pytest.approx(here["final"], rel=1e-4)
    for mine, theirs in zip(here["curves"]["eval"], there["curves"]["eval"], strict=True):
        assert theirs["stream_distance"] == (mine["stream_distance"] and pytest.approx(mine["stream_distance"], 1e-4))
        assert (theirs["replica_drift"] > 0) == (mine["replica_drift"] > 0)
        if name in APART or "local" in name:
            assert theirs["score_spread_lossy"] == pytest.approx(mine["score_spread_lossy"])


def on_rank_leave_gradients(folder: Path, values: dict) -> dict:
    with patch.object(Engine, "synchronise", lambda engine: None):
        return train(folder, values)


@pytest.mark.parametrize(
    "values",
    [{"data_parallel_size": 2}, {"data_parallel_size": 2, "data_parallel_type": "fsdp"}, {"pipeline_parallel_size": 2}],
    ids=["ddp", "fsdp", "pipeline"],
)
def test_tensor_parallel_ranks_stay_equal_though_each_has_its_own_losses(
    processes: Callable, folder: Path, values: dict
) -> None:
    values = {**SHORT, **LOSSY, **values}
    record = processes(4, train, folder / "equal", values)[0]
    assert evaluations(record, "replica_drift") == [0]
    control = processes(4, on_rank_leave_gradients, folder / "control", values)[0]
    assert evaluations(control, "replica_drift")[0] > 1e-4


@pytest.mark.parametrize("name", ["dtensor", "megatron", "ddp"])
def test_over_the_backend_results_lose_packets_too_and_copies_drift(
    processes: Callable, folder: Path, name: str
) -> None:
    number, values = PARALLELISMS[name]
    values = {**values, **LOSSY, **OWN, "max_steps": 3, "algorithm": "ring"}
    if name != "ddp":  # it has one rank, which has no copies
        values["replicated_gradients"] = "none"
    record = processes(number, train, folder / "backend", values)[0]
    assert evaluations(record, "replica_drift")[0] > 1e-4
    phases = traffic(record)["by_phase"]
    assert phases["gather"]["packets"] == phases["reduce"]["packets"]
    kept = processes(
        number, train, folder / "backend", {**values, "reliable_gather": True} | {"replicated_gradients": "reliable"}
    )[0]
    assert evaluations(kept, "replica_drift") == [0]
    assert traffic(kept)["by_phase"].keys() == {"reduce"}
