"""Find a planted critical packet, none in a random model, and each packet as the network loses it."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

import lossytp as ltp
from lossytp.tolerance.config import ToleranceConfig
from lossytp.tolerance.measure import Account, Measurement
from lossytp.tolerance.packets import Packet, search
from tests.tolerance.planted import MTU_BYTES, RANKS, TEXT, TOKENS, UNIT, WIDTH, save_planted

BATCH = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="module")
def planted(folder):
    return account(folder, save_planted(folder / "model"))


def account(folder, model, **changes):
    text = folder / "text.txt"
    text.write_text(TEXT)
    small = {"text": str(text), "block_size": TOKENS, "blocks": 16, "batch_size": BATCH, "mtu_bytes": MTU_BYTES}
    config = ToleranceConfig(model_name=model, tensor_parallel_size=RANKS, **{**small, **changes})
    return Account(Measurement(config), "direct", "reduce")


def test_exactly_the_planted_packet_is_found(planted):
    lossless = planted.lossless()
    found = planted.find(lossless)
    owner = UNIT * RANKS // (4 * WIDTH)  # the rank that holds the unit sends nothing for its own chunk
    carriers = [(message, sequence) for message in (0, 1) for sequence in range(BATCH) if sequence // 2 != owner]
    assert sorted((packet.message, packet.sequence) for packet, _ in found.critical) == carriers
    for packet, rise in found.critical:
        assert (packet.layer, packet.module, packet.token, packet.src) == (0, "mlp", 0, owner)
        assert packet.dst == packet.sequence // 2
        assert packet.ratio > 1000
        assert rise > 3
    assert found.unexplained == 0
    alone = [packet for packet in lossless.alone if packet.norm > found.critical[0][0].norm / 2]
    assert len(alone) == 16, "in a message of its own, every sequence has the packet"
    assert {packet.dst for packet in alone} == {0}


def test_a_rise_is_that_of_a_network_that_loses_this_packet_alone(planted):
    packet, rise = planted.find(planted.lossless()).critical[0]
    process = ltp.PerPacket(lambda packets, uniforms: packets == packet.number)
    network = ltp.LossyNetwork(
        {(packet.src, packet.dst): process},
        wire=ltp.Wire(mtu_bytes=MTU_BYTES),
        scope=ltp.Scope(layers=(0, 1), module="mlp"),
    )
    measurement = planted.measurement
    model = ltp.parallelize(measurement.dense, network, tensor_parallel_size=RANKS)
    ids = measurement.messages[packet.message]
    with network.evaluation(0):
        rises = measurement.score(model, ids) - measurement.score(measurement.dense, ids)
    assert network.summary("evaluation")["lost"] == 1
    assert rises[packet.sequence] == pytest.approx(rise, abs=1e-4)
    assert np.delete(rises, packet.sequence) == pytest.approx(0, abs=1e-4)


def test_a_model_without_a_massive_value_has_none(folder):
    ours = account(folder, save_planted(folder / "random", massive=0.0), blocks=8)
    assert ours.find(ours.lossless()).critical == []


def test_nothing_is_left_on_the_model(planted):
    planted.lossless()
    planted.squared_errors()
    model, network = planted._over_watched
    assert network.see is None
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_norms_are_those_of_each_ranks_product(planted):
    measurement = planted.measurement
    linear = measurement.dense.transformer.h[0].mlp.c_proj
    seen: list[torch.Tensor] = []
    handle = linear.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    measurement.score(measurement.dense, measurement.messages[0])
    handle.remove()
    inner, capacity = 4 * WIDTH // RANKS, (MTU_BYTES - 44) // 4
    found = [packet for packet in planted.lossless().packets if packet[:3] == (0, "mlp", 0)]
    assert found
    for packet in found:
        mine = slice(packet.src * inner, (packet.src + 1) * inner)
        product = (seen[0][..., mine] @ linear.weight.detach()[mine]).flatten()
        first = packet.dst * len(product) // RANKS + packet.number * capacity
        assert packet.norm == pytest.approx(float(product[first : first + capacity].norm()), rel=1e-4)


# The search alone, on invented damage.


def packet(layer, sequence=0, message=0, norm=100.0):
    return Packet(layer, "mlp", message, sequence, 0, 0, 1, 0, layer, norm, norm)


def losing(damage: Callable[[set[int]], float]):
    passes: list[int] = []

    def lose(packets: Sequence[Packet]) -> dict[tuple[int, int], float]:
        passes.append(len(packets))
        places = {each[2:4] for each in packets}
        return {place: damage({each.layer or 0 for each in packets if each[2:4] == place}) for place in places}

    return lose, passes


def test_the_search_loses_the_strongest_alone_and_the_others_together():
    packets = [packet(layer, sequence, norm=100 - layer) for layer in range(16) for sequence in (0, 1)]
    lose, passes = losing(lambda lost: 5.0 * (0 in lost) + 0.01 * len(lost))
    found = search(packets, lose)
    assert [(each.layer, each.sequence, rise) for each, rise in found.critical] == [(0, 0, 5.01), (0, 1, 5.01)]
    assert found.others == pytest.approx([0.15, 0.15])
    assert found.unexplained == 0
    assert passes == [2, 30]
    packets = [packet(layer, sequence, norm=100 - layer) for layer in range(6) for sequence in (0, 1)]
    lose, passes = losing(lambda lost: 5.0 * (2 in lost))
    found = search(packets, lose)
    assert [(each.layer, each.sequence) for each, _ in found.critical] == [(2, 0), (2, 1)]
    assert found.others == [0, 0]
    assert len(passes) == 6
    assert search([], lose) == ([], [], 0)
    packets = [packet(layer, norm=100 - layer) for layer in range(8)]
    lose, _ = losing(lambda lost: 4.0 * ({6, 7} <= lost))
    assert search(packets, lose) == ([], [4.0], 1)
