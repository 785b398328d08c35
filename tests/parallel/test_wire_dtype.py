"""Messages in blocks with scales: a reference that encodes packet by packet, bytes and numbers of packets."""

import math
from bisect import bisect

import numpy as np
import pytest
import torch
from torch import Tensor

import lossytp as ltp
from lossytp.network.lossy_network import WIRE_DTYPES, CommConfig
from lossytp.network.routes import ALGORITHMS, Wire
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup
from tests.parallel.conftest import bernoulli, relative_error, tiny_gpt2

BLOCKS = ("int8", "fp8", "int4")
LOWEST = {"int8": -128, "fp8": -448, "int4": -8}
E4M3 = [
    (mantissa / 8 + (exponent > 0)) * 2.0 ** max(exponent - 7, -6)
    for exponent in range(16)
    for mantissa in range(8)
    if (exponent, mantissa) != (15, 7)  # which is NaN
]
PACKET = {"int8": 42 * 32, "fp8": 42 * 32, "int4": 80 * 32}  # whole blocks of 34 or 18 bytes in 1456
OWN = {"reliable_gather": False}
WAYS = [*((algorithm, {}) for algorithm in ALGORITHMS), ("direct", OWN), ("tree", {"sequence_parallel": True, **OWN})]


def bfloat16(value: float) -> float:
    if value == 0:
        return 0.0
    unit = 2.0 ** (math.frexp(value)[1] - 8)
    return round(value / unit) * unit


def nearest(wanted: float, wire_dtype: str) -> float:
    """Return the nearest number of the dtype; of two, the even one, and in e4m3 the one with an even mantissa."""
    if wire_dtype != "fp8":
        return min(max(round(wanted), LOWEST[wire_dtype]), -LOWEST[wire_dtype] - 1)
    above = bisect(E4M3, abs(wanted))
    index = min((above - 1, min(above, len(E4M3) - 1)), key=lambda each: (abs(E4M3[each] - abs(wanted)), each % 2))
    return math.copysign(E4M3[index], wanted)


def packet_decoded(packet: np.ndarray, wire_dtype: str) -> list[float]:
    """Return what the receiver decodes of one packet: each block of 32 with the scale of its strongest element."""
    received = []
    for first in range(0, len(packet), 32):
        block = packet[first : first + 32]
        strongest = max(block, key=abs)
        scale = block.dtype.type(bfloat16(float(strongest / LOWEST[wire_dtype])))
        received += [nearest(float(value / scale), wire_dtype) * float(scale) if scale else 0.0 for value in block]
    return received


def decoded(row_N: Tensor, spans: list[tuple[int, int]], wire_dtype: str) -> Tensor:
    row = (row_N if row_N.dtype == torch.float64 else row_N.float()).numpy()
    sent = []
    for start, stop in spans:
        for first in range(start, stop, PACKET[wire_dtype]):
            sent += packet_decoded(row[first : min(first + PACKET[wire_dtype], stop)], wire_dtype)
    return torch.tensor(sent, dtype=torch.float64).to(row_N.dtype)


def chunks(num_elements: int, ranks: int, unit: int = 1) -> list[tuple[int, int]]:
    size = -(-num_elements // (ranks * unit)) * unit
    return [(min(start, num_elements), min(start + size, num_elements)) for start in range(0, ranks * size, size)]


def spans(algorithm: str, phase: str, num_elements: int, ranks: int, unit: int = 1) -> list[tuple[int, int]]:
    in_chunks = algorithm in ("direct", "ring") or phase == "all_gather"
    return chunks(num_elements, ranks, unit) if in_chunks else [(0, num_elements)]


@pytest.mark.parametrize("wire_dtype", BLOCKS)
@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [("direct", torch.float64), ("direct", torch.bfloat16), *((each, torch.float32) for each in ALGORITHMS)],
)
def test_contributions_and_sums_are_those_of_the_reference(algorithm, dtype, wire_dtype):
    """3 ranks, several packets a chunk, no chunk a multiple of a block, strong elements and a block of zeros."""
    ranks, num_elements = 3, 3 * 2700 + 1
    x_RN = (torch.randn(ranks, num_elements, generator=torch.Generator().manual_seed(1)) ** 3).to(dtype)
    x_RN[:, 64:128] = 0
    x_RN[0, 7], x_RN[1, 5000] = 3000, -1e-7
    result_RN = ltp.all_reduce(x_RN, bernoulli(0.0), algorithm=algorithm, wire_dtype=wire_dtype)
    there = spans(algorithm, "reduce", num_elements, ranks)
    sent_RN = torch.stack([decoded(row_N, there, wire_dtype) for row_N in x_RN])
    back = spans(algorithm, "gather", num_elements, ranks)
    expected_N = decoded(sent_RN.sum(0), back, wire_dtype)
    assert result_RN.dtype == dtype
    assert torch.equal(result_RN, expected_N.expand(ranks, -1))
    assert 0 < relative_error(sent_RN.double(), x_RN.double()) < {"int8": 0.01, "fp8": 0.04, "int4": 0.12}[wire_dtype]


@pytest.mark.parametrize("wire_dtype", BLOCKS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_shards_are_rounded_on_their_way_to_a_rank_and_on_their_way_back(algorithm, wire_dtype):
    """Chunks are whole tokens of 7 elements; a rank keeps its sum as it is, and rounds it to send it."""
    x_RN = torch.randn(4, 7 * 301, generator=torch.Generator().manual_seed(2))
    collective = LossyCollective(
        bernoulli(0.0),
        RankGroup(4),
        CommConfig.named(algorithm=algorithm, sequence_parallel=True, wire_dtype=wire_dtype),
    )
    there, back = (spans(algorithm, phase, x_RN.shape[1], 4, unit=7) for phase in ("reduce", "all_gather"))
    sent_RN = torch.stack([decoded(row_N, there, wire_dtype) for row_N in x_RN])
    total_N = collective.sum_(x_RN.clone(), unit=7)
    assert torch.equal(total_N, sent_RN.sum(0))
    expected_N = decoded(total_N, back, wire_dtype)
    assert torch.equal(collective.all_gather(total_N, unit=7), expected_N.expand(4, -1))


@pytest.mark.parametrize(("algorithm", "how"), WAYS, ids=str)
@pytest.mark.parametrize("wire_dtype", BLOCKS)
def test_packets_follow_from_the_bytes_of_values_and_scales(algorithm, how, wire_dtype):
    """A link carries what its hops need: of each hop, whole blocks of 34 or 18 bytes in packets of 1456."""
    num_elements = 4 * 12345
    network = bernoulli(0.0)
    comm = CommConfig.named(algorithm=algorithm, wire_dtype=wire_dtype, **how)
    collective = LossyCollective(network, RankGroup(4), comm)
    total = collective.sum_(torch.ones(4, num_elements))
    if comm.sequence_parallel:
        collective.all_gather(total)
    reduce, gather = comm.algorithm.pair(comm.sequence_parallel)
    hops = [*reduce(num_elements, (0, 1, 2, 3)), *(() if comm.reliable_gather else gather(num_elements, (0, 1, 2, 3)))]
    block_bytes = {"int8": 32 + 2, "fp8": 32 + 2, "int4": 16 + 2}[wire_dtype]
    blocks_a_packet = (1500 - 44) // block_bytes
    expected: dict[tuple[int, int], int] = {}
    for hop in hops:
        blocks = math.ceil((hop.stop - hop.start) / 32)
        expected[hop.src, hop.dst] = expected.get((hop.src, hop.dst), 0) + math.ceil(blocks / blocks_a_packet)
    table = network.report().groupby(["src", "dst"])["packets"].sum()
    assert table.to_dict() == expected


@pytest.mark.parametrize("wire_dtype", BLOCKS)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "tree", "switch"])
def test_a_lost_packet_takes_its_own_elements_and_changes_no_other(algorithm, wire_dtype):
    """What arrives is what would have arrived without losses, and what does not is whole packets of zeros."""
    x_RN = torch.randn(2, 40_000, generator=torch.Generator().manual_seed(3)).double()
    how = {"algorithm": algorithm, "wire_dtype": wire_dtype, **OWN}
    kept_RN = ltp.all_reduce(x_RN, bernoulli(0.0), **how)
    network = bernoulli(0.3, scope=ltp.Scope(phase="gather"), seed=5)
    lossy_RN = ltp.all_reduce(x_RN, network, **how)
    lacks = lossy_RN != kept_RN
    assert (lossy_RN[lacks] == 0).all()
    room = PACKET[wire_dtype]
    for row_N, kept_N in zip(lacks, kept_RN, strict=True):
        for start, stop in spans(algorithm, "gather", 40_000, 2):
            for first in range(start, stop, room):
                packet = slice(first, min(first + room, stop))
                assert (row_N | (kept_N == 0))[packet].all() or not row_N[packet].any()
    lost = network.report()["lost"].sum()
    assert 0 < lost < network.report()["packets"].sum()


def test_rounding_is_without_bias_and_as_large_as_the_blocks_numbers_say():
    """Of uniform numbers in [-1, 1], a step of int4 is an eighth, and the error's variance a twelfth of its square."""
    x_1N = torch.rand(1, 32 * 10_000, generator=torch.Generator().manual_seed(4)).double() * 2 - 1
    x_1N[0, ::32] = -1  # the strongest is -1, so no number is clamped but those above 7.5 / 8
    comm = {"sequence_parallel": True}
    for wire_dtype, levels in (("int8", 256), ("int4", 16)):
        collective = LossyCollective(bernoulli(0.0), RankGroup(1), CommConfig(wire_dtype=wire_dtype, **comm))
        error_N = (collective.sum_(x_1N.clone()) - x_1N[0])[abs(x_1N[0]) < 1 - 1 / levels]
        assert error_N.square().mean() == pytest.approx((2 / levels) ** 2 / 12, rel=0.02)
        assert abs(error_N.mean()) < 3 * error_N.std() / len(error_N) ** 0.5


@pytest.mark.parametrize("wire_dtype", BLOCKS)
def test_small_gradients_keep_their_scale_and_infinities_stay_visible(wire_dtype):
    """A scale in float16 would be 0 below 6e-8, and a scaler must see that a gradient overflowed."""
    x_RN = torch.randn(2, 640, generator=torch.Generator().manual_seed(6))
    small_RN, large_RN = (ltp.all_reduce(x_RN * scale, bernoulli(0.0), wire_dtype=wire_dtype) for scale in (2**-90, 1))
    assert torch.equal(small_RN * 2.0**90, large_RN)
    for wrong in (math.inf, -math.inf, math.nan):
        spoilt_RN = x_RN.clone()
        spoilt_RN[0, 40] = wrong
        finite_N = ltp.all_reduce(spoilt_RN, bernoulli(0.0), wire_dtype=wire_dtype)[0].isfinite()
        assert finite_N.tolist() == [not 32 <= element < 64 for element in range(640)]


@pytest.mark.parametrize("wire_dtype", [*WIRE_DTYPES])
def test_gradients_are_rounded_in_backward_as_sums_are_in_forward(wire_dtype):
    """Of a whole model: a wider wire is closer to dense, and float64 over fp32 equal to single precision's rounding."""
    bounds = {"fp32": 1e-6, "bf16": 2e-2, "int8": 6e-2, "fp8": 0.25, "int4": 0.7}
    dense = tiny_gpt2().double()
    network = bernoulli(0.0)
    parallel = ltp.parallelize(dense, network, tensor_parallel_size=4, wire_dtype=wire_dtype)
    ids = torch.arange(24).view(2, 12)
    gradients = {}
    for name, model in (("dense", dense), ("parallel", parallel)):
        model(input_ids=ids, labels=ids).loss.backward()
        gradients[name] = model.transformer.wte.weight.grad
    error = relative_error(gradients["parallel"], gradients["dense"])
    assert bounds[wire_dtype] / 100 < error < bounds[wire_dtype]
    table = network.report().groupby("direction")["packets"].sum()
    assert table["backward"] > 0


def test_an_exact_block_rounds_nothing_and_ends():
    collective = LossyCollective(bernoulli(0.0), RankGroup(2), CommConfig(wire_dtype="int4"))
    x_RN = torch.randn(2, 100, generator=torch.Generator().manual_seed(9))
    with collective.exact():
        assert torch.equal(collective.sum_(x_RN.clone()), x_RN.sum(0))
    assert not torch.equal(collective.sum_(x_RN.clone()), x_RN.sum(0))


@pytest.mark.parametrize("wire", [Wire(mtu_bytes=77), Wire(elements=1), Wire(elements=48)])
def test_packets_that_hold_no_whole_block_are_refused(wire):
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.1), wire=wire)
    with pytest.raises(ValueError, match="wire_dtype = 'int8'"):
        ltp.all_reduce(torch.ones(2, 100), network, wire_dtype="int8")
    ltp.all_reduce(torch.ones(2, 100), network)
    for fits in (Wire(mtu_bytes=78), Wire(elements=64)):
        ltp.all_reduce(torch.ones(2, 100), ltp.LossyNetwork(network.process(0, 1), wire=fits), wire_dtype="int8")
