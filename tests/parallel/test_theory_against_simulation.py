"""The expected squared errors of `notebooks.theory` against those of the lossy all-reduce, and means of repairs.

One element a packet, so that elements are lost independently of each other over Bernoulli links; over Gilbert-Elliott
links, within a block of `fec` and of `hadamard`, neighbours are lost together. Standard errors are by means of 100
batches of neighbouring elements, each far longer than a burst and of whole blocks; ranks, which share losses, are
averaged first. Of independent messages they are by message.
"""

import itertools
import math

import numpy as np
import pytest
import torch

import lossytp as ltp
from lossytp.network.losses import GilbertElliott, LossProcess, Normals
from lossytp.network.lossy_network import CommConfig
from lossytp.network.repairs import Protect
from lossytp.network.routes import ALGORITHMS
from lossytp.parallel.collectives import LossyCollective, all_reduce
from lossytp.parallel.group import RankGroup
from notebooks import theory
from tests.network.loss_statistics import assert_within, batch_means, is_within
from tests.parallel.conftest import bernoulli

REPAIRS = ["zero", "rescale", "rescale_counted", "stale", "local", "fec(4, 2)", "fec(4, 2, code='xor')"]
REPAIRS += ["hadamard", "hadamard(8)", "retransmit(1)"]
CASES = [
    (algorithm, repair, reliable_gather)
    for algorithm, repair, reliable_gather in itertools.product(ALGORITHMS, REPAIRS, [True, False])
    if algorithm != "sender" or (repair != "local" and reliable_gather)
]
OVER_BURSTS = [case for case in CASES if not case[1].startswith(("fec", "retransmit")) and case[1] != "hadamard"]
BATCHES, BATCH = 100, 128  # of whole blocks of 64, and of 4
FIRST, LAST = 15, 30  # messages: until the first, hops deliver all elements a few times, and ages become stationary
# ranks, loss rate, coherence
SETTINGS = [(2, 0.3, 1.0), (4, 0.1, 0.0), (8, 0.01, 0.5), (3, 0.3, -0.4), (5, 0.1, 0.5), (7, 0.3, 0.0), (3, 0.3, 1.0)]
SETTINGS += [(6, 0.1, -0.15)]
SETTINGS_STALE = [(2, 0.3, 0.0), (4, 0.1, 1.0), (3, 0.3, 0.5), (5, 0.1, -0.2), (8, 0.01, 0.0), (4, 0.3, 0.5)]
SAME_AS_ZERO = ("switch", "local", True)  # a switch has no part of its own
SETTINGS_FEW_LEFT = [setting for setting in SETTINGS if setting[1] > 0.01]  # of 0.01, too little to be seen here


def parts(ranks: int, coherence: float, elements: int, generator: torch.Generator) -> torch.Tensor:
    products_RR = np.full((ranks, ranks), coherence) + (1 - coherence) * np.eye(ranks)
    values_R, vectors_RR = np.linalg.eigh(products_RR)
    root_RR = torch.from_numpy(vectors_RR * np.sqrt(np.maximum(values_R, 0)))
    return root_RR @ torch.randn(ranks, elements, generator=generator, dtype=torch.float64)


def wired(algorithm: str, repair: str, reliable_gather: bool) -> CommConfig:
    return CommConfig.named(algorithm=algorithm, repair=repair, reliable_gather=reliable_gather)


def collective(process: LossProcess, algorithm: str, repair: str, ranks: int, reliable_gather: bool) -> LossyCollective:
    network = ltp.LossyNetwork(process, seed=3, wire=ltp.Wire(elements=1))
    return LossyCollective(network, RankGroup(ranks), wired(algorithm, repair, reliable_gather))


def simulated(
    process: LossProcess, algorithm: str, repair: str, ranks: int, coherence: float, reliable_gather: bool
) -> tuple[float, float]:
    """Mean of the relative squared error, and its standard error."""
    lossy = collective(process, algorithm, repair, ranks, reliable_gather)
    generator = torch.Generator().manual_seed(ranks)
    batch, first, last = (BATCH // 4, FIRST, LAST) if repair == "stale" else (BATCH, 0, 1)
    errors_N = torch.zeros(BATCHES * batch, dtype=torch.float64)
    for message in range(last):
        x_RN = parts(ranks, coherence, len(errors_N), generator)
        result = lossy.sum_(x_RN.clone())
        if message >= first:
            errors_N += ((result - x_RN.sum(0)) ** 2).view(-1, len(errors_N)).mean(0) / (last - first)
    mean, standard_error = batch_means(errors_N.numpy() / (ranks + coherence * ranks * (ranks - 1)))
    return float(mean), float(standard_error)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)), ids=map(str, CASES))
def test_bernoulli(number, case):
    algorithm, repair, reliable_gather = case
    settings = SETTINGS_STALE if repair == "stale" else SETTINGS
    settings = SETTINGS_FEW_LEFT if repair.startswith(("fec", "retransmit")) else settings
    for setting in range(number, number + 2):
        ranks, rate, coherence = settings[setting % len(settings)]
        expected = theory.expected_squared_error(wired(algorithm, repair, reliable_gather), ranks, rate, coherence)
        estimate = simulated(ltp.Bernoulli(loss_rate=rate), algorithm, repair, ranks, coherence, reliable_gather)
        assert_within(estimate, expected, (case, ranks, rate, coherence))


@pytest.mark.slow
@pytest.mark.parametrize("case", OVER_BURSTS, ids=str)
def test_gilbert_elliott_of_the_same_rate(case):
    algorithm, repair, reliable_gather = case
    process = GilbertElliott.from_loss_and_burst(loss_rate=0.2, mean_burst_packets=4)
    expected = theory.expected_squared_error(wired(algorithm, repair, reliable_gather), 4, process.loss_rate, 0.5)
    assert_within(simulated(process, algorithm, repair, 4, 0.5, reliable_gather), expected, case)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "repair", "reliable_gather"), CASES)
def test_these_comparisons_can_fail(algorithm, repair, reliable_gather):
    """They tell a loss rate from a higher one, a repair from none, and a reliable gather from a lossy one."""
    coherence = 0.9 if repair == "local" else 0.0
    estimate = simulated(ltp.Bernoulli(loss_rate=0.3), algorithm, repair, 3, coherence, reliable_gather)
    wrong = [(repair, 0.4, reliable_gather)]
    if repair not in ("zero", "hadamard", "hadamard(8)") and (algorithm, repair, reliable_gather) != SAME_AS_ZERO:
        wrong.append(("zero", 0.3, reliable_gather))
    if algorithm != "sender":
        wrong.append((repair, 0.3, not reliable_gather))
    for other, rate, gather in wrong:
        expected = theory.expected_squared_error(wired(algorithm, other, gather), 3, rate, coherence)
        assert not is_within(estimate, expected), (other, rate, gather)


@pytest.mark.slow
@pytest.mark.parametrize("reliable_gather", [True, False])
@pytest.mark.parametrize("repair", ["zero", "rescale", "rescale_counted", "retransmit(1)"])
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "sender"])
def test_mean_weights_and_share_missing(algorithm, repair, reliable_gather):
    """One rank's part at a time, over the same losses, with nothing from the others."""
    ranks, rate, elements = 4, 0.3, BATCHES * BATCH
    expected = theory.mean_weights(wired(algorithm, repair, reliable_gather), ranks, rate)
    missing_N = np.zeros(elements)
    for rank in range(ranks):
        x_RN = torch.zeros(ranks, elements, dtype=torch.float64)
        x_RN[rank] = 1
        process = ltp.Bernoulli(loss_rate=rate)
        result = collective(process, algorithm, repair, ranks, reliable_gather).sum_(x_RN).view(-1, elements)
        missing_N += (result == 0).double().mean(0).numpy() / ranks
        for chunk, weights_N in enumerate(result.mean(0).view(ranks, -1).numpy()):
            assert_within(batch_means(weights_N), expected[chunk, rank], (algorithm, repair, chunk, rank))
    share = theory.missing_share(wired(algorithm, repair, reliable_gather), ranks, rate)
    assert_within(batch_means(missing_N), share, (algorithm, repair))
    assert not is_within(batch_means(missing_N), 1.25 * share)


RANKS, RATE = 4, 0.1


def network(**wire: int) -> ltp.LossyNetwork:
    return ltp.LossyNetwork(ltp.Bernoulli(loss_rate=RATE), seed=11, wire=ltp.Wire(**wire))


def estimate(values: list[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))


def squared_and_worst(
    repair: str, algorithm: str = "switch", control: str | None = None, **wire: int
) -> tuple[list[float], list[float]]:
    lossy, generator = network(**wire), torch.Generator().manual_seed(5)
    squared, worst = [], []
    for _ in range(700):
        x_RN = torch.randn(RANKS, 256, dtype=torch.float64, generator=generator)
        error_N = all_reduce(x_RN, lossy, algorithm=algorithm, repair=repair, control=control)[0] - x_RN.sum(0)
        squared.append(float(error_N.square().sum()))
        worst.append(float(error_N.abs().max()))
    return squared, worst


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sender", "switch", "direct"])
def test_hadamard_has_zero_fills_squared_error_and_a_smaller_worst_one(algorithm):
    """p times the squares of all that crosses a link: 256 ones of each rank, or three quarters of them."""
    expected = RATE * RANKS * 256 * (0.75 if algorithm == "direct" else 1)
    hadamard, hadamard_worst = squared_and_worst("hadamard(16)", algorithm, elements=4)
    zero, zero_worst = squared_and_worst("zero", algorithm, elements=4)
    assert_within(estimate(hadamard), expected, "Hadamard's squared error")
    assert_within(estimate(zero), expected, "zero-fill's")
    difference = estimate(list(np.array(zero_worst) - np.array(hadamard_worst)))
    assert difference[0] > 4 * difference[1], "the worst coordinate's error is smaller"
    assert difference[0] > 0.2 * np.mean(zero_worst)


@pytest.mark.slow
def test_lost_elements_and_noise_have_the_squared_error_of_lost_packets():
    """Controls of a study: the same damage in expectation, in other forms. Of messages whose ranks' parts are
    independent: where they are alike, losses of several ranks add up, and noise does not."""
    estimates = {}
    for name, elements, control in (("packets", 16, None), ("elements", 1, None), ("noise", 16, "noise")):
        estimates[name] = estimate(squared_and_worst("zero", control=control, elements=elements)[0])
        assert_within(estimates[name], RATE * RANKS * 256, name)
    assert estimates["elements"][1] < 0.5 * estimates["packets"][1], "control: it varies less, so damage is another"


CAPACITY = 8
WIRE = ltp.Wire(elements=CAPACITY)


def massive(elements: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers (R, elements), a few packets of which are far larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    scale_P = torch.exp(2 * torch.randn(RANKS, elements // CAPACITY, 1, generator=generator, dtype=torch.float64))
    noise = torch.randn(RANKS, elements // CAPACITY, CAPACITY, generator=generator, dtype=torch.float64)
    return (scale_P * noise).view(RANKS, elements)


@pytest.mark.parametrize("others", ["zero", "rescale", "hadamard(4)", "retransmit(1)"])
def test_expected_error_follows_from_the_measured_norms(others):
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


def test_noise_by_hand():
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


def test_a_gathers_noise_is_of_the_sum_and_each_ranks_own():
    """Downlinks alone are noisy: the sum, 2 everywhere, has a mean square of 4."""
    network = ltp.LossyNetwork({(-1, 0): ltp.Bernoulli(loss_rate=0.25)})
    collective = LossyCollective(
        network, RankGroup(2), CommConfig.named(algorithm="switch", reliable_gather=False, control="noise")
    )
    normals = torch.from_numpy(Normals((0, "training", 0, "tp", -1, 0, "normals")).take(5)).float()
    result = collective.sum_(torch.ones(2, 5))
    assert result[1].tolist() == [2] * 5
    torch.testing.assert_close(result[0], 2 + normals)  # times the root of 0.25 * 4 = 1


def test_a_sequence_parallel_gather_is_noisy_on_the_ranks_that_it_reaches():
    comm = CommConfig(sequence_parallel=True, reliable_gather=False, control="noise")
    collective = LossyCollective(bernoulli(0.5), RankGroup(2), comm)
    x = torch.arange(1.0, 9)
    copies = collective.all_gather(x)
    for rank, own, others in ((0, slice(4), slice(4, 8)), (1, slice(4, 8), slice(4))):
        assert torch.equal(copies[rank, own], x[own])
        assert (copies[rank, others] != x[others]).all()


def test_a_reliable_network_is_without_noise():
    network, untouched = bernoulli(0.5), bernoulli(0.5)
    collective = LossyCollective(network, RankGroup(2), CommConfig(control="noise"))
    with network.reliable():
        assert collective.sum_(torch.ones(2, 6)).tolist() == [2] * 6
    assert network.state_dict() == untouched.state_dict()
    assert collective.sum_(torch.ones(2, 6)).tolist() != [2] * 6


@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_noise_in_half_precision_is_as_strong_as_elsewhere(size):
    """Squares of such numbers overflow float16, or vanish."""
    x_RN = size * torch.randn(4, 4000, generator=torch.Generator().manual_seed(0))
    errors = {}
    for dtype in (torch.float64, torch.float16):
        result = ltp.all_reduce(x_RN.to(dtype), ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.1)), control="noise")
        errors[dtype] = (result[0].double() - x_RN.double().sum(0)).norm().item()
    assert errors[torch.float16] == pytest.approx(errors[torch.float64], rel=0.02)


def test_energy_at_risk_is_refused_for_other_repairs_and_values():
    for repair, share in (("stale", 0.5), ("protect(0.1)", 2)):
        with pytest.raises(ValueError, match=f"energy_at_risk = {share}"):
            theory.expected_squared_error(CommConfig.named(repair=repair), 4, 0.1, energy_at_risk=share)
