"""Gaussian noise in place of losses."""

import pytest
import torch

import lossytp as ltp
from lossytp.network.losses import Normals
from lossytp.network.lossy_network import CommConfig
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup
from tests.parallel.conftest import bernoulli


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


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"algorithm": "ring"},
            "control = 'noise' does not work with algorithm = 'ring', whose hops carry several ranks' parts",
        ),
        ({"algorithm": "tree"}, "choose one of direct, sender, switch"),
        ({"algorithm": "switch", "sequence_parallel": True}, "choose one of direct$"),
        ({"repair": "rescale"}, "control = 'noise' loses no packets that a repair or an adjoint could act on"),
        ({"exact_adjoint": True}, "control = 'noise' loses no packets"),
    ],
)
def test_noise_is_refused_where_it_cannot_stand_in_for_losses(how: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommConfig.named(control="noise", **how)


@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_noise_in_half_precision_is_as_strong_as_elsewhere(size: float) -> None:
    """Squares of such numbers overflow float16, or vanish."""
    x_RN = size * torch.randn(4, 4000, generator=torch.Generator().manual_seed(0))
    errors = {}
    for dtype in (torch.float64, torch.float16):
        result = ltp.all_reduce(x_RN.to(dtype), ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.1)), control="noise")
        errors[dtype] = (result[0].double() - x_RN.double().sum(0)).norm().item()
    assert errors[torch.float16] == pytest.approx(errors[torch.float64], rel=0.02)
