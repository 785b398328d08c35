"""Lossy collectives: sums, shards and what is gathered, of each rank's own or of all; where they are counted."""

import pytest
import torch

import lossytp as ltp
from lossytp.network import Scope, Site
from lossytp.network.lossy_network import CommConfig
from lossytp.parallel.collectives import LossyCollective, all_reduce
from lossytp.parallel.group import RankGroup
from tests.parallel.conftest import bernoulli
from tests.parallel.naive_all_reduce import ALGORITHMS, REPAIRS, naive_all_reduce, whole_numbers


@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sum_takes_parts_of_any_shape_and_sums_over_ranks(algorithm: str, repair: str) -> None:
    collective = LossyCollective(
        bernoulli(0.2, seed=5), RankGroup(4), CommConfig.named(algorithm=algorithm, repair=repair)
    )
    parts = whole_numbers(4, 3000)
    expected = naive_all_reduce(parts, bernoulli(0.2, seed=5), algorithm, repair)
    result = collective.sum_(parts.clone().view(4, 10, 30, 10))
    assert result.shape == (10, 30, 10)
    assert result.flatten().tolist() == expected


def test_packets_are_counted_at_their_site_and_in_their_group() -> None:
    network = bernoulli(0.2)
    collective = LossyCollective(network, RankGroup(2, name="second replica"))
    collective.sum_(torch.ones(2, 728 * 5), Site(3, "mlp", "backward"))
    table = network.report()
    assert table[["layer", "module", "direction", "group", "src", "dst", "packets"]].values.tolist() == [
        [3, "mlp", "backward", "second replica", 0, 1, 5],
        [3, "mlp", "backward", "second replica", 1, 0, 5],
    ]


# --- a result of each rank's own, shards, and what is rounded for sending


def test_a_sum_is_one_for_all_ranks_or_one_for_each() -> None:
    parts = whole_numbers(4, 60, torch.float64).view(4, 3, 20)
    shapes = {}
    for name, how in {
        "one stream": {},
        "own streams": {"reliable_gather": False},
        "shards": {"sequence_parallel": True},
        "shards, lossily gathered": {"sequence_parallel": True, "reliable_gather": False},
    }.items():
        collective = LossyCollective(bernoulli(0.2), RankGroup(4), CommConfig.named(**how))
        total = collective.sum_(parts.clone(), unit=20)
        copies = collective.all_gather(torch.ones(3, 20))
        how = collective.comm
        shapes[name] = tuple(total.shape), tuple(copies.shape), how.one_stream, how.own_streams
    assert shapes == {
        "one stream": ((3, 20), (4, 3, 20), True, False),
        "own streams": ((4, 3, 20), (4, 3, 20), False, True),
        "shards": ((3, 20), (4, 3, 20), False, False),
        "shards, lossily gathered": ((3, 20), (4, 3, 20), False, False),
    }


def test_a_reliable_gather_copies_nothing_and_a_lossy_one_leaves_its_input_as_it_is() -> None:
    x = torch.ones(40)
    network = bernoulli(1.0)
    reliable = LossyCollective(network, RankGroup(2), CommConfig(sequence_parallel=True)).all_gather(x)
    assert reliable.data_ptr() == x.data_ptr()
    assert network.counters.rows() == []
    lossy = LossyCollective(
        network, RankGroup(2), CommConfig(sequence_parallel=True, reliable_gather=False)
    ).all_gather(x)
    assert lossy.tolist() == [[1] * 20 + [0] * 20, [0] * 20 + [1] * 20]
    assert x.tolist() == [1] * 40


def test_shards_are_of_whole_units() -> None:
    """Three tokens of 10 elements over two ranks: two of them, and one."""
    network = ltp.LossyNetwork({(0, 1): ltp.Bernoulli(loss_rate=1.0)})
    comm = CommConfig(sequence_parallel=True, reliable_gather=False)
    collective = LossyCollective(network, RankGroup(2), comm)
    assert collective.sum_(torch.ones(2, 30), unit=10).tolist() == [2] * 20 + [1] * 10
    assert collective.all_gather(torch.ones(30), unit=10)[1].tolist() == [0] * 20 + [1] * 10


def test_each_phase_is_counted_at_a_site_of_its_own() -> None:
    site = Site(1, "mlp", "forward")
    for comm, expected in (
        (CommConfig(reliable_gather=False), {("all_reduce", "reduce"), ("all_reduce", "gather")}),
        (
            CommConfig(sequence_parallel=True, reliable_gather=False),
            {("reduce_scatter", "reduce"), ("all_gather", "gather")},
        ),
    ):
        network = bernoulli(0.2)
        collective = LossyCollective(network, RankGroup(2), comm)
        total = collective.sum_(torch.ones(2, 1000), site)
        if comm.sequence_parallel:
            collective.all_gather(total, site)
        rows = network.counters.rows()
        assert {(row["operation"], row["phase"]) for row in rows} == expected
        assert {(row["layer"], row["module"], row["direction"]) for row in rows} == {(1, "mlp", "forward")}
        assert network.counters.summary("training")["messages"]["called"] == 2


@pytest.mark.parametrize("phase", ["reduce", "gather"])
def test_one_phase_can_be_lossy_alone(phase: str) -> None:
    network = bernoulli(1.0, scope=Scope(phase=phase))
    result = all_reduce(torch.ones(2, 4), network, algorithm="direct", reliable_gather=False)
    assert result.tolist() == ([[1] * 4] * 2 if phase == "reduce" else [[2, 2, 0, 0], [0, 0, 2, 2]])
    assert {row["phase"] for row in network.counters.rows()} == {phase}


def test_messages_are_rounded_to_the_wires_dtype_and_fill_its_packets() -> None:
    """1 + 2^-9 is no bfloat16, nor is 257: contributions and sums are rounded, to even."""
    x_RN = torch.tensor([[1 + 2**-9, 256.0], [1.0, 1.0]]).repeat_interleave(500, 1)
    for how in ({}, {"algorithm": "ring", "reliable_gather": False}):
        network = bernoulli(0.0)
        result_RN = all_reduce(x_RN, network, wire_dtype="bf16", **how)
        assert result_RN.dtype == torch.float32
        assert result_RN.tolist() == [[2.0] * 500 + [256.0] * 500] * 2
        assert {row["packets"] for row in network.counters.rows()} == {1}, "500 elements of 2 bytes"
    network = bernoulli(0.0)
    assert all_reduce(x_RN, network)[0].tolist() == [2 + 2**-9] * 500 + [257] * 500
    assert {row["packets"] for row in network.counters.rows()} == {2}, "500 elements of 4 bytes"
    network = bernoulli(0.0)
    all_reduce(x_RN.double(), network, wire_dtype="fp32")
    assert {row["packets"] for row in network.counters.rows()} == {2}


def test_a_sum_begun_is_that_waited_for() -> None:
    """And says at once what its contributions lost."""
    one, other = (LossyCollective(bernoulli(0.3), RankGroup(3)) for _ in range(2))
    parts = whole_numbers(3, 6000, torch.float64)
    begun = one.begin_sum_(parts.clone())
    assert begun.missing.any
    assert torch.equal(begun.wait(), other.sum_(parts.clone()))


def test_evaluation_remembers_a_step_of_its_own() -> None:
    """Stale values of training come from training, and each evaluation starts with none."""
    network = bernoulli(1.0)
    collective = LossyCollective(network, RankGroup(2), CommConfig.named(algorithm="switch", repair="stale"))

    good = LossyCollective(bernoulli(0.0), collective.group, collective.comm, collective.memories)

    def remember(value: float) -> None:
        good.sum_(torch.full((2, 4), value))

    def recalled() -> list[float]:
        return collective.sum_(torch.ones(2, 4)).tolist()

    assert recalled() == [0] * 4
    remember(5.0)
    assert recalled() == [10] * 4
    with network.evaluation(1), good.network.evaluation(1):
        assert recalled() == [0] * 4
        remember(7.0)
        assert recalled() == [14] * 4
    with network.evaluation(2):
        assert recalled() == [0] * 4
    assert recalled() == [10] * 4
