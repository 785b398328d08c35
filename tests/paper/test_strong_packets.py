"""Test packets' norms element by element, and single losses against a network that loses one packet."""

import numpy as np
import pytest
import torch

import lossytp as ltp
from lossytp.training.groups import NetworkSettings
from paper.damage import losses_by_block
from paper.sums import BINS, by_norm, packet_norms, summary
from tests.parallel.conftest import tiny_gpt2
from tests.parallel.families import VOCABULARY, tiny

RANKS, TOKENS, WIDTH = 4, 24, 64
CAPACITY = (200 - 44) // 8  # of float64
SETTINGS = NetworkSettings(tensor_parallel_size=RANKS, mtu_bytes=200)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def dense(request):
    return (tiny_gpt2() if request.param == "gpt2" else tiny("llama")).eval()


@pytest.fixture(scope="module")
def blocks():
    return torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def last_layer(dense, layer, module):
    """Return the layer whose product is summed, and its weight as (inputs, outputs)."""
    if hasattr(dense, "transformer"):
        block = dense.transformer.h[layer]
        linear = block.attn.c_proj if module == "attention" else block.mlp.c_proj
        return linear, linear.weight
    block = dense.model.layers[layer]
    linear = block.self_attn.o_proj if module == "attention" else block.mlp.down_proj
    return linear, linear.weight.t()


def naive_norms(dense, ids, layer, module):
    """Return {(src, dst): norms} of a direct exchange: chunk c of each other rank's product goes to rank c."""
    linear, weight = last_layer(dense, layer, module)
    seen = []
    handle = linear.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0][0]))
    with torch.no_grad():
        dense(input_ids=ids[None])
        handle.remove()
        x, inner, chunk = seen[0], len(weight) // RANKS, TOKENS * WIDTH // RANKS
        norms = {}
        for rank in range(RANKS):
            mine = slice(rank * inner, (rank + 1) * inner)
            product = (x[:, mine] @ weight[mine]).flatten().tolist()
            for owner in range(RANKS):
                sent = product[owner * chunk : (owner + 1) * chunk]
                packets = [sent[start : start + CAPACITY] for start in range(0, chunk, CAPACITY)]
                norms[rank, owner] = [sum(each**2 for each in packet) ** 0.5 for packet in packets]
    return norms


def test_norms_are_those_of_each_ranks_product_packet_by_packet(dense, blocks):
    table = packet_norms(dense, blocks, SETTINGS, layers=[1])
    for (module, block, src, dst), packets in table.groupby(["module", "block", "src", "dst"]):
        assert src != dst, "a rank's own part crosses no link"
        expected = naive_norms(dense, blocks[block], 1, module)[src, dst]
        assert packets["norm"].to_numpy() == pytest.approx(expected)
        first = dst * TOKENS * WIDTH // RANKS
        assert packets["token"].tolist() == [(first + CAPACITY * n) // WIDTH for n in range(len(expected))]
    assert len(table) == 2 * 2 * RANKS * (RANKS - 1) * -(-TOKENS * WIDTH // RANKS // CAPACITY)


@pytest.mark.parametrize("module", ["attention", "mlp"])
def test_a_rise_is_that_of_a_network_that_loses_this_packet_alone(dense, blocks, module):
    table = by_norm(dense, blocks, SETTINGS, layer=0, module=module, packets=2)
    assert list(table["bin"].unique()) == list(BINS)
    for row in table.itertuples():
        link = naive_norms(dense, blocks[row.block], 0, module)[row.src, row.dst]
        number = int(np.argmin(np.abs(np.array(link) - row.norm)))
        process = ltp.PerPacket(lambda packets, uniforms, number=number: packets == number)
        network = ltp.LossyNetwork(
            {(row.src, row.dst): process},
            wire=ltp.Wire(mtu_bytes=200),
            scope=ltp.Scope(layers=(0, 1), module=module),
        )
        model = ltp.parallelize(dense, network, tensor_parallel_size=RANKS)
        ids = blocks[row.block][None]
        with network.evaluation(0):
            rise = losses_by_block(model, ids).mean() - losses_by_block(dense, ids).mean()
        assert network.summary("evaluation")["lost"] == 1
        assert row.rise == pytest.approx(rise, abs=1e-6)
    assert table["rise"].abs().max() > 1e-3


def test_bins_are_in_the_order_of_the_norms(dense, blocks):
    table = by_norm(dense, blocks, SETTINGS, layer=0, module="mlp", packets=3)
    norms = packet_norms(dense, blocks, SETTINGS, layers=[0]).query("module == 'mlp'")
    for block, packets in table.groupby("block"):
        of_block = norms[norms["block"] == block]["norm"]
        assert packets[packets["bin"] == "strongest"]["norm"].tolist() == [of_block.max()]
        assert (packets["norm"].diff().dropna() <= 0).all()
        assert packets["norm"].min() == of_block.min()


@pytest.mark.parametrize("algorithm", ["ring", "tree", "switch", "sender"])
def test_other_algorithms_lose_what_their_routes_carry(dense, blocks, algorithm):
    settings = SETTINGS.replace(algorithm=algorithm)
    row = by_norm(dense, blocks[:1], settings, layer=1, module="attention", packets=1).iloc[0]
    of_link = packet_norms(dense, blocks[:1], settings, layers=[1])
    of_link = of_link.query("module == 'attention' and src == @row.src and dst == @row.dst").reset_index()
    number = int((of_link["norm"] - row["norm"]).abs().idxmin())
    process = ltp.PerPacket(lambda packets, uniforms: packets == number)
    network = ltp.LossyNetwork(
        {(row["src"], row["dst"]): process},
        wire=ltp.Wire(mtu_bytes=200),
        scope=ltp.Scope(layers=(1, 2), module="attention"),
    )
    model = ltp.parallelize(dense, network, tensor_parallel_size=RANKS, algorithm=algorithm)
    with network.evaluation(0):
        rise = losses_by_block(model, blocks[:1]).mean() - losses_by_block(dense, blocks[:1]).mean()
    assert row["rise"] == pytest.approx(rise, abs=1e-6)


@pytest.mark.parametrize(
    "changed",
    [{"wire_dtype": "bf16"}, {"algorithm": "tree", "sequence_parallel": True}, {"algorithm": "ring"}],
    ids=str,
)
def test_packets_are_those_that_the_model_sends(dense, blocks, changed):
    settings = SETTINGS.replace(**changed)
    network = settings.build()
    model = ltp.parallelize(dense, network, tensor_parallel_size=RANKS, comm=settings.comm())
    with network.evaluation(0), torch.no_grad():
        model(blocks[:1, :22])  # 22 tokens, which 4 ranks cannot share evenly
    sent = network.report().query("phase == 'reduce'").groupby(["layer", "module"])["packets"].sum()
    found = packet_norms(dense, blocks[:1, :22], settings).groupby(["layer", "module"]).size()
    assert found.to_dict() == sent.to_dict()


def test_the_model_is_left_as_it_was(dense, blocks):
    before = losses_by_block(dense, blocks)
    by_norm(dense, blocks, SETTINGS, layer=0, module="mlp", packets=1)
    assert (losses_by_block(dense, blocks) == before).all()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in dense.modules())


def test_a_massive_activation_stands_out(dense, blocks):
    norms = packet_norms(dense, blocks, SETTINGS)
    assert summary(norms)["ratio"].max() < 100
    linear, _ = last_layer(dense, 1, "mlp")

    def massive(linear, inputs):
        larger = inputs[0].clone()
        larger[:, 7] *= 1000
        return (larger,)

    handle = linear.register_forward_pre_hook(massive)
    changed = summary(packet_norms(dense, blocks, SETTINGS)).set_index(["layer", "module"])
    handle.remove()
    assert changed.loc[(1, "mlp"), "ratio"] > 100
    assert changed.loc[(1, "mlp"), "token"] in (6, 7), "a packet may begin in the token before"
    assert changed.loc[(0, "mlp"), "ratio"] < 100


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"module": "norm"}, "module = 'norm' is unknown: choose one of attention, mlp"),
        ({"layer": 9}, "layers = 9 is above the model's last, 1"),
        ({"packets": 0}, "packets = 0 is below 1"),
        ({"settings": SETTINGS.replace(tensor_parallel_size=3)}, "tensor_parallel_size = 3 does not divide"),
    ],
)
def test_bad_values_are_one_line(dense, blocks, values, message):
    with pytest.raises(ValueError, match=message):
        by_norm(**{"dense": dense, "blocks_NT": blocks, "settings": SETTINGS, "layer": 0, "module": "mlp"} | values)
