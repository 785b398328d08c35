"""The lossy all-reduce against a naive one, and what it must be on average."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lossytp as ltp
from lossytp.network import Site
from lossytp.network.routes import LostSpans
from lossytp.parallel.collectives import LossyAllReduce, _zero_spans_, all_reduce
from lossytp.parallel.group import RankGroup
from tests.parallel.conftest import bernoulli, delivered, pieces_sent

ALGORITHMS, REPAIRS = ["sender", "direct"], ["zero", "rescale"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def whole_numbers(num_ranks: int, num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Messages whose sums are exact in any dtype, even scaled by 1.25, so that results can be compared bitwise."""
    generator = torch.Generator().manual_seed(num_ranks + num_elements)
    return torch.randint(-3, 4, (num_ranks, num_elements), generator=generator).to(dtype)


def naive_all_reduce(x_RN: Tensor, network: ltp.LossyNetwork, algorithm: str, repair: str) -> list[float]:
    """The result that each rank holds, summed element by element in Python's floats."""
    num_ranks, num_elements = x_RN.shape
    arrives_RN = delivered(network, algorithm, num_ranks, num_elements, x_RN.element_size()).tolist()
    weights = [[1.0] * num_elements for _ in range(num_ranks)]
    if repair == "rescale":
        for rank in range(num_ranks):
            for dst, start, stop in pieces_sent(algorithm, rank, num_ranks, num_elements):
                loss_rate = network.process(rank, dst).loss_rate
                for element in range(start, stop):
                    weights[rank][element] = 1 / (1 - loss_rate) if loss_rate < 1 else 1.0
    sums = [0.0] * num_elements
    for rank, values in enumerate(x_RN.tolist()):
        for element, value in enumerate(values):
            if arrives_RN[rank][element]:
                sums[element] += weights[rank][element] * value
    return sums


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equals_the_naive_all_reduce(algorithm: str, repair: str, num_ranks: int) -> None:
    network, reference = bernoulli(0.2, seed=7), bernoulli(0.2, seed=7)
    for dtype in DTYPES:
        for num_elements in [0, 1, num_ranks - 1, 1000, 728 * num_ranks, 4321]:
            x_RN = whole_numbers(num_ranks, num_elements, dtype)
            before = x_RN.clone()
            result_RN = all_reduce(x_RN, network, algorithm=algorithm, repair=repair)
            expected = naive_all_reduce(x_RN, reference, algorithm, repair)
            assert result_RN.dtype == dtype
            assert result_RN.tolist() == [expected] * num_ranks, (dtype, num_elements)
            assert torch.equal(x_RN, before), "the caller's messages were changed"
    lost = network.counters.summary("training")["lost"]
    assert lost > 5 or (algorithm, num_ranks) == ("direct", 1), "too few losses to prove anything"


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    repair=st.sampled_from(REPAIRS),
    num_ranks=st.integers(1, 8),
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    mtu_bytes=st.integers(52, 120),
    seed=st.integers(0, 2**32),
)
def test_equals_the_naive_all_reduce_under_bursts_that_span_messages(
    algorithm: str, repair: str, num_ranks: int, sizes: list[int], mtu_bytes: int, seed: int
) -> None:
    process = ltp.GilbertElliott.from_loss_and_burst(loss_rate=0.3, mean_burst_packets=6)
    network, reference = (ltp.LossyNetwork(process, seed=seed, wire=ltp.Wire(mtu_bytes=mtu_bytes)) for _ in range(2))
    for num_elements in sizes:
        x_RN = whole_numbers(num_ranks, num_elements, torch.float64)
        result_RN = all_reduce(x_RN, network, algorithm=algorithm, repair=repair)
        expected_N = torch.tensor(naive_all_reduce(x_RN, reference, algorithm, repair), dtype=torch.float64)
        torch.testing.assert_close(result_RN, expected_N.expand(num_ranks, -1), rtol=1e-14, atol=1e-13)


def test_another_seed_gives_another_result() -> None:
    """Control: the comparison with the naive all-reduce could fail."""
    x_RN = whole_numbers(4, 4321)
    assert all_reduce(x_RN, bernoulli(0.2, seed=7))[0].tolist() != naive_all_reduce(
        x_RN, bernoulli(0.2, seed=8), "direct", "zero"
    )


@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_losses_is_bitwise_the_plain_sum(algorithm: str, repair: str, dtype: torch.dtype) -> None:
    x_RN = torch.randn(5, 2000, generator=torch.Generator().manual_seed(0)).to(dtype)
    result_RN = all_reduce(x_RN, bernoulli(0.0), algorithm=algorithm, repair=repair)
    assert torch.equal(result_RN, x_RN.sum(0).expand(5, -1))


@pytest.mark.parametrize(("dtype", "elements"), [(torch.float64, 182), (torch.float32, 364), (torch.bfloat16, 728)])
def test_a_packet_carries_1456_bytes_of_whole_elements(dtype: torch.dtype, elements: int) -> None:
    for num_elements, packets in [(elements, 1), (elements + 1, 2), (10 * elements, 10)]:
        network = bernoulli(0.0)
        all_reduce(torch.zeros(2, num_elements, dtype=dtype), network, algorithm="sender")
        assert network.report()["packets"].tolist() == [packets, packets]


def test_a_lost_packet_takes_its_elements_and_no_others() -> None:
    for seed in range(20):
        network, reference = bernoulli(0.3, seed=seed), bernoulli(0.3, seed=seed)
        result_N = all_reduce(torch.ones(1, 1000), network, algorithm="sender")[0]
        expected = [1.0] * 1000
        for packet in reference.lost_packets(0, -1, 3):  # of 364, 364 and 272 elements
            expected[364 * packet : 364 * (packet + 1)] = [0.0] * len(expected[364 * packet : 364 * (packet + 1)])
        assert result_N.tolist() == expected


@pytest.mark.parametrize("repair", REPAIRS)
def test_direct_loses_a_chunk_on_the_link_to_its_owner(repair: str) -> None:
    network = ltp.LossyNetwork({(0, 1): ltp.Bernoulli(loss_rate=1.0)})
    x_RN = torch.tensor([[1.0] * 6, [10.0] * 6, [100.0] * 6])
    result_RN = all_reduce(x_RN, network, algorithm="direct", repair=repair)
    assert result_RN.tolist() == [[111, 111, 110, 110, 111, 111]] * 3  # elements 2 and 3 are rank 1's chunk


@pytest.mark.parametrize("repair", REPAIRS)
def test_sender_loses_a_contribution_for_everyone(repair: str) -> None:
    network = ltp.LossyNetwork({(2, -1): ltp.Bernoulli(loss_rate=1.0)})
    x_RN = torch.tensor([[1.0] * 6, [10.0] * 6, [100.0] * 6])
    assert all_reduce(x_RN, network, algorithm="sender", repair=repair).tolist() == [[11.0] * 6] * 3


def test_rescale_divides_by_each_links_own_delivery_probability() -> None:
    x_RN = torch.tensor([[8.0] * 6, [16.0] * 6, [32.0] * 6])
    seen = set()
    for seed in range(40):
        network = ltp.LossyNetwork({(0, 1): ltp.Bernoulli(loss_rate=0.2)}, seed=seed)
        result_N = all_reduce(x_RN, network, algorithm="direct", repair="rescale")[0].tolist()
        assert result_N[:2] + result_N[4:] == [56.0] * 4
        seen.add(tuple(result_N[2:4]))
    assert seen == {(58.0, 58.0), (48.0, 48.0)}  # 8 * 1.25 + 16 + 32, and without rank 0


def test_when_everything_is_lost_an_owner_keeps_its_own_part() -> None:
    x_RN = torch.tensor([[1.0] * 4, [10.0] * 4])
    assert all_reduce(x_RN, bernoulli(1.0), algorithm="direct").tolist() == [[1, 1, 10, 10]] * 2
    assert all_reduce(x_RN, bernoulli(1.0), algorithm="sender").tolist() == [[0, 0, 0, 0]] * 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ranks_have_masks_of_their_own(algorithm: str) -> None:
    powers_RN = (2.0 ** torch.arange(4)).repeat_interleave(20_000).view(4, -1)
    survivors_N = all_reduce(powers_RN, bernoulli(0.3, seed=3), algorithm=algorithm)[0].long()
    lost_R = [((survivors_N >> rank) & 1 == 0).tolist() for rank in range(4)]
    for rank in range(4):
        assert any(lost_R[rank])
        assert all(lost_R[rank] != lost_R[other] for other in range(rank))


def test_each_rank_holds_a_result_of_its_own() -> None:
    result_RN = all_reduce(torch.ones(3, 10), bernoulli(0.0))
    result_RN[0] = 0
    assert result_RN.tolist() == [[0.0] * 10] + [[3.0] * 10] * 2


def test_takes_messages_that_are_not_contiguous() -> None:
    x_NR = whole_numbers(500, 4, torch.float64)
    expected = all_reduce(x_NR.t().contiguous(), bernoulli(0.2))
    assert torch.equal(all_reduce(x_NR.t(), bernoulli(0.2)), expected)


def ratio_to_the_plain_sum(algorithm: str, repair: str, loss_rate: float) -> tuple[float, float]:
    """Mean over 300 seeds of result / sum, for 4 ranks with equal messages, and its standard error."""
    wire = ltp.Wire(mtu_bytes=52)  # one float64 element a packet
    x_RN = torch.ones(4, 200, dtype=torch.float64)
    ratios = [
        all_reduce(x_RN, bernoulli(loss_rate, seed=seed, wire=wire), algorithm=algorithm, repair=repair).mean() / 4
        for seed in range(300)
    ]
    return float(np.mean(ratios)), float(np.std(ratios, ddof=1) / math.sqrt(len(ratios)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rescale_is_unbiased(algorithm: str) -> None:
    mean, standard_error = ratio_to_the_plain_sum(algorithm, "rescale", 0.1)
    assert 0 < standard_error < 0.002, "zero-fill's bias, 0.075 and more, would be seen"
    assert abs(mean - 1) < 4 * standard_error


@pytest.mark.parametrize(("algorithm", "expected"), [("sender", 1 - 0.1), ("direct", 1 - 0.1 * 3 / 4)])
def test_zero_fill_shrinks_the_sum_by_the_share_at_risk(algorithm: str, expected: float) -> None:
    mean, standard_error = ratio_to_the_plain_sum(algorithm, "zero", 0.1)
    assert 0 < standard_error < 0.002, "the two algorithms, 0.025 apart, would be told apart"
    assert abs(mean - expected) < 4 * standard_error


@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sum_takes_parts_of_any_shape_and_sums_over_ranks(algorithm: str, repair: str) -> None:
    collective = LossyAllReduce(bernoulli(0.2, seed=5), RankGroup(4), algorithm, repair)
    parts = whole_numbers(4, 3000)
    expected = naive_all_reduce(parts, bernoulli(0.2, seed=5), algorithm, repair)
    result = collective.sum_(parts.clone().view(4, 10, 30, 10))
    assert result.shape == (10, 30, 10)
    assert result.flatten().tolist() == expected


def test_packets_are_counted_at_their_site_and_in_their_group() -> None:
    network = bernoulli(0.2)
    collective = LossyAllReduce(network, RankGroup(2, name="second replica"))
    collective.sum_(torch.ones(2, 728 * 5), Site(3, "mlp", "backward"))
    table = network.report()
    assert table[["layer", "module", "direction", "group", "src", "dst", "packets"]].values.tolist() == [
        [3, "mlp", "backward", "second replica", 0, 1, 5],
        [3, "mlp", "backward", "second replica", 1, 0, 5],
    ]


def test_within_reliable_nothing_is_lost_scaled_or_counted() -> None:
    network, untouched = bernoulli(0.3), bernoulli(0.3)
    x_RN = whole_numbers(4, 4000)
    with network.reliable():
        assert torch.equal(all_reduce(x_RN, network, repair="rescale")[0], x_RN.sum(0))
    assert network.state_dict() == untouched.state_dict()
    assert torch.equal(all_reduce(x_RN, network), all_reduce(x_RN, untouched))


def test_no_draw_touches_the_global_generators() -> None:
    before, numpy_before = torch.get_rng_state(), repr(np.random.get_state())  # noqa: NPY002
    all_reduce(torch.ones(4, 10_000), bernoulli(0.3))
    assert torch.equal(torch.get_rng_state(), before)
    assert repr(np.random.get_state()) == numpy_before  # noqa: NPY002


class _NotCpu(str):
    """What `torch.zeros(device=...)` takes for the CPU, but what does not call itself so."""

    type = "other"


class _OnADevice(torch.Tensor):
    """A tensor of the CPU that says it is on another device, and so takes the way of tensors on devices."""

    device = property(lambda self: _NotCpu("cpu"))  # type: ignore[assignment]

    def numpy(self, **_: object) -> np.ndarray:
        raise AssertionError("a tensor on a device has no numpy view")


@settings(derandomize=True, deadline=None, max_examples=100)
@given(data=st.data(), num_ranks=st.integers(1, 5), num_elements=st.integers(1, 40), dtype=st.sampled_from(DTYPES))
def test_zeroing_spans_on_a_device_equals_zeroing_them_on_the_cpu(
    data: st.DataObject, num_ranks: int, num_elements: int, dtype: torch.dtype
) -> None:
    edge = st.integers(0, num_elements)
    drawn = data.draw(st.lists(st.tuples(st.integers(0, num_ranks - 1), edge, edge), max_size=12))
    spans = LostSpans([row for row, *_ in drawn], [min(ends) for _, *ends in drawn], [max(ends) for _, *ends in drawn])
    naive, on_cpu = (torch.ones(num_ranks, num_elements, dtype=dtype) for _ in range(2))
    on_device = torch.ones(num_ranks, num_elements, dtype=dtype).as_subclass(_OnADevice)
    for row, start, stop in zip(spans.rows, spans.starts, spans.stops, strict=True):
        for element in range(start, stop):
            naive[row, element] = 0
    _zero_spans_(on_cpu, range(len(on_cpu)), spans)
    _zero_spans_(on_device, range(len(on_device)), spans)
    assert on_cpu.tolist() == naive.tolist()
    assert on_device.tolist() == naive.tolist()


def test_overlapping_spans_on_a_device_are_zeroed_once_and_nothing_else() -> None:
    x_RN = torch.ones(2, 10).as_subclass(_OnADevice)
    _zero_spans_(x_RN, range(2), LostSpans([0, 0, 0, 1], [2, 3, 2, 8], [6, 8, 4, 10]))
    assert x_RN.tolist() == [[1, 1, 0, 0, 0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"algorithm": "rings"}, "algorithm = 'rings' is unknown: choose one of sender, direct"),
        ({"repair": "magic"}, "repair = 'magic' is unknown: choose one of zero, rescale"),
        ({"reliable_gather": False}, r"reliable_gather = False .* is not supported: leave it True"),
    ],
)
def test_what_it_cannot_do_is_refused(settings_: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        all_reduce(torch.ones(2, 4), bernoulli(0.0), **settings_)


@pytest.mark.parametrize("x", [torch.ones(4), torch.ones(2, 4, dtype=torch.int64)])
def test_messages_must_be_stacked_and_floating_point(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"x_RN is torch\..* of shape .*: stack floating-point messages to"):
        all_reduce(x, bernoulli(0.0))
