"""What is reliable over the backend `lossy`, what its groups lose, and what it counts.

Functions named `on_rank_...` run in every process. N elements of a message.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import lossytp as ltp
from lossytp.network.scope import Counters
from tests.parallel.backend_reference import WIRE, Reference, network
from tests.parallel.operations import LOSSY, RELIABLE, whole_numbers


def on_rank_need_stale(reliable_gather: bool) -> list[str]:
    ltp.init_process_group(network(), repair="stale", reliable_gather=reliable_gather)
    told = []
    for run, _ in LOSSY.values():
        with pytest.raises(ValueError, match="stale") as error:
            run(torch.ones(400), dist.group.WORLD)
        told.append(str(error.value))
    for run in RELIABLE.values():
        run(torch.ones(400), dist.group.WORLD)
    dist.all_reduce(torch.ones(8))  # a single packet
    return told


def test_stale_is_refused_where_it_is_first_needed(processes: Callable) -> None:
    refusal = (
        "repair = 'stale' does not work over the backend, which does not know which message follows which: choose "
        "another"
    )
    assert processes(2, on_rank_need_stale, False) == [[refusal] * len(LOSSY)] * 2


def on_rank_protect_partial_sums() -> list[str]:
    ltp.init_process_group(network(), algorithm="ring", repair="protect(0.1)")
    told = []
    for name in ("all_reduce", "reduce_scatter"):
        with pytest.raises(ValueError, match="no single process knows") as error:
            LOSSY[name][0](torch.ones(400), dist.group.WORLD)
        told.append(str(error.value))
    LOSSY["all_gather"][0](torch.ones(400), dist.group.WORLD)
    return told


def test_protect_is_refused_where_a_process_does_not_know_what_is_sent(processes: Callable) -> None:
    refusal = (
        "repair = 'protect(0.1)' does not work over the backend with algorithm = 'ring', whose packets carry sums that "
        "no single process knows: choose direct or sender, or another repair"
    )
    assert processes(3, on_rank_protect_partial_sums) == [[refusal] * 2] * 3


def on_rank_stay_reliable() -> tuple[list[str], list[str], bool]:
    """At a loss rate of 1: what was not plain gloo's, what lost nothing where it must, and whether a link advanced."""
    lossy = network(1.0)
    ltp.init_process_group(lossy)
    world, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    two_packets, whole_packet, integers = torch.arange(1.0, 13.0), torch.arange(1.0, 9.0), torch.arange(1, 801)
    wrong = []

    def compare(name: str, run: Callable, x_N: Tensor) -> None:
        if not all(map(torch.equal, run(x_N, world), run(x_N, gloo))):
            wrong.append(f"{name} of {len(x_N)} {x_N.dtype}")

    for name, run in RELIABLE.items():
        compare(name, run, two_packets)
    for name, (run, _) in LOSSY.items():
        if "mean" not in name:  # gloo has none of integers
            compare(name, run, integers)
        # a gathered message is that of all ranks together
        compare(name, run, whole_packet[:4] if "gather" in name or "pairs" in name else whole_packet)
    for block in (ltp.reliable, lossy.reliable):
        with block():
            for name, run in [*RELIABLE.items(), *((name, run) for name, (run, _) in LOSSY.items())]:
                compare(name, run, two_packets)
    untouched = lossy.state_dict() == network(1.0).state_dict()
    whole = []
    for name, (run, _) in LOSSY.items():
        x_N = two_packets[:6] if "gather" in name else two_packets  # each rank's part is one packet
        if all(map(torch.equal, run(x_N, world), run(x_N, gloo))):
            whole.append(name)
    return wrong, whole, untouched


def test_what_is_reliable_loses_nothing_and_advances_no_link(processes: Callable) -> None:
    """And, as a control, two packets outside `reliable()` are lost by every lossy operation."""
    assert processes(2, on_rank_stay_reliable) == [([], [], True)] * 2


def on_rank_keep_saved_tensors() -> list[float]:
    """Gradients through the exponential, whose backward needs its result, after that was sent."""
    ltp.init_process_group(network(1.0))
    gradients = []
    for name in ("send", "all_to_all", "all_to_all, list", "reduce_scatter", "reduce_scatter, list", "all_gather"):
        x_N = torch.zeros(100, requires_grad=True)
        y_N = x_N.exp()
        LOSSY[name][0](y_N.detach(), dist.group.WORLD)
        y_N.sum().backward()
        gradients.append(x_N.grad.sum().item())
    return gradients


def test_what_autograd_saved_survives_being_sent(processes: Callable) -> None:
    assert processes(2, on_rank_keep_saved_tensors) == [[100.0] * 6] * 2


def on_rank_use_sub_groups() -> tuple[list[str], list[list[int]], list[list], Counters]:
    lossy = network()
    ltp.init_process_group(lossy)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    groups = [mesh.get_group("row"), mesh.get_group("column")]
    pair = dist.new_group([1, 3])
    groups += [pair] if dist.get_rank() in (1, 3) else []
    wrong, sums = [], []
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        reference = Reference(3, group, "direct", "zero")
        messages = [whole_numbers(rank, 200) for rank in ranks]
        for name, (run, expect) in LOSSY.items():
            results = [result.flatten().tolist() for result in run(messages[group.rank()], group)]
            if results != expect(reference, [message.tolist() for message in messages]):
                wrong.append(f"{name} among {ranks}")
            sums += results if name == "all_reduce" else []
    return wrong, [dist.get_process_group_ranks(group) for group in groups], sums, lossy.counters


def test_sub_groups_have_global_ranks_and_streams_of_their_own(processes: Callable) -> None:
    wrongs, groups, sums, counted = zip(*processes(4, on_rank_use_sub_groups), strict=True)
    assert list(wrongs) == [[]] * 4
    assert groups[3] == [[1, 3], [2, 3], [1, 3]]
    assert sums[3][0] != sums[3][2], "two groups on the same links lost the same"
    merged = Counters()
    for counters in counted:
        merged.merge(counters)
    links = {(row["src"], row["dst"]) for row in merged.rows()}
    assert links == {(0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (2, 0), (1, 3), (3, 1)}
    # LOSSY has 6 all-reduces, 4 reduce-scatters and 9 all-gathers; a coalesced one counts as two. Each counts once
    # for a group, and each of the 5 operations of one sender once for a member.
    assert merged.summary("training")["messages"]["called"] == 19 * 5 + 5 * 10
    packets = [
        counters.summary("training")["by_operation"]["all_gather"]["packets"] for counters in (merged, counted[0])
    ]
    assert packets[0] / packets[1] == 5 / 2, "rank 0 is in two of the groups"


def on_rank_count() -> Counters:
    """Only the link 0 -> 1 loses, and all."""
    lossy = ltp.LossyNetwork({(0, 1): ltp.Bernoulli(loss_rate=1.0)}, wire=WIRE)
    ltp.init_process_group(lossy)
    dist.all_reduce(torch.ones(50))
    dist.all_reduce(torch.ones(50, dtype=torch.float64))
    dist.reduce_scatter_tensor(torch.ones(50), torch.ones(100))
    with pytest.raises(ValueError, match=r"^reduce_scatter of pieces of \[40, 41\] elements: give pieces of one size$"):
        dist.reduce_scatter(torch.ones(40), [torch.ones(40), torch.ones(41)])
    dist.all_gather_into_tensor(torch.ones(40), torch.ones(20))
    dist.all_to_all_single(torch.ones(60), torch.ones(60), [30, 30], [30, 30])
    dist.all_to_all_single(torch.ones(60), torch.ones(60), *[[60, 0] if dist.get_rank() == 0 else [0, 60]] * 2)  # stays
    if dist.get_rank() == 1:
        dist.send(torch.ones(33), 0)
        dist.recv(torch.ones(9), 0)
    else:
        dist.recv(torch.ones(33), 1)
        dist.send(torch.ones(9), 1)
    x_N = torch.ones(9, requires_grad=True)
    x_N.register_hook(lambda gradient: dist.all_reduce(gradient.clone()))
    (x_N * 2).sum().backward()
    return lossy.counters


def test_packets_are_counted_as_sizes_and_mtu_say(processes: Callable) -> None:
    merged = Counters()
    for counters in processes(2, on_rank_count):
        merged.merge(counters)
    keys = ("operation", "direction", "group", "src", "dst")
    packets = {tuple(row[key] for key in keys): (row["packets"], row["lost"]) for row in merged.rows()}
    assert packets == {
        ("all_reduce", "forward", "0@0", 0, 1): (4 + 7, 4 + 7),  # chunks of 25: 8 to a packet, and 4 in float64
        ("all_reduce", "forward", "0@0", 1, 0): (4 + 7, 0),
        ("reduce_scatter", "forward", "0@0", 0, 1): (7, 7),  # chunks of 50
        ("reduce_scatter", "forward", "0@0", 1, 0): (7, 0),
        ("all_gather", "forward", "0@0", 0, 1): (3, 3),  # shards of 20
        ("all_gather", "forward", "0@0", 1, 0): (3, 0),
        ("all_to_all", "forward", "0@0 from 0", 0, 1): (4, 4),  # pieces of 30
        ("all_to_all", "forward", "0@0 from 1", 1, 0): (4, 0),
        ("send", "forward", "0@0 from 0", 0, 1): (2, 2),  # 9
        ("send", "backward", "0@0 from 1", 1, 0): (5, 0),  # 33: down, as a pipeline's gradients
        ("all_reduce", "backward", "0@0", 0, 1): (1, 1),  # chunks of 5 and 4
        ("all_reduce", "backward", "0@0", 1, 0): (1, 0),
    }
    assert merged.summary("training")["messages"] == {
        "called": 9,
        "lossy": 7,  # not what rank 1 sent by itself
        "by_direction": {"forward": {"called": 7, "lossy": 6}, "backward": {"called": 2, "lossy": 1}},
        "by_operation": {
            "all_gather": {"called": 1, "lossy": 1},
            "all_reduce": {"called": 3, "lossy": 3},
            "all_to_all": {"called": 2, "lossy": 1},
            "reduce_scatter": {"called": 1, "lossy": 1},
            "send": {"called": 2, "lossy": 1},
        },
    }


def on_rank_run_everything(seed: int, evaluate: bool) -> tuple[list[list], list[list]]:
    """Of two rounds in training, with an evaluation in between."""
    lossy = network(seed=seed)
    ltp.init_process_group(lossy)

    def results() -> list[list]:
        return [torch.cat(run(torch.ones(400), dist.group.WORLD)).tolist() for run, _ in LOSSY.values()]

    training = results()
    with lossy.evaluation(step=1):
        evaluation = results() if evaluate else []
    return training + results(), evaluation


def test_the_same_seed_loses_the_same_and_evaluation_shifts_nothing(processes: Callable) -> None:
    def run(seed: int, evaluate: bool = False) -> Any:
        return zip(*processes(2, on_rank_run_everything, seed, evaluate), strict=True)

    training, _ = run(3)
    assert next(run(3)) == training != next(run(4))
    evaluated, evaluation = run(3, evaluate=True)
    assert evaluated == training
    for during, around in zip(evaluation, training, strict=True):
        assert during not in (around[: len(LOSSY)], around[len(LOSSY) :])
