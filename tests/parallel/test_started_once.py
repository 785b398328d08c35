"""One lossy network a process, and what it says of copies that drift apart."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import lossytp as ltp
from lossytp.parallel.data_parallel import data_parallel
from lossytp.parallel.group import Layout, RankGroup
from lossytp.parallel.replicas import clip_gradients_, gathered, merge_counters, replica_drift
from tests.parallel.conftest import bernoulli, tiny_batch, tiny_gpt2


def on_rank_start_twice() -> tuple[float, float]:
    ltp.init_process_group(bernoulli(1.0))
    with pytest.raises(ValueError, match="initialised already"):
        ltp.init_process_group(bernoulli(0.0))
    x = torch.ones(4000)
    with ltp.reliable():
        dist.all_reduce(x)
    lossy = torch.ones(4000)
    dist.all_reduce(lossy, group=dist.new_group())
    return x.sum().item(), lossy.sum().item()


def test_a_second_start_is_refused_and_changes_nothing(processes: Callable) -> None:
    """`reliable()` and new groups are still those of the first network."""
    assert processes(2, on_rank_start_twice) == [(8000.0, 4000.0)] * 2


def on_rank_clip() -> tuple[list[float], list[float], float]:
    """Norms of two ranks of one replica whose gradients lost different packets, and how far they drift."""
    network = bernoulli(0.05, wire=ltp.Wire(mtu_bytes=100))
    ltp.init_process_group(network)
    layout = Layout(2, 2, 1, dist.get_rank(), 4)
    model = ltp.parallelize(tiny_gpt2("classifier"), network, tensor_parallel_size=2, group=layout.tensor_group())
    wrapped = data_parallel(model, layout.mesh["dp"], "ddp")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped(**tiny_batch("classifier")).loss.backward()
    norm = clip_gradients_(wrapped, 1.0, layout, network)
    after = clip_gradients_(wrapped, None, layout, network)
    optimizer.step()
    drift = replica_drift(wrapped, layout, network)
    return gathered(norm, network), gathered(after, network), drift


def test_tensor_parallel_ranks_clip_alike_where_their_copies_differ(processes: Callable) -> None:
    for norms, after, drift in processes(4, on_rank_clip):
        assert norms[0] == norms[1]
        assert norms[2] == norms[3]
        assert after == pytest.approx([1.0] * 4)
        assert drift > 1e-4, "the control: their gradients lost different packets"


def on_rank_drift() -> float:
    network = bernoulli(0.0)
    ltp.init_process_group(network)
    layout = Layout(1, 2, 1, dist.get_rank(), 2)
    model = data_parallel(tiny_gpt2("classifier"), layout.mesh["dp"], "ddp")
    assert replica_drift(model, layout, network) == 0
    if dist.get_rank() == 1:
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
    return replica_drift(model, layout, network)


def test_data_parallel_copies_are_compared_too(processes: Callable) -> None:
    assert processes(2, on_rank_drift) == pytest.approx([0.5 / 1.25] * 2)


def on_rank_sub_groups() -> tuple[tuple[int, ...], str, int]:
    """Two pairs of ranks sum the same amount over networks of the same seed."""
    network = bernoulli(0.2)
    ltp.init_process_group(network)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = RankGroup(2, process_group=pairs[dist.get_rank() // 2])
    ltp.parallelize(tiny_gpt2(), network, tensor_parallel_size=2, group=mine)(**tiny_batch())
    before = network.counters.summary("training")["packets"]
    merge_counters(network)
    assert network.counters.summary("training")["packets"] == 2 * before
    return mine.ranks, mine.name, before


def test_a_group_is_numbered_by_its_first_process(processes: Callable) -> None:
    """So that two groups lose packets of their own, and are counted both."""
    answers = processes(4, on_rank_sub_groups)
    assert [answer[:2] for answer in answers] == [((0, 1), "tp")] * 2 + [((2, 3), "tp2")] * 2
    assert answers[0][2] > 0


def on_rank_poll() -> tuple[float, float]:
    ltp.init_process_group(bernoulli(1.0))
    output = torch.empty(8000)
    work = dist.all_gather_into_tensor(output, torch.ones(4000), async_op=True)
    while not work.is_completed():
        pass
    polled = output.sum().item()
    work.wait()
    return polled, output.sum().item()


def test_who_polls_until_a_gather_is_complete_sees_what_was_lost(processes: Callable) -> None:
    assert processes(2, on_rank_poll) == [(4000.0, 4000.0)] * 2
