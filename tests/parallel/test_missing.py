"""What stands where packets are missing: zeroed spans on any device, the way back, and memories."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lossytp as ltp
from lossytp.network.lossy_network import CommConfig
from lossytp.parallel import collectives as missing
from lossytp.parallel.collectives import LossyCollective, _zero_spans_
from lossytp.parallel.group import RankGroup
from tests.parallel.conftest import bernoulli

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


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
    edges = st.lists(st.integers(0, num_elements), min_size=2, max_size=2, unique=True)  # no packet is empty
    drawn = data.draw(st.lists(st.tuples(st.integers(0, num_ranks - 1), edges), min_size=1, max_size=12))
    columns = [row for row, _ in drawn], [min(ends) for _, ends in drawn], [max(ends) for _, ends in drawn]
    spans = [np.array(column, dtype=np.int64) for column in columns]
    naive, on_cpu = (torch.ones(num_ranks, num_elements, dtype=dtype) for _ in range(2))
    on_device = torch.ones(num_ranks, num_elements, dtype=dtype).as_subclass(_OnADevice)
    for row, ends in drawn:
        for element in range(min(ends), max(ends)):
            naive[row, element] = 0
    _zero_spans_(on_cpu, *spans)
    _zero_spans_(on_device, *spans)
    assert on_cpu.tolist() == naive.tolist()
    assert on_device.tolist() == naive.tolist()


def test_overlapping_spans_on_a_device_are_zeroed_once_and_nothing_else() -> None:
    x_RN = torch.ones(2, 10).as_subclass(_OnADevice)
    _zero_spans_(x_RN, *(np.array(column) for column in ([0, 0, 0, 1], [2, 3, 2, 8], [6, 8, 4, 10])))
    assert x_RN.tolist() == [[1, 1, 0, 0, 0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_spans_are_zeroed_as_few_are(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a number on all at once, also on the CPU."""
    rows = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    results = []
    for few in (missing.FEW_SPANS, 0):
        monkeypatch.setattr(missing, "FEW_SPANS", few)
        network = bernoulli(0.3, wire=ltp.Wire(elements=7))
        results.append(LossyCollective(network, RankGroup(3), CommConfig.named(algorithm="ring")).sum_(rows.clone()))
    assert torch.equal(*results)
    assert not torch.equal(results[0], rows.sum(0))


ADJOINTS = ["zero", "rescale", "rescale_counted", "hadamard(8)", "fec(3, 2)", "retransmit(1)"]


@pytest.mark.parametrize("algorithm", ["sender", "direct", "ring", "tree", "switch"])
@pytest.mark.parametrize("repair", ADJOINTS)
def test_the_adjoint_is_that_of_the_lossy_sum(algorithm: str, repair: str) -> None:
    """The sum's product with any y is the contributions' with y taken back, also through padded blocks."""
    generator = torch.Generator().manual_seed(0)
    x_RN, y_N = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, 93), (93,)))
    network = bernoulli(0.3, wire=ltp.Wire(elements=3))
    comm = CommConfig.named(algorithm=algorithm, repair=repair, exact_adjoint=True)
    collective = LossyCollective(network, RankGroup(5), comm)
    begun = collective.begin_sum_(x_RN.clone())
    back_RN = y_N.repeat(5, 1)
    collective.adjoint_(back_RN, begun.hops, begun.missing)
    assert begun.missing.any
    assert torch.isclose(begun.wait() @ y_N, (x_RN * back_RN).sum(), rtol=1e-11)
    assert not torch.isclose(begun.wait() @ y_N, x_RN.sum(0) @ y_N, rtol=1e-3), "control"


def test_what_stood_in_from_before_has_no_gradient() -> None:
    network = bernoulli(1.0)
    collective = LossyCollective(network, RankGroup(2), CommConfig.named(repair="stale", exact_adjoint=True))
    begun = collective.begin_sum_(torch.ones(2, 4))
    back_RN = torch.ones(2, 4)
    collective.adjoint_(back_RN, begun.hops, begun.missing)
    assert back_RN.tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]


def test_memories_of_another_size_are_not_taken_for_those_of_the_same_piece() -> None:
    """Of 12 and of 9 elements over four ranks all pieces are of 3, but the third hop is another link's."""
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=1.0))
    collective = LossyCollective(network, RankGroup(4), CommConfig.named(repair="stale"))
    good = LossyCollective(bernoulli(0.0), collective.group, collective.comm, collective.memories)
    good.sum_(torch.full((4, 12), 5.0))
    assert collective.sum_(torch.ones(4, 9)).tolist() == [1] * 9


def test_memories_of_ranks_that_are_elsewhere_are_not_kept() -> None:
    """A change of layout hands over the memory of all ranks. What is not updated must not reach the next layout."""
    collective = LossyCollective(bernoulli(1.0), RankGroup(2), CommConfig.named(repair="stale"))
    collective.sum_(torch.ones(2, 4))
    ((_, kept),) = collective.memories_state()
    moved = [(size, hop, position + 2) for (size, hop, position), _ in kept]
    collective.load_memories_state(
        [[None, [*kept, *zip(moved, torch.ones(len(moved)), strict=True)]]], kept[0][1].device
    )
    collective.sum_(torch.ones(2, 4))
    assert [place for place, _ in collective.memories_state()[0][1]] == [place for place, _ in kept]


def test_a_block_of_evaluation_does_not_remember_another_of_the_same_step() -> None:
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=1.0))
    collective = LossyCollective(network, RankGroup(2), CommConfig.named(repair="stale"))
    good = LossyCollective(bernoulli(0.0), collective.group, collective.comm, collective.memories)
    remembered = []
    for value in (5.0, 1.0):
        with network.evaluation(0), good.network.evaluation(0):
            if value == 5.0:
                good.sum_(torch.full((2, 4), value))
            remembered.append(collective.sum_(torch.ones(2, 4)).tolist())
    assert remembered == [[6.0] * 4, [1.0] * 4]
