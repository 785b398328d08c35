"""The backend `lossy` against plain gloo, a naive reference, and virtual ranks.

Functions named `on_rank_...` run in every process. R ranks, N elements of a message.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossytp as ltp
from lossytp.network.lossy_network import CommConfig
from lossytp.network.routes import ALGORITHMS
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup
from tests.parallel.backend_reference import Reference, network
from tests.parallel.operations import LOSSY, RELIABLE, REPAIRS, new_group, whole_numbers

pytestmark = pytest.mark.slow

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SIZES = [9, 61]  # elements for each rank of a message, which fill no whole number of packets


SENT_AGAIN = ("fec(3, 2)", "retransmit(1)")  # little is missing then
ESSENTIAL = ["all_reduce", "all_reduce, async", "all_reduce, mean", "all_reduce, coalesced", "reduce_scatter"]
ESSENTIAL += ["all_gather", "all_gather, list", "all_to_all", "send"]


def on_rank_compare_with_gloo() -> list[str]:
    lossless = network(0.0)
    ltp.init_process_group(lossless, repair="rescale")
    gloo, wrong = dist.new_group(backend="gloo"), []
    groups = {"direct": dist.group.WORLD}
    for algorithm, repair in [("ring", "hadamard(4)"), ("tree", "fec(3, 2)"), ("switch", "local"), ("sender", "zero")]:
        groups[algorithm] = new_group(lossless, algorithm=algorithm, repair=repair, reliable_gather=False)
    for algorithm, group in groups.items():
        for name, run in {**RELIABLE, **{name: run for name, (run, _) in LOSSY.items()}}.items():
            for dtype in DTYPES if algorithm == "direct" else DTYPES[:1]:
                x_N = whole_numbers(dist.get_rank(), 61 * dist.get_world_size()).sin().to(dtype)
                lossy, plain = run(x_N, group), run(x_N, gloo)
                if not all(map(torch.equal, lossy, plain)) or len(lossy) != len(plain):
                    wrong.append(f"{name} of {dtype} by {algorithm}")
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_without_losses_is_bitwise_plain_gloo(processes: Callable, num_ranks: int) -> None:
    assert processes(num_ranks, on_rank_compare_with_gloo) == [[]] * num_ranks


def compare_with_reference(lossy: ltp.LossyNetwork, seed: int, names: Any, *how: Any) -> tuple:
    """What was wrong; the operations that lost something; and this rank's sums."""
    group = new_group(lossy, **dict(zip(("algorithm", "repair", "reliable_gather"), how, strict=True)))
    me, num_ranks = dist.get_rank(), dist.get_world_size()
    reference = Reference(seed, group, *how)
    wrong, lost, sums = [], set(), []
    for dtype in DTYPES if how == ("direct", "zero", True) else DTYPES[:1]:
        reference.room = 32 // dtype.itemsize
        for size in SIZES if how[1:] == ("zero", True) else [700] if how[1] in SENT_AGAIN else [61]:
            messages = [whole_numbers(rank, size * num_ranks, dtype) for rank in range(num_ranks)]
            for name in names:
                run, expect = LOSSY[name]
                before = messages[me].clone()
                results = run(messages[me], group)
                expected = expect(reference, [message.tolist() for message in messages])
                for result, values in zip(results, expected, strict=True):
                    wanted = torch.tensor(values, dtype=dtype)  # which rounds a mean
                    rtol = 1e-6 if "rescale" in how[1] or "local" in how[1] else 0.0  # sums of whole numbers are exact
                    if not torch.allclose(result.flatten(), wanted, rtol=rtol, atol=0.0):
                        wrong.append(f"{name} of {size} {dtype}, {how}")
                if not torch.equal(messages[me], before):
                    wrong.append(f"{name} changed what it was given")
                sums += [results[0].tolist()] if name == "all_reduce" else []
                with lossy.reliable():
                    if not all(map(torch.equal, results, run(messages[me], group))):
                        lost.add(name)
    return wrong, lost, sums


def on_rank_compare_every_repair(algorithm: str, seed: int) -> list[tuple]:
    lossy = network()
    ltp.init_process_group(lossy)
    repairs = [repair for repair in REPAIRS if (algorithm, repair) != ("sender", "local")]  # which is refused
    return [
        compare_with_reference(lossy, seed, ESSENTIAL if number else LOSSY, algorithm, repair, reliable_gather)
        for number, (repair, reliable_gather) in enumerate(itertools.product(repairs, (True, False)))
    ]


@pytest.mark.parametrize(
    ("algorithm", "num_ranks"), [*((algorithm, 3) for algorithm in ALGORITHMS), ("direct", 2), ("ring", 4), ("tree", 4)]
)
def test_equals_the_naive_reference(processes: Callable, algorithm: str, num_ranks: int) -> None:
    """Whatever the repair. What is gathered reliably is the same on every rank, and else not."""
    by_rank = processes(num_ranks, on_rank_compare_every_repair, algorithm, 3)
    for number, answers in enumerate(zip(*by_rank, strict=True)):
        wrongs, losts, sums = zip(*answers, strict=True)
        assert list(wrongs) == [[]] * num_ranks
        lost, ran = set.union(*losts), set(ESSENTIAL) if number else LOSSY.keys()
        assert lost == ran, "without losses it proves nothing"
        reliable_gather = number % 2 == 0 or algorithm == "sender"
        assert all(each == sums[0] for each in sums) == reliable_gather


def on_rank_compare_with_another_seed() -> set[str]:
    lossy = network()
    ltp.init_process_group(lossy)
    wrong, *_ = compare_with_reference(lossy, 4, LOSSY, "direct", "zero", False)
    return {line.split(" of ")[0] for line in wrong}


def test_a_reference_of_another_seed_disagrees(processes: Callable) -> None:
    """Control: every operation's comparison could fail."""
    assert processes(2, on_rank_compare_with_another_seed) == [LOSSY.keys()] * 2


def on_rank_compare_with_virtual_ranks(algorithm: str) -> list[str]:
    """Whatever the repair: this rank's row of what the library's own collectives give stacked ranks."""
    lossy = network()
    ltp.init_process_group(lossy)
    me, num_ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    repairs = [*REPAIRS, "hadamard(4)"]
    if algorithm in ("sender", "direct"):
        repairs += ["protect(0.2)", "protect(0.2) + hadamard(4)"]
    for repair, reliable_gather in itertools.product(repairs, (True, False)):
        if algorithm == "sender" and (repair == "local" or not reliable_gather):
            continue
        group = new_group(lossy, algorithm=algorithm, repair=repair, reliable_gather=reliable_gather)
        how = {"algorithm": algorithm, "repair": repair, "reliable_gather": reliable_gather}
        sums = LossyCollective(network(), RankGroup(num_ranks, name=f"{group.group_name}@0"), CommConfig.named(**how))
        scattered = replace(sums, comm=CommConfig.named(**how | {"sequence_parallel": True, "reliable_gather": True}))
        how["repair"] = "zero" if repair == "local" else repair  # no rank has a part of its own of what it gathers
        shards = replace(sums, comm=CommConfig.named(**how | {"sequence_parallel": True, "reliable_gather": False}))
        for size in SIZES:
            x_RN = torch.stack([whole_numbers(rank, size * num_ranks) for rank in range(num_ranks)])
            total = sums.sum_(x_RN[:, :-1].contiguous())
            wanted = {
                "all_reduce": total if reliable_gather else total[me],
                "reduce_scatter": scattered.sum_(x_RN.clone()).chunk(num_ranks)[me],
                "all_gather": shards.all_gather(x_RN.flatten())[me],
            }
            for name, values in wanted.items():
                (result,) = LOSSY[name][0](x_RN[me], group)
                if not torch.allclose(result, values, rtol=1e-6, atol=1e-5):
                    wrong.append(f"{name} of {size} by {how}")
    return wrong


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equals_virtual_ranks_over_the_same_streams(processes: Callable, algorithm: str) -> None:
    assert processes(3, on_rank_compare_with_virtual_ranks, algorithm) == [[]] * 3
