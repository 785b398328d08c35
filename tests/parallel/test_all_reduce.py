"""The lossy all-reduce of stacked messages: the reference's results in any dtype, and what it refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lossytp as ltp
from lossytp.network.routes import ALGORITHMS
from lossytp.parallel.collectives import all_reduce
from tests.parallel.conftest import bernoulli
from tests.parallel.reference import reference

REPAIRS = [
    *("zero", "rescale", "rescale_counted", "local", "hadamard", "retransmit(1)"),
    *("fec(10, 8, depth=2)", "fec(6, 4, code='xor')"),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
ALLOWED = [
    (algorithm, repair, reliable_gather)
    for algorithm in ALGORITHMS
    for repair in REPAIRS
    for reliable_gather in (True, False)
    if algorithm != "sender" or (repair != "local" and reliable_gather)
]


def whole_numbers(num_ranks: int, num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Messages whose sums are exact in any dtype, so that results can be compared bitwise."""
    generator = torch.Generator().manual_seed(num_ranks + num_elements)
    return torch.randint(-3, 4, (num_ranks, num_elements), generator=generator).to(dtype)


@pytest.mark.parametrize("num_ranks", [1, 4, 7])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equals_the_reference_in_every_dtype(algorithm: str, num_ranks: int) -> None:
    network, twin = bernoulli(0.2, seed=7), bernoulli(0.2, seed=7)
    for dtype in DTYPES:
        ranks = reference(twin, list(range(num_ranks)), algorithm, "zero", 1456 // dtype.itemsize)
        for num_elements in [0, 1, num_ranks - 1, 728 * num_ranks, 4321]:
            x_RN = whole_numbers(num_ranks, num_elements, dtype)
            before = x_RN.clone()
            result_RN = all_reduce(x_RN, network, algorithm=algorithm)
            assert result_RN.dtype == dtype
            assert result_RN.tolist() == ranks.all_reduce(x_RN.tolist(), False), (dtype, num_elements)
            assert torch.equal(x_RN, before), "the caller's messages were changed"
    lost = network.counters.summary("training")["lost"]
    assert lost > 5 or num_ranks == 1, "too few losses to prove anything"


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    how=st.sampled_from(ALLOWED),
    num_ranks=st.integers(1, 8),
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    mtu_bytes=st.integers(52, 120),
    seed=st.integers(0, 2**32),
)
def test_equals_the_reference_under_bursts_that_span_messages(
    how: tuple[str, str, bool], num_ranks: int, sizes: list[int], mtu_bytes: int, seed: int
) -> None:
    process = ltp.GilbertElliott.from_loss_and_burst(loss_rate=0.3, mean_burst_packets=6)
    network, twin = (ltp.LossyNetwork(process, seed=seed, wire=ltp.Wire(mtu_bytes=mtu_bytes)) for _ in range(2))
    algorithm, repair, reliable_gather = how
    ranks = reference(twin, list(range(num_ranks)), algorithm, repair, (mtu_bytes - 44) // 8)
    for num_elements in sizes:
        x_RN = whole_numbers(num_ranks, num_elements, torch.float64)
        result_RN = all_reduce(x_RN, network, algorithm=algorithm, repair=repair, reliable_gather=reliable_gather)
        expected_RN = torch.tensor(ranks.all_reduce(x_RN.tolist(), not reliable_gather), dtype=torch.float64)
        torch.testing.assert_close(result_RN, expected_RN.view(x_RN.shape), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("algorithm", "repair", "reliable_gather"), ALLOWED)
def test_without_losses_is_bitwise_the_plain_sum(algorithm: str, repair: str, reliable_gather: bool) -> None:
    for dtype in DTYPES:
        x_RN = torch.randn(5, 2000, generator=torch.Generator().manual_seed(0)).to(dtype)
        network = bernoulli(0.0)
        total = all_reduce(x_RN, network, algorithm=algorithm, repair=repair, reliable_gather=reliable_gather)
        assert torch.equal(total, x_RN.sum(0).expand(5, -1))
        assert network.counters.summary("training")["packets"] > 0


@pytest.mark.parametrize(("dtype", "elements"), [(torch.float64, 182), (torch.float32, 364), (torch.bfloat16, 728)])
def test_a_packet_carries_1456_bytes_of_whole_elements(dtype: torch.dtype, elements: int) -> None:
    for num_elements, packets in [(elements, 1), (elements + 1, 2), (10 * elements, 10)]:
        network = bernoulli(0.0)
        all_reduce(torch.zeros(2, num_elements, dtype=dtype), network, algorithm="sender")
        assert network.report()["packets"].tolist() == [packets, packets]


@pytest.mark.parametrize("repair", ["zero", "rescale"])
def test_when_everything_is_lost_an_owner_keeps_its_own_part(repair: str) -> None:
    x_RN = torch.tensor([[1.0] * 4, [10.0] * 4])
    for algorithm, left in (("direct", [1, 1, 10, 10]), ("sender", [0] * 4)):
        assert all_reduce(x_RN, bernoulli(1.0), algorithm=algorithm, repair=repair).tolist() == [left] * 2


def test_messages_may_lie_in_any_order_and_each_rank_holds_a_result_of_its_own() -> None:
    x_NR = whole_numbers(500, 4, torch.float64)
    result_RN = all_reduce(x_NR.t(), bernoulli(0.2))
    assert torch.equal(result_RN, all_reduce(x_NR.t().contiguous(), bernoulli(0.2)))
    expected = result_RN[1].clone()
    result_RN[0] = 7
    assert torch.equal(result_RN[1], expected)


def test_within_reliable_nothing_is_lost_scaled_or_counted() -> None:
    network, untouched = bernoulli(0.3), bernoulli(0.3)
    x_RN = whole_numbers(4, 4000)
    with network.reliable():
        assert torch.equal(all_reduce(x_RN, network, repair="rescale")[0], x_RN.sum(0))
    assert network.state_dict() == untouched.state_dict()
    assert torch.equal(all_reduce(x_RN, network), all_reduce(x_RN, untouched))


@pytest.mark.parametrize(
    ("comm", "name"),
    [
        ({"algorithm": "rings"}, "algorithm"),
        ({"repair": "fec(8)"}, "repair"),
        ({"repair": "stale"}, "repair"),
        ({"sequence_parallel": True}, "sequence_parallel"),
    ],
)
def test_what_it_cannot_do_is_refused(comm: dict, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        all_reduce(torch.ones(2, 4), bernoulli(0.1), **comm)


@pytest.mark.parametrize("x", [torch.ones(4), torch.ones(2, 4, dtype=torch.int64), np.ones((2, 3)), None])
def test_messages_are_a_stacked_floating_point_tensor(x: object) -> None:
    with pytest.raises(ValueError if isinstance(x, Tensor) else TypeError, match=r"^x_RN "):
        all_reduce(x, bernoulli(0.1))  # type: ignore[arg-type]


@pytest.mark.parametrize("network", [0.1, ltp.Bernoulli(loss_rate=0.1)])
def test_a_rate_or_a_process_is_no_network(network: object) -> None:
    with pytest.raises(TypeError, match=r"^network "):
        all_reduce(torch.ones(2, 3), network)  # type: ignore[arg-type]


@pytest.mark.parametrize("comm", [{"repair": "rescale"}, {"control": "noise"}])
def test_a_recorded_link_without_losses_changes_nothing_however_others_lose(comm: dict) -> None:
    """Chunk 0 crosses 1>0, which lost nothing in the recording; 0>1 lost two of five packets."""
    links = {(0, 1): ltp.Trace(lost=[1, 3], num_packets=5), (1, 0): ltp.Trace(lost=[], num_packets=5)}
    total_RN = all_reduce(torch.ones(2, 7280), ltp.LossyNetwork(links), **comm)
    assert (total_RN[:, :3640] == 2).all()
    assert not (total_RN[:, 3640:] == 2).all()


@pytest.mark.parametrize("dead", [ltp.Bernoulli(loss_rate=1.0), ltp.Trace(lost=[0], num_packets=1)])
def test_a_link_that_loses_everything_cannot_be_protected(dead: object) -> None:
    with pytest.raises(ValueError, match=r"repair = 'protect\(0.1\)' cannot work, because the link 0>1"):
        all_reduce(torch.ones(2, 728), ltp.LossyNetwork({(0, 1): dead}), repair="protect(0.1)")  # type: ignore[dict-item]
