"""The lossy all-reduce of stacked messages against a naive one, what it is on average, and what it refuses."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lossytp as ltp
from lossytp.parallel.collectives import all_reduce
from tests.parallel.conftest import bernoulli
from tests.parallel.naive_all_reduce import ALGORITHMS, REPAIRS, naive_all_reduce, whole_numbers

EVERY_ALGORITHM = ["sender", "direct", "ring", "tree", "switch"]
EVERY_REPAIR = [
    *("zero", "rescale", "rescale_counted", "stale", "local", "hadamard", "retransmit(1)"),
    *("fec(10, 8, depth=2)", "fec(6, 4, code='xor')"),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


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


@pytest.mark.parametrize("repair", [repair for repair in EVERY_REPAIR if repair != "stale"])  # needs earlier sums
@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
@pytest.mark.parametrize("reliable_gather", [True, False])
def test_without_losses_is_bitwise_the_plain_sum(algorithm: str, repair: str, reliable_gather: bool) -> None:
    if algorithm == "sender" and (repair == "local" or not reliable_gather):
        return  # refused
    how = {"algorithm": algorithm, "repair": repair, "reliable_gather": reliable_gather}
    for dtype in DTYPES:
        x_RN = torch.randn(5, 2000, generator=torch.Generator().manual_seed(0)).to(dtype)
        network = bernoulli(0.0)
        assert torch.equal(all_reduce(x_RN, network, **how), x_RN.sum(0).expand(5, -1))
        assert network.counters.summary("training")["packets"] > 0


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


def test_a_single_sum_has_nothing_stale_to_put_in() -> None:
    with pytest.raises(
        ValueError, match="repair = 'stale' does not work for a single sum, before which nothing arrived"
    ):
        all_reduce(torch.ones(2, 6), ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.5)), repair="stale")


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


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"algorithm": "rings"}, "algorithm = 'rings' is unknown: choose one of direct, ring, sender, switch, tree"),
        ({"repair": "magic"}, "repair = 'magic' is unknown: choose one of zero, rescale"),
        ({"repair": "fec(8)"}, r"repair = 'fec\(8\)': missing a required argument: 'k'; fec takes n: int, k: int"),
        ({"wire_dtype": "fp9"}, "wire_dtype = 'fp9' is unknown: choose one of fp32, bf16, int8, fp8, int4"),
        ({"control": "silence"}, "control = 'silence' is unknown: choose one of noise"),
        ({"sequence_parallel": True}, "sequence_parallel = True does not all-reduce: leave it out"),
        ({"exact_adjoint": True, "repair": "local"}, "exact_adjoint does not work with repair = 'local'"),
        (
            {"exact_adjoint": True, "reliable_gather": False},
            "exact_adjoint does not work with lossy gathers or sequence_parallel",
        ),
        ({"algorithm": "sender", "reliable_gather": False}, "whose sum reaches every rank: choose another algorithm"),
    ],
)
def test_what_it_cannot_do_is_refused(settings_: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        all_reduce(torch.ones(2, 4), bernoulli(0.0), **settings_)


@pytest.mark.parametrize("x", [torch.ones(4), torch.ones(2, 4, dtype=torch.int64)])
def test_messages_must_be_stacked_and_floating_point(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"x_RN is torch\..* of shape .*: stack floating-point messages to"):
        all_reduce(x, bernoulli(0.0))


@pytest.mark.parametrize("x_RN", [[[1.0, 2.0]], np.ones((2, 3)), None, 1.0])
def test_messages_are_a_tensor(x_RN: object) -> None:
    with pytest.raises(TypeError, match=r"^x_RN = .* is of type \w+, not Tensor: give stacked messages, such as"):
        all_reduce(x_RN, bernoulli(0.1))  # type: ignore[arg-type]


@pytest.mark.parametrize("network", [0.1, None, ltp.Bernoulli(loss_rate=0.1)])
def test_a_rate_or_a_process_is_no_network(network: object) -> None:
    with pytest.raises(TypeError, match=r"^network = .* not LossyNetwork: give one, such as LossyNetwork\(Bernoulli"):
        all_reduce(torch.ones(2, 3), network)  # type: ignore[arg-type]


@pytest.mark.parametrize("comm", [{"repair": "rescale"}, {"control": "noise"}])
def test_a_recorded_link_without_losses_changes_nothing_however_others_lose(comm: dict) -> None:
    """Chunk 0 crosses 1>0, which lost nothing in the recording; 0>1 lost two of five packets."""
    links = {(0, 1): ltp.Trace(lost=[1, 3], num_packets=5), (1, 0): ltp.Trace(lost=[], num_packets=5)}
    total_RN = all_reduce(torch.ones(2, 7280), ltp.LossyNetwork(links), **comm)
    assert (total_RN[:, :3640] == 2).all()
    assert not (total_RN[:, 3640:] == 2).all()


def test_a_recorded_link_that_lost_everything_cannot_be_protected() -> None:
    links = {(0, 1): ltp.Trace(lost=[0], num_packets=1), (1, 0): ltp.Trace(lost=[], num_packets=5)}
    with pytest.raises(ValueError, match=r"the link 0>1 loses every packet"):
        all_reduce(torch.ones(2, 728), ltp.LossyNetwork(links), repair="protect(0.1)")
