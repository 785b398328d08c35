"""Test that a run goes on at another layout: with the very batches, weights and moments, and the links of both."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lossytp.parallel.replicas import local
from lossytp.parallel.shards import Shard, assembled, shards
from lossytp.training import checkpoint, models
from lossytp.training import text as blocks
from lossytp.training.config import PretrainConfig
from lossytp.training.loop import Run, run
from lossytp.training.objectives import Pretraining
from tests.training.pretraining.tiny_runs import STEPS, TINY, losses, stopped

pytestmark = pytest.mark.slow

TP, DDP = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}
FSDP = {**DDP, "data_parallel_type": "fsdp"}
LAYOUTS = {
    "one": (1, {}),
    "virtual 2": (1, TP),
    "virtual 4": (1, {"tensor_parallel_size": 4}),
    "tp": (2, TP),
    "tp 4 on 2": (2, {"tensor_parallel_size": 4}),
    "tp, vocabulary": (2, {**TP, "enable_loss_parallelism": True}),
    "ddp": (2, DDP),
    "fsdp": (2, FSDP),
    "own fsdp": (2, {**FSDP, "implementation": "custom"}),
    "tp x fsdp": (4, TP | FSDP),
    "tp x own fsdp": (4, {**TP, **FSDP, "implementation": "custom"}),
    "ddp 4": (4, {"data_parallel_size": 4}),
}
MOVES = [("one", "tp"), ("tp", "one"), ("tp", "tp 4 on 2"), ("tp, vocabulary", "virtual 4"), ("ddp", "one")]
MOVES += [("one", "own fsdp"), ("own fsdp", "fsdp"), ("fsdp", "tp x own fsdp"), ("tp x fsdp", "virtual 2")]
MOVES += [("ddp", "ddp 4")]


def tensors_of(run: Run) -> list[tuple[Shard, dict[str, Tensor]]]:
    return [
        (shard, {kind: local(each).detach().clone() for kind, each in tensors.items()})
        for parameter, shard in shards(run.engine.module, run.layout)
        for tensors in [{"parameter": parameter, **run.optimizer.state.get(parameter, {})}]
    ]


def on_rank(values, stop_at=None):
    step, batch, batches, held = Run.train_step, Pretraining.batch, [], []

    def first_step(self, number, given):
        held.extend([] if held else tensors_of(self))
        return step(self, number, given)

    def next_batch(self):
        batches.append(batch(self)["input_ids"].clone())
        return {"input_ids": batches[-1], "labels": batches[-1]}

    with (
        patch.dict(models.PRESETS, {"gpt2-nano": {**TINY, "n_layer": 2, "n_head": 4}}),
        patch.object(blocks, "SHUFFLED_BLOCKS", 30),
    ):
        config = PretrainConfig(**values)
        if stop_at is not None:
            return stopped(config, stop_at)
        with patch.object(Run, "train_step", first_step), patch.object(Pretraining, "batch", next_batch):
            return run(config), batches, held


@pytest.fixture
def at(processes):
    def start(layout, config, stop_at=None, *, save_model=False):
        number, values = LAYOUTS[layout]
        values = {**config.as_dict(), "save_model": save_model, **values}
        return [on_rank(values, stop_at)] if number == 1 else processes(number, on_rank, values, stop_at)

    return start


def kept_in(folder: Path) -> list[tuple[Shard, dict[str, Tensor]]]:
    states = [torch.load(file, weights_only=False) for file in sorted(folder.glob("process-*.pt"))]
    return [pair for state in states for pair in state["shards"]]


def of_kind(held, kind: str) -> list[tuple[Shard, Tensor]]:
    return [(shard, tensors[kind]) for shard, tensors in held if kind in tensors]


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_a_run_goes_on_at_another_layout(pretrain, at, capsys, before, after):
    unbroken, batches, _ = at("one", pretrain("unbroken"))[0]
    config = pretrain("broken")
    at(before, config, stop_at=5)
    kept = kept_in(Path(config.output.output_dir) / "checkpoint" / "step-3")
    found = at(after, config)
    for record, seen, _ in found:
        assert all(
            torch.equal(one, other) for one, other in zip(seen[-STEPS + 3 :], batches[-STEPS + 3 :], strict=True)
        )
        assert record["timing"]["resumed_behind_steps"] == [3]
        assert record["timing"]["earlier_layouts"][0]["processes"] == LAYOUTS[before][0]
        assert losses(record) == pytest.approx(losses(unbroken), rel=1e-4)
    for _, _, held in found:
        copies = {(part.name, shard.replica, part.rank) for shard, _ in held for part in shard.parts}
        for kind in ("parameter", "exp_avg", "exp_avg_sq"):
            everyones = of_kind([each for _, _, theirs in found for each in theirs], kind)
            for name, replica, rank in copies:
                tensor = assembled(everyones, name, (replica, rank))
                assert torch.equal(tensor, assembled(of_kind(kept, kind), name)), (kind, name, replica, rank)
    if LAYOUTS[after][0] == 1:
        assert "is of another layout (" in capsys.readouterr().err


STALE, OWN, BOTH = {"repair": "stale"}, {"reliable_gather": False}, {"repair": "protect(0.01) + stale"}


@pytest.mark.parametrize(
    ("before", "after", "virtual", "values"),
    [
        *(("tp", "virtual 2", "virtual 2", STALE), ("virtual 2", "tp", "virtual 2", STALE)),
        *(("tp", "virtual 2", "virtual 2", OWN), ("virtual 2", "tp", "virtual 2", OWN)),
        # each process remembers what all ranks sent, as its senders choose by sums of several ranks
        ("tp 4 on 2", "tp 4 on 2", "virtual 4", {"algorithm": "ring", **BOTH, **OWN}),
        ("virtual 4", "tp 4 on 2", "virtual 4", {"algorithm": "ring", **BOTH, **OWN}),
    ],
    ids=str,
)
def test_ranks_lose_the_same_packets_wherever_they_run(pretrain, at, before, after, virtual, values):
    values = {"loss_rate": 0.2, "mtu_bytes": 100, **TP, **values}
    unbroken = at(virtual, pretrain("unbroken", **values))[0][0]
    config = pretrain("broken", **values)
    at(before, config, stop_at=5)
    record = at(after, config)[0][0]
    assert record["network"] == unbroken["network"]
    assert record["network"]["training"]["lost"] > 100
    assert losses(record) == pytest.approx(losses(unbroken), rel=1e-5)


def test_links_that_both_layouts_have_go_on_and_what_was_sent_stays_counted(pretrain, at):
    config = pretrain("broken", loss_rate=0.2, mtu_bytes=100, **TP)
    at("virtual 2", config, stop_at=5)
    links = {}
    loaded = checkpoint.resume

    def resumed(this):
        loaded(this)
        links.update({json.dumps(link): position for link, position in this.network.state_dict()["links"]})

    with patch.object(checkpoint, "resume", resumed):
        record = at("virtual 4", config)[0][0]
    assert set(links) == {'["tp", 0, 1]', '["tp", 1, 0]'}
    by_link = record["network"]["training"]["by_link"]
    assert len(by_link) == 12
    assert by_link["0->1"]["packets"] > by_link["2->3"]["packets"] > 0


def test_copies_that_have_drifted_need_their_ranks(pretrain, at):
    values = {**TP, "loss_rate": 0.2, "reliable_gather": False, "replicated_gradients": "none"}
    config = pretrain("broken", **values)
    at("virtual 2", config, stop_at=5)
    with pytest.raises(ValueError, match="replicated_gradients"):
        at("virtual 4", config)
