"""What repairs do on average, within four standard errors over independent messages."""

import math

import numpy as np
import pytest
import torch

import lossytp as ltp
from lossytp.network.lossy_network import CommConfig
from lossytp.parallel.collectives import LossyCollective, all_reduce
from lossytp.parallel.group import RankGroup
from tests.network.loss_statistics import assert_within, is_within

pytestmark = pytest.mark.slow

ALGORITHMS = ["sender", "direct", "ring", "tree", "switch"]
RANKS, RATE = 4, 0.1
NUM_MESSAGES = 400


def network(**wire: int) -> ltp.LossyNetwork:
    return ltp.LossyNetwork(ltp.Bernoulli(loss_rate=RATE), seed=11, wire=ltp.Wire(**wire))


def estimate(values: list[float]) -> tuple[float, float]:
    """Mean and standard error of independent values."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))


def shares_delivered(algorithm: str, repair: str, phase: str) -> tuple[float, float]:
    """Of a sum of ones over four ranks, one element to a packet."""
    lossy, x_RN = network(elements=1), torch.ones(RANKS, 80, dtype=torch.float64)
    how = {"algorithm": algorithm, "repair": repair, "reliable_gather": phase == "reduce"}
    if phase == "sequence-parallel":
        collective = LossyCollective(lossy, RankGroup(RANKS), CommConfig.named(sequence_parallel=True, **how))
        shares = [collective.all_gather(collective.sum_(x_RN.clone())).mean() / RANKS for _ in range(NUM_MESSAGES)]
    else:
        shares = [all_reduce(x_RN, lossy, **how).mean() / RANKS for _ in range(NUM_MESSAGES)]
    return estimate(shares)


# links that lie between each of the four ranks and the sum; between the sum and each rank, or each rank's chunk;
# and, of each rank's chunk, between its owner and each rank
UP = {"sender": [1] * 4, "direct": [0, 1, 1, 1], "ring": [0, 1, 2, 3], "tree": [0, 1, 1, 2], "switch": [1] * 4}
DOWN = {"sender": [0] * 4, "direct": [0] * 4, "ring": [0] * 4, "tree": [0, 1, 1, 2], "switch": [1] * 4}
ACROSS = {
    "sender": [[1] * 4] * 4,
    "direct": [[0, 1, 1, 1]] * 4,
    "ring": [[0, 1, 2, 3]] * 4,
    "tree": [[0, 1, 1, 2], [1, 0, 2, 3], [1, 2, 0, 3], [2, 3, 3, 0]],
    "switch": [[0, 2, 2, 2]] * 4,
}


def arriving(links: list[int]) -> float:
    return float(np.mean([(1 - RATE) ** number for number in links]))


def share_zero_filled(algorithm: str, phase: str) -> float:
    """Of a sum of ones, where what is lost of it is left out."""
    if phase == "reduce":
        return arriving(UP[algorithm])
    if phase == "reduce and gather":
        return arriving(UP[algorithm]) ** 2  # the results go the same ways back
    chunks = [
        (1 - RATE) ** down * arriving(across) for down, across in zip(DOWN[algorithm], ACROSS[algorithm], strict=True)
    ]
    return arriving(UP[algorithm]) * float(np.mean(chunks))


CASES = [
    (algorithm, phase)
    for algorithm in ALGORITHMS
    for phase in ("reduce", "reduce and gather", "sequence-parallel")
    if (algorithm, phase) != ("sender", "reduce and gather")  # refused
]


@pytest.mark.parametrize(("algorithm", "phase"), CASES)
def test_expected_rescale_is_unbiased_and_zero_fill_loses_what_it_must(algorithm: str, phase: str) -> None:
    zero = shares_delivered(algorithm, "zero", phase)
    assert_within(shares_delivered(algorithm, "rescale", phase), 1, "rescaled")
    assert_within(zero, share_zero_filled(algorithm, phase), "zero-filled")
    assert not is_within(zero, 1)


def squared_and_worst(
    repair: str, algorithm: str = "switch", control: str | None = None, **wire: int
) -> tuple[list[float], list[float]]:
    """Squared error and largest absolute error of each of many sums."""
    lossy, generator = network(**wire), torch.Generator().manual_seed(5)
    squared, worst = [], []
    for _ in range(700):
        x_RN = torch.randn(RANKS, 256, dtype=torch.float64, generator=generator)
        error_N = all_reduce(x_RN, lossy, algorithm=algorithm, repair=repair, control=control)[0] - x_RN.sum(0)
        squared.append(float(error_N.square().sum()))
        worst.append(float(error_N.abs().max()))
    return squared, worst


@pytest.mark.parametrize("algorithm", ["sender", "switch", "direct"])
def test_hadamard_has_zero_fills_squared_error_and_a_smaller_worst_one(algorithm: str) -> None:
    """p times the squares of all that crosses a link: 256 ones of each rank, or three quarters of them."""
    expected = RATE * RANKS * 256 * (0.75 if algorithm == "direct" else 1)
    hadamard, hadamard_worst = squared_and_worst("hadamard(16)", algorithm, elements=4)
    zero, zero_worst = squared_and_worst("zero", algorithm, elements=4)
    assert_within(estimate(hadamard), expected, "Hadamard's squared error")
    assert_within(estimate(zero), expected, "zero-fill's")
    difference = estimate(list(np.array(zero_worst) - np.array(hadamard_worst)))
    assert difference[0] > 4 * difference[1], "the worst coordinate's error is smaller"
    assert difference[0] > 0.2 * np.mean(zero_worst)


def test_lost_elements_and_noise_have_the_squared_error_of_lost_packets() -> None:
    """Controls of a study: the same damage in expectation, in other forms. Of messages whose ranks' parts are
    independent: where they are alike, losses of several ranks add up, and noise does not."""
    estimates = {}
    for name, elements, control in (("packets", 16, None), ("elements", 1, None), ("noise", 16, "noise")):
        estimates[name] = estimate(squared_and_worst("zero", control=control, elements=elements)[0])
        assert_within(estimates[name], RATE * RANKS * 256, name)
    assert estimates["elements"][1] < 0.5 * estimates["packets"][1], "control: it varies less, so damage is another"


@pytest.mark.parametrize("algorithm", ["sender", "direct", "switch"])
def test_noise_has_no_bias_and_the_power_of_what_crosses_links(algorithm: str) -> None:
    """Of messages that are no noise themselves: element e of rank r is r + e / 10."""
    x_RN = torch.arange(RANKS)[:, None] + torch.arange(64, dtype=torch.float64) / 10
    lossy = network(elements=2)
    results = [all_reduce(x_RN, lossy, algorithm=algorithm, control="noise")[0] for _ in range(700)]
    assert lossy.counters.rows() == []
    pieces_RC = x_RN.view(RANKS, RANKS, -1).square().sum(2)  # by rank and chunk, of which its owner sends none
    crossing = pieces_RC.sum() - (pieces_RC.diagonal().sum() if algorithm == "direct" else 0)
    errors = [result_N - x_RN.sum(0) for result_N in results]
    assert_within(estimate([float(error_N.square().sum()) for error_N in errors]), float(RATE * crossing), "power")
    assert_within(estimate([float(error_N.sum()) for error_N in errors]), 0, "bias")
