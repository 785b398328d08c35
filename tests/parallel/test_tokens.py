"""Losses by the positions of tokens, their protection, and prefixes that lose nothing."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import lossytp as ltp
from lossytp.network.repairs import repair_named
from lossytp.network.routes import ALGORITHMS, Hop
from lossytp.network.scope import Site
from lossytp.parallel.collectives import collective_of
from lossytp.parallel.convert import positions_of
from tests.parallel.conftest import relative_error, tiny_batch, tiny_gpt2
from tests.parallel.families import tiny
from tests.parallel.sharing_modes import MODES, WIRE

SITE = Site(0, "mlp", "forward")
IDS = tiny_batch()["input_ids"][:3, :6]
FAMILIES: dict[str, Callable] = {"gpt2": tiny_gpt2, "llama": lambda: tiny("llama")}


def lossy(dense: PreTrainedModel, loss_rate: float, *, positions: Any = None, **how: Any) -> Any:
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=loss_rate), wire=WIRE, scope=ltp.Scope(positions=positions))
    return ltp.parallelize(dense, network, tensor_parallel_size=4, **how).eval()


def network_of(model: Any) -> ltp.LossyNetwork:
    collective = collective_of(model)
    assert collective is not None
    return collective.network


@pytest.mark.parametrize("capacity", [1, 3, 8, 100])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_packet_is_chosen_if_an_element_of_it_belongs_to_a_token_at_the_positions(algorithm, capacity):
    network, width = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.5)), 5
    network.positions = np.array([-1, -1, 0, 1, 2, 0, 1, 2, 3, 4])
    for hop in (hops := ALGORITHMS[algorithm].reduce(10 * width, (0, 1, 2, 3), 1)):
        (found,) = network._packets_at((1, 3), (hop, Hop(0, 1, 0, 10 * width, (0,))), capacity)[:1]
        naive = []
        for packet in range(hop.num_packets(capacity)):
            elements = range(hop.start + packet * capacity, min(hop.start + (packet + 1) * capacity, hop.stop))
            if any(network.positions[element // width] in (1, 2) for element in elements):
                naive.append(packet)
        assert found.tolist() == naive
    assert hops


def test_positions_are_those_of_a_token_in_its_own_sequence():
    model, mask = tiny("llama"), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [1] * 6])
    expected = [[-1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, -1], [0, 1, 2, 3, 4, 5]]

    def found(**inputs: Any) -> list:
        return positions_of(model, **inputs).reshape(3, -1).tolist()

    assert found(input_ids=IDS) == [[*range(6)]] * 3
    assert found(input_ids=IDS, attention_mask=mask) == expected
    assert found(inputs_embeds=torch.zeros(3, 6, 64), attention_mask=mask) == expected
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    assert found(input_ids=IDS, position_ids=packed) == [[0, 1, 2, 0, 1, 2]] * 3
    cache = DynamicCache()
    cache.update(torch.zeros(3, 1, 4, 8), torch.zeros(3, 1, 4, 8), 0)
    assert found(input_ids=IDS[:, :2], past_key_values=cache) == [[4, 5]] * 3
    assert found(input_ids=IDS[:, :2], past_key_values=cache, attention_mask=mask) == [row[4:] for row in expected]


@pytest.mark.parametrize("mode", ["shared", "own streams", "sequence, lossy gather"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packets_at_other_positions_are_reliable(family, mode):
    """A causal model's logits before the first lossy position do not change."""
    dense = FAMILIES[family]().eval()
    logits = lossy(dense, 1.0, positions=slice(3, 5), **MODES[mode])(input_ids=IDS).logits
    expected = dense(input_ids=IDS).logits
    assert relative_error(logits[:, :3], expected[:, :3]) < 1e-9
    assert all(relative_error(logits[:, t], expected[:, t]) > 1e-3 for t in (3, 4, 5)), "control"


def test_only_packets_at_the_positions_are_counted():
    model = lossy(tiny("llama"), 0.5, positions=(0, 2))
    model(input_ids=IDS)
    packets = network_of(model).report()["packets"].sum()
    elements_lost_alone = 3 * 2 * 64  # sequences, positions, width: 3 of 4 ranks send each element of 4 messages
    assert packets == 4 * 3 * elements_lost_alone / 8


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_does_not_move_the_positions(family):
    dense, padding = FAMILIES[family]().eval(), torch.zeros(3, 4, dtype=torch.long)
    mask = torch.cat([padding, torch.ones_like(IDS)], 1)
    model = lossy(dense, 1.0, positions=(1, 3), algorithm="sender")  # the others spare an owner's part
    inputs: dict[str, Tensor] = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(0)}
    padded = model(input_ids=torch.cat([padding, IDS], 1), **inputs).logits[:, 4:]
    assert relative_error(padded, model(input_ids=IDS).logits) < 1e-9
    assert relative_error(padded, dense(input_ids=IDS).logits) > 1e-3, "control"


def test_tokens_after_a_cache_keep_their_positions():
    model = lossy(tiny("llama"), 1.0, positions=(2, 4), algorithm="sender")
    whole, cache, logits = model(input_ids=IDS).logits, DynamicCache(), []
    for token in IDS.split(1, 1):
        logits.append(model(input_ids=token, past_key_values=cache, use_cache=True).logits)
    assert relative_error(torch.cat(logits, 1), whole) < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "tree"])
@pytest.mark.parametrize("others", ["", " + retransmit(1)", " + rescale", " + stale", " + hadamard(4)"])
def test_protected_positions_lose_nothing(others, algorithm, family):
    dense = FAMILIES[family]().eval()
    model = lossy(dense, 0.5, repair=f"protect_first(2){others}", algorithm=algorithm)
    logits, expected = model(input_ids=IDS).logits, dense(input_ids=IDS).logits
    assert relative_error(logits[:, :2], expected[:, :2]) < 1e-9
    assert relative_error(logits[:, 2:], expected[:, 2:]) > 1e-3, "control"


def test_protected_packets_are_sent_until_they_arrive():
    model = lossy(tiny("llama"), 0.5, repair="protect_first(2)")
    for _ in range(20):
        model(input_ids=IDS)
    report = network_of(model).report()
    protected, others = 20 * 4 * 3 * 3 * 2 * 64 / 8, 20 * 4 * 3 * 3 * 4 * 64 / 8
    assert report["missing"].sum() == pytest.approx(others / 2, rel=0.03)
    assert report["extra"].sum() == pytest.approx(protected, rel=0.1)  # 1 / (1 - p) - 1 for each
    assert report["packets"].sum() - report["extra"].sum() == protected + others


def test_checkpointing_replays_what_was_protected():
    plain, checkpointed = (lossy(tiny("llama"), 0.3, repair="protect_first(2)").train() for _ in range(2))
    checkpointed.gradient_checkpointing_enable()
    losses = []
    for model in (plain, checkpointed):
        model(**tiny_batch()).loss.backward()
        losses.append({name: each.grad for name, each in model.named_parameters()})
    assert all(torch.equal(losses[0][name], losses[1][name]) for name in losses[0])


def test_backward_counts_the_positions_of_its_own_forward():
    alone, together = [], lossy(tiny("llama"), 0.5, repair="protect_first(2)").train()
    for tokens in (6, 4):
        model = lossy(tiny("llama"), 0.5, repair="protect_first(2)").train()
        model(input_ids=IDS[:, :tokens], labels=IDS[:, :tokens]).loss.backward()
        report = network_of(model).report()
        alone.append(report[report.direction == "backward"][["packets", "extra"]].sum())
    losses = [together(input_ids=IDS[:, :tokens], labels=IDS[:, :tokens]).loss for tokens in (6, 4)]
    sum(losses).backward()
    report = network_of(together).report()
    both = report[report.direction == "backward"][["packets", "extra"]].sum()
    assert both["packets"] - both["extra"] == sum(each["packets"] - each["extra"] for each in alone)
    assert network_of(together).positions is None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        *(({"positions": (0, 2), "repair": name}, "repair = ") for name in ("protect(0.1)", "hadamard(4)", "rescale")),
        ({"positions": (0, 2), "control": "noise"}, "control = 'noise'"),
        *(({"positions": positions}, "positions = ") for positions in ((2, 2), slice(0, 4, 2))),
        ({"repair": "protect_first(0)"}, "positions = 0"),
    ],
)
def test_what_does_not_work_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        lossy(tiny("llama"), 0.1, **how)


def test_a_layer_alone_does_not_know_positions():
    model = lossy(tiny("llama"), 0.1, repair="protect_first(1)")
    with pytest.raises(ValueError, match="call the model itself"):
        model.model.layers[0].mlp(torch.randn(1, 3, 64, dtype=torch.float64))


def test_messages_of_no_layer_protect_nothing():
    network, hops = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.5)), (Hop(0, 1, 0, 1000, (0,)),)
    network.positions = np.zeros(10, np.int64)
    assert not network.send(hops, 4, repair=repair_named("protect_first(1)")).protected
    assert len(network.send(hops, 4, repair=repair_named("protect_first(1)"), site=SITE).protected[0]) == 3


def test_a_gathered_model_counts_no_positions():
    dense = tiny("llama")
    gathered = ltp.gather(lossy(dense, 0.1, repair="protect_first(1)"))
    assert type(gathered) is type(dense)
    assert torch.equal(gathered(input_ids=IDS).logits, dense(input_ids=IDS).logits)


@pytest.mark.parametrize("mode", ["shared", "own streams"])
def test_a_reliable_prefix_has_the_keys_and_values_of_the_dense_model(mode):
    dense = tiny("llama").eval()
    model = lossy(dense, 0.5, **MODES[mode])
    cache = ltp.reliable_prefix(model, IDS[:1, :4])
    expected = dense(input_ids=IDS[:1, :4], use_cache=True).past_key_values
    for layer, wanted in zip(cache.layers, expected.layers, strict=True):
        for rows in layer.keys, layer.values:
            assert rows.isfinite().all()
        assert relative_error(layer.keys[:1], wanted.keys[:, : layer.keys.shape[1]]) < 1e-9
    assert network_of(model).report().empty, "no packet is sent over a lossy link"


@pytest.mark.parametrize("search", [{"do_sample": False}, {"do_sample": False, "num_beams": 2}])
def test_a_reliable_prefix_continues_in_generate(search):
    dense, prompts = tiny("llama").eval(), torch.cat([IDS[:1, :4].expand(3, -1), IDS[:, 4:]], 1)
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "attention_mask": torch.ones_like(prompts), "use_cache": True}
    how |= search
    tokens = []
    for loss_rate in (0.0, 0.5):
        model = lossy(dense, loss_rate)
        prefix = ltp.reliable_prefix(model, prompts[:, :4])
        prefix.batch_repeat_interleave(search.get("num_beams", 1))
        tokens.append(model.generate(prompts, past_key_values=copy.deepcopy(prefix), **how))
    assert torch.equal(tokens[0], dense.generate(prompts, **how))
    assert not torch.equal(tokens[1], tokens[0]), "control"
