"""What one link that loses everything does to lossy collectives, worked out by hand."""

import pytest
import torch

import lossytp as ltp
from lossytp.network.lossy_network import CommConfig
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup
from tests.parallel.algorithms_and_repairs import ALGORITHMS, PHASES, run

# --- one link that loses everything: rank r's elements are all 10 ** r, two to a chunk, chunk c being rank c's

DEAD = {
    ("direct", (1, 0), "zero"): {
        "reliable gather": [[101, 101, 111, 111, 111, 111]] * 3,
        "lossy gather": [
            [101, 101, 0, 0, 111, 111],
            [101, 101, 111, 111, 111, 111],
            [101, 101, 111, 111, 111, 111],
        ],
        "sequence-parallel": [
            [101, 101, 111, 111, 111, 111],  # the ranks' chunks, then what each gathers of them
            [101, 101, 0, 0, 111, 111],
            [101, 101, 111, 111, 111, 111],
            [101, 101, 111, 111, 111, 111],
        ],
    },
    ("direct", (1, 0), "local"): {
        "reliable gather": [[102, 102, 111, 111, 111, 111]] * 3,
        "lossy gather": [
            [102, 102, 1, 1, 111, 111],
            [102, 102, 111, 111, 111, 111],
            [102, 102, 111, 111, 111, 111],
        ],
    },
    ("direct", (1, 0), "rescale_counted"): {
        "reliable gather": [[151.5, 151.5, 111, 111, 111, 111]] * 3,
    },
    # round the ring 0 -> 1 -> 2 -> 0: chunk 0 starts at rank 1, chunk 1 at rank 2, chunk 2 at rank 0
    ("ring", (2, 0), "zero"): {
        "reliable gather": [[1, 1, 11, 11, 111, 111]] * 3,
        "lossy gather": [
            [1, 1, 0, 0, 0, 0],
            [1, 1, 11, 11, 0, 0],
            [1, 1, 11, 11, 111, 111],
        ],
        "sequence-parallel": [
            [1, 1, 11, 11, 111, 111],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 11, 11, 0, 0],
            [1, 1, 11, 11, 111, 111],
        ],
    },
    ("ring", (2, 0), "local"): {
        "reliable gather": [[2, 2, 12, 12, 111, 111]] * 3,
        "lossy gather": [
            [2, 2, 1, 1, 1, 1],
            [2, 2, 12, 12, 10, 10],
            [2, 2, 12, 12, 111, 111],
        ],
    },
    ("ring", (2, 0), "rescale_counted"): {
        "reliable gather": [[3, 3, 16.5, 16.5, 111, 111]] * 3,
    },
    # 0 above 1 and 2, 1 above 3
    ("tree", (1, 0), "zero"): {
        "reliable gather": [[101] * 8] * 4,
        "lossy gather": [[101] * 8] * 4,
        "sequence-parallel": [
            [101] * 8,
            [101, 101, 0, 0, 101, 101, 0, 0],
            [101, 101, 101, 101, 101, 101, 0, 0],
            [101, 101, 0, 0, 101, 101, 0, 0],
            [101, 101, 0, 0, 101, 101, 101, 101],
        ],
    },
    ("tree", (0, 1), "zero"): {
        "reliable gather": [[1111] * 8] * 4,
        "lossy gather": [[1111] * 8, [0] * 8, [1111] * 8, [0] * 8],
        "sequence-parallel": [
            [1111, 1111, 0, 0, 1111, 1111, 0, 0],
            [1111, 1111, 0, 0, 1111, 1111, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0],
            [1111, 1111, 0, 0, 1111, 1111, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0],
        ],
    },
    ("tree", (0, 1), "local"): {
        "reliable gather": [[1111] * 8] * 4,
        "lossy gather": [[1111] * 8, [10] * 8, [1111] * 8, [1000] * 8],
    },
    ("tree", (3, 1), "local"): {
        "reliable gather": [[121] * 8] * 4,
    },
    ("switch", (1, -1), "zero"): {
        "reliable gather": [[101] * 6] * 3,
        "lossy gather": [[101] * 6] * 3,
        "sequence-parallel": [
            [101] * 6,
            [101, 101, 0, 0, 101, 101],
            [101] * 6,
            [101, 101, 0, 0, 101, 101],
        ],
    },
    ("switch", (-1, 1), "zero"): {
        "reliable gather": [[111] * 6] * 3,
        "lossy gather": [[111] * 6, [0] * 6, [111] * 6],
        "sequence-parallel": [
            [111, 111, 0, 0, 111, 111],
            [111, 111, 0, 0, 111, 111],
            [0] * 6,
            [111, 111, 0, 0, 111, 111],
        ],
    },
    ("switch", (-1, 1), "local"): {
        "lossy gather": [[111] * 6, [10] * 6, [111] * 6],
    },
    ("switch", (1, -1), "local"): {
        "lossy gather": [[101] * 6] * 3,  # no part of its own
    },
    ("sender", (1, -1), "zero"): {
        "reliable gather": [[101] * 6] * 3,
        "sequence-parallel": [[101] * 6, *[[101, 101, 0, 0, 101, 101]] * 3],
    },
    ("sender", (1, -1), "rescale_counted"): {
        "reliable gather": [[151.5] * 6] * 3,
    },
}


@pytest.mark.parametrize(
    ("algorithm", "link", "repair", "phase"), [(*names, phase) for names, phases in DEAD.items() for phase in phases]
)
def test_what_one_dead_link_does_is_as_worked_out_by_hand(
    algorithm: str, link: tuple[int, int], repair: str, phase: str
) -> None:
    expected = DEAD[algorithm, link, repair][phase]
    num_ranks, size = len(expected) - (phase == "sequence-parallel"), len(expected[0])
    network = ltp.LossyNetwork({link: ltp.Bernoulli(loss_rate=1)})
    collective = LossyCollective(
        network, RankGroup(num_ranks), CommConfig.named(algorithm=algorithm, repair=repair, **PHASES[phase])
    )
    parts_RN = (10.0 ** torch.arange(num_ranks))[:, None].repeat(1, size)
    assert run(collective, parts_RN, 1).tolist() == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_crosses_a_dead_link_is_stale_forever_and_after_a_good_one_fresh(algorithm: str) -> None:
    """A link that died after the first message: what it brought then stands in for what it should bring now."""
    link = {"sender": (1, -1), "switch": (1, -1), "ring": (2, 0)}.get(algorithm, (1, 0))
    network = ltp.LossyNetwork({link: ltp.Bernoulli(loss_rate=1)})
    collective = LossyCollective(network, RankGroup(3), CommConfig.named(algorithm=algorithm, repair="stale"))
    parts_RN = (10.0 ** torch.arange(3))[:, None].repeat(1, 6)
    whole = LossyCollective(
        ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0)), collective.group, collective.comm, collective.memories
    )
    assert whole.sum_(parts_RN.clone()).tolist() == [111] * 6
    old = {
        "sender": [212] * 6,  # ranks 0 and 2 have twice as much now, rank 1 as much as then
        "switch": [212] * 6,
        "direct": [212] * 2 + [222] * 4,
        "ring": [2 + 110] * 2 + [22 + 100] * 2 + [222] * 2,
        "tree": [212] * 6,
    }[algorithm]
    for _ in range(2):
        assert collective.sum_(2 * parts_RN).tolist() == old
    assert collective.sum_(torch.ones(3, 5)).tolist() != [3] * 5, "of another size: nothing to put in"
    assert collective.sum_(2 * parts_RN).tolist() != old, "nor of the first size any more"
