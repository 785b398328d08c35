"""`protect` and noise in sums of real tensors: the theory of their errors, and noise by hand."""

import numpy as np
import pytest
import torch

import lossytp as ltp
from lossytp.network.losses import Normals
from lossytp.network.lossy_network import CommConfig
from lossytp.network.repairs import Protect
from lossytp.network.routes import ALGORITHMS
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup
from paper import theory
from tests.network.loss_statistics import assert_within, batch_means, is_within
from tests.parallel.conftest import bernoulli

CAPACITY, RANKS = 8, 4
WIRE = ltp.Wire(elements=CAPACITY)


def massive(elements: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers (R, elements), a few packets of which are far larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    scale_P = torch.exp(2 * torch.randn(RANKS, elements // CAPACITY, 1, generator=generator, dtype=torch.float64))
    noise = torch.randn(RANKS, elements // CAPACITY, CAPACITY, generator=generator, dtype=torch.float64)
    return (scale_P * noise).view(RANKS, elements)


@pytest.mark.parametrize("others", ["zero", "rescale", "hadamard(4)", "retransmit(1)"])
def test_expected_error_follows_from_the_measured_norms(others: str) -> None:
    """In a direct exchange of uncorrelated parts; the norms differ a thousandfold."""
    messages, loss_rate, elements = 400, 0.2, RANKS * CAPACITY * 25
    repair = "protect(0.1)" if others == "zero" else f"protect(0.1) + {others}"
    comm = CommConfig.named(repair=repair)
    collective = LossyCollective(
        ltp.LossyNetwork(ltp.Bernoulli(loss_rate=loss_rate), wire=WIRE), RankGroup(RANKS), comm
    )
    x_RN = massive(elements)
    squares_RCP = x_RN.square().view(RANKS, RANKS, -1, CAPACITY).sum(-1).numpy()
    crosses = [squares_RCP[rank, chunk] for rank in range(RANKS) for chunk in range(RANKS) if rank != chunk]
    weights = [squares.sum() for squares in crosses]
    at_risk = np.average([theory.unprotected_energy(squares, Protect(0.1)) for squares in crosses], weights=weights)
    own = 1 - sum(weights) / squares_RCP.sum()  # an owner's part crosses no link
    signs = torch.randint(0, 2, (messages, RANKS, 1), generator=torch.Generator().manual_seed(1)) * 2 - 1
    errors = []
    for sign_R1 in signs:  # random signs make the parts uncorrelated
        signed = x_RN * sign_R1
        errors.append(((collective.sum_(signed.clone()) - signed.sum(0)) ** 2).sum().item() / squares_RCP.sum())
    expected = theory.expected_squared_error(comm, RANKS, loss_rate, energy_at_risk=float(at_risk))
    expected *= (1 - own) / (1 - 1 / RANKS)  # the theory has parts of equal energy
    estimate = batch_means(np.array(errors))
    assert_within(estimate, expected, others)
    assert not is_within(estimate, theory.expected_squared_error(comm, RANKS, loss_rate)), "control: equal norms"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_massive_packets_always_arrive(algorithm: str) -> None:
    x_RN = torch.randn(RANKS, 640, generator=torch.Generator().manual_seed(0))
    x_RN[:, 160:168] = 1e6  # one packet, of one chunk
    worst = {}
    for repair in ("zero", "protect(0.05)", "protect(0.05, 'random')"):
        network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.3), seed=1, wire=WIRE)
        errors = [
            (ltp.all_reduce(x_RN, network, algorithm=algorithm, repair=repair) - x_RN.sum(0)).abs().max()
            for _ in range(20)
        ]
        worst[repair] = float(max(errors))
    assert worst["protect(0.05)"] < 100
    assert worst["zero"] > 1e5
    assert worst["protect(0.05, 'random')"] > 1e5, "control: as many packets at random places"


def test_noise_by_hand() -> None:
    """Rank 0's piece for rank 1 is 3 and 4, of mean square 12.5; its link loses 0.08, and no other anything."""
    network = ltp.LossyNetwork({(0, 1): ltp.Bernoulli(loss_rate=0.08)})
    collective = LossyCollective(network, RankGroup(2), CommConfig(control="noise"))
    x_RN = torch.tensor([[1.0, 2, 3, 4], [10, 20, 30, 40]], dtype=torch.float64)
    normals = torch.from_numpy(Normals((0, "training", 0, "tp", 0, 1, "normals")).take(4))
    for drawn in (normals[:2], normals[2:]):  # of the first message and the next
        expected = torch.tensor([11.0, 22, 33, 44], dtype=torch.float64)
        expected[2:] += drawn  # times the root of 0.08 * 12.5 = 1
        torch.testing.assert_close(collective.sum_(x_RN.clone()), expected, rtol=0, atol=1e-12)
    assert network.counters.rows() == []


def test_a_gathers_noise_is_of_the_sum_and_each_ranks_own() -> None:
    """Downlinks alone are noisy: the sum, 2 everywhere, has a mean square of 4."""
    network = ltp.LossyNetwork({(-1, 0): ltp.Bernoulli(loss_rate=0.25)})
    collective = LossyCollective(
        network, RankGroup(2), CommConfig.named(algorithm="switch", reliable_gather=False, control="noise")
    )
    normals = torch.from_numpy(Normals((0, "training", 0, "tp", -1, 0, "normals")).take(5)).float()
    result = collective.sum_(torch.ones(2, 5))
    assert result[1].tolist() == [2] * 5
    torch.testing.assert_close(result[0], 2 + normals)  # times the root of 0.25 * 4 = 1


def test_a_sequence_parallel_gather_is_noisy_on_the_ranks_that_it_reaches() -> None:
    comm = CommConfig(sequence_parallel=True, reliable_gather=False, control="noise")
    collective = LossyCollective(bernoulli(0.5), RankGroup(2), comm)
    x = torch.arange(1.0, 9)
    copies = collective.all_gather(x)
    for rank, own, others in ((0, slice(4), slice(4, 8)), (1, slice(4, 8), slice(4))):
        assert torch.equal(copies[rank, own], x[own])
        assert (copies[rank, others] != x[others]).all()


def test_a_reliable_network_is_without_noise() -> None:
    network, untouched = bernoulli(0.5), bernoulli(0.5)
    collective = LossyCollective(network, RankGroup(2), CommConfig(control="noise"))
    with network.reliable():
        assert collective.sum_(torch.ones(2, 6)).tolist() == [2] * 6
    assert network.state_dict() == untouched.state_dict()
    assert collective.sum_(torch.ones(2, 6)).tolist() != [2] * 6


@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_noise_in_half_precision_is_as_strong_as_elsewhere(size: float) -> None:
    """Squares of such numbers overflow float16, or vanish."""
    x_RN = size * torch.randn(4, 4000, generator=torch.Generator().manual_seed(0))
    errors = {}
    for dtype in (torch.float64, torch.float16):
        result = ltp.all_reduce(x_RN.to(dtype), ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.1)), control="noise")
        errors[dtype] = (result[0].double() - x_RN.double().sum(0)).norm().item()
    assert errors[torch.float16] == pytest.approx(errors[torch.float64], rel=0.02)


def test_energy_at_risk_is_refused_for_other_repairs_and_values() -> None:
    for repair, share in (("stale", 0.5), ("protect(0.1)", 2)):
        with pytest.raises(ValueError, match=f"energy_at_risk = {share}"):
            theory.expected_squared_error(CommConfig.named(repair=repair), 4, 0.1, energy_at_risk=share)
