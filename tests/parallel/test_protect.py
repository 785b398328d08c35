"""`protect` in sums of real tensors: the theory of its error, the exact adjoint, checkpointing, and what is refused."""

import numpy as np
import pytest
import torch

import lossytp as ltp
from lossytp.network import theory
from lossytp.network.lossy_network import CommConfig
from lossytp.network.repairs import Protect
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup
from tests.network.loss_statistics import assert_within, batch_means, is_within
from tests.parallel.algorithms_and_repairs import ALGORITHMS
from tests.parallel.conftest import gradient_error, gradients, tiny_batch
from tests.parallel.families import tiny

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


def test_energy_at_risk_is_refused_for_other_repairs_and_values() -> None:
    with pytest.raises(ValueError, match=r"energy_at_risk = 0.5 does not go with repair = 'stale': give it with"):
        theory.expected_squared_error(CommConfig.named(repair="stale"), 4, 0.1, energy_at_risk=0.5)
    with pytest.raises(ValueError, match=r"energy_at_risk = 2 is not in \[0, 1\]"):
        theory.expected_squared_error(CommConfig.named(repair="protect(0.1)"), 4, 0.1, energy_at_risk=2)


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


@pytest.mark.parametrize("repair", ["protect(0.1)", "protect(0.1) + rescale", "protect(0.1) + hadamard(4)"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_exact_adjoint_protects_what_forward_protected(algorithm: str, repair: str) -> None:
    """<u, dS v> = <dS' u, v> for steps v so small that the order of the norms stays."""
    comm = CommConfig.named(algorithm=algorithm, repair=repair, exact_adjoint=True)

    def collective() -> LossyCollective:
        return LossyCollective(ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.3), wire=WIRE), RankGroup(RANKS), comm)

    x_RN, v_RN = massive(640), massive(640, seed=1)
    u_N = torch.randn(640, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sent = collective().begin_sum_(x_RN.clone())
    gradients_RN = u_N.repeat(RANKS, 1)
    collective().adjoint_(gradients_RN, sent.hops, sent.missing)
    step = 1e-6
    along = (collective().sum_(x_RN + step * v_RN) - collective().sum_(x_RN.clone())) / step
    assert (u_N * along).sum().item() == pytest.approx((gradients_RN * v_RN).sum().item(), rel=1e-6)
    assert (gradients_RN != u_N).any(), "control: something was lost"


@pytest.mark.parametrize("repair", ["protect(0.1) + hadamard(8)", "protect(0.1) + stale"])
def test_checkpointing_protects_the_same_packets_again(repair: str) -> None:
    plain, checkpointed = (
        ltp.parallelize(
            tiny("llama"),
            ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.2), wire=WIRE),
            tensor_parallel_size=RANKS,
            repair=repair,
        )
        for _ in range(2)
    )
    checkpointed.gradient_checkpointing_enable()
    for _ in range(2):
        expected = gradients(plain, tiny_batch())
        assert gradient_error(gradients(checkpointed, tiny_batch()), expected) == 0


def test_a_link_that_loses_everything_is_refused_at_once() -> None:
    network = ltp.LossyNetwork({(0, 1): ltp.Bernoulli(loss_rate=1.0)})
    with pytest.raises(ValueError, match=r"repair = 'protect\(0.1\)' cannot work, because the link 0>1 loses"):
        ltp.all_reduce(torch.ones(2, 8), network, repair="protect(0.1)")
