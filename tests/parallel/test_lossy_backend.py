"""The backend `lossy`: plain gloo, or the reference; what is reliable, what its groups lose, and what it counts.

Functions named `on_rank_...` run in every process. R ranks, N elements of a message.
"""

import itertools
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_work
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lossytp as ltp
from lossytp.network.routes import ALGORITHMS
from lossytp.network.scope import Counters
from tests.parallel.operations import LOSSY, RELIABLE, REPAIRS, WIRE, Reference, network, new_group, whole_numbers

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SIZES = [9, 61]  # elements for each rank of a message, which fill no whole number of packets
INEXACT = ("rescale", "local", "hadamard", "protect")
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
def test_without_losses_is_bitwise_plain_gloo(processes, num_ranks):
    assert processes(num_ranks, on_rank_compare_with_gloo) == [[]] * num_ranks


def compare_with_reference(lossy: ltp.LossyNetwork, seed: int, names: Any, *how: Any) -> tuple:
    """What was wrong; the operations that lost something; and this rank's sums."""
    group = new_group(lossy, **dict(zip(("algorithm", "repair", "reliable_gather"), how, strict=True)))
    me, num_ranks = dist.get_rank(), dist.get_world_size()
    reference = Reference(seed, group, *how)
    wrong, lost, sums = [], set(), []
    for dtype in DTYPES if how == ("direct", "zero", True) else DTYPES[:1]:
        reference.room = 32 // dtype.itemsize
        few = 700 if how[1] in SENT_AGAIN else 200 if "protect" in how[1] else 61
        for size in SIZES if how[1:] == ("zero", True) else [few]:
            messages = [whole_numbers(rank, size * num_ranks, dtype) for rank in range(num_ranks)]
            exact = not any(name in how[1] for name in INEXACT)
            messages = messages if exact else [message.sin() for message in messages]  # no two packets are as strong
            for name in names:
                run, expect = LOSSY[name]
                before = messages[me].clone()
                results = run(messages[me], group)
                expected = expect(reference, [message.tolist() for message in messages])
                for result, values in zip(results, expected, strict=True):
                    wanted = torch.tensor(values, dtype=dtype)  # which rounds a mean
                    tolerances = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-6, "atol": 1e-5}
                    if not torch.allclose(result.flatten(), wanted, **tolerances):  # sums of whole numbers are exact
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
    if algorithm in ("sender", "direct"):  # in the others no single process knows what a packet carries
        repairs += ["protect(0.2)", "protect(0.2) + hadamard(4)"]
    return [
        compare_with_reference(lossy, seed, ESSENTIAL if number else LOSSY, algorithm, repair, reliable_gather)
        for number, (repair, reliable_gather) in enumerate(itertools.product(repairs, (True, False)))
    ]


@pytest.mark.parametrize(
    ("algorithm", "num_ranks"), [*((algorithm, 3) for algorithm in ALGORITHMS), ("direct", 2), ("ring", 4), ("tree", 4)]
)
def test_equals_the_naive_reference(processes, algorithm, num_ranks):
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


def test_a_reference_of_another_seed_disagrees(processes):
    """Control: every operation's comparison could fail."""
    assert processes(2, on_rank_compare_with_another_seed) == [LOSSY.keys()] * 2


def on_rank_refuse(repair: str, refused: list[str]) -> None:
    ltp.init_process_group(network(), algorithm="ring", repair=repair, reliable_gather=repair != "stale")
    for name in refused:
        with pytest.raises(ValueError, match="repair"):
            LOSSY[name][0](torch.ones(600), dist.group.WORLD)
    for run in [LOSSY[name][0] for name in ("all_gather",) if name not in refused] + [*RELIABLE.values()]:
        run(torch.ones(600), dist.group.WORLD)
    dist.all_reduce(torch.ones(8))  # a single packet


@pytest.mark.parametrize(
    ("repair", "refused"), [("stale", [*LOSSY]), ("protect(0.1)", ["all_reduce", "reduce_scatter"])]
)
def test_a_repair_that_a_process_cannot_do_is_refused_where_it_is_first_needed(processes, repair, refused):
    """No process knows what partial sums a ring carries, to protect the strongest."""
    processes(3, on_rank_refuse, repair, refused)


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


def test_what_is_reliable_loses_nothing_and_advances_no_link(processes):
    """And, as a control, two packets outside `reliable()` are lost by every lossy operation."""
    assert processes(2, on_rank_stay_reliable) == [([], [], True)] * 2


def on_rank_keep_saved_tensors() -> list[float]:
    ltp.init_process_group(network(1.0))
    gradients = []
    for name in ("send", "all_to_all", "all_to_all, list", "reduce_scatter", "reduce_scatter, list", "all_gather"):
        x_N = torch.zeros(100, requires_grad=True)
        y_N = x_N.exp()
        LOSSY[name][0](y_N.detach(), dist.group.WORLD)
        y_N.sum().backward()
        gradients.append(x_N.grad.sum().item())
    return gradients


def test_what_autograd_saved_survives_being_sent(processes):
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


def test_sub_groups_have_global_ranks_and_streams_of_their_own(processes):
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


def test_packets_are_counted_as_sizes_and_mtu_say(processes):
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
    messages = merged.summary("training")["messages"]
    assert (messages["called"], messages["lossy"]) == (9, 7), "not what rank 1 sent by itself"
    assert messages["by_direction"] == {"forward": {"called": 7, "lossy": 6}, "backward": {"called": 2, "lossy": 1}}
    called = {"all_gather": 1, "all_reduce": 3, "all_to_all": 2, "reduce_scatter": 1, "send": 2}
    assert {name: each["called"] for name, each in messages["by_operation"].items()} == called


def on_rank_send_odd_tensors() -> dict[str, Any]:
    """What gloo takes besides contiguous floats of one size, where everything is lost."""
    ltp.init_process_group(ltp.LossyNetwork(ltp.Bernoulli(loss_rate=1.0)))
    mine = 1.0 + 9 * dist.get_rank()
    transposed = torch.full((40, 50), mine).t().requires_grad_()
    dist.all_reduce(transposed)
    weight = nn.Parameter(torch.ones(1000))
    with torch.no_grad():
        dist.all_reduce(weight)
    outputs = [[torch.empty(800), torch.empty(3)] for _ in range(2)]
    dist.all_gather_coalesced(outputs, [torch.full((800,), mine), torch.full((3,), mine)])
    integers, floats = torch.empty(500, dtype=torch.int64), torch.empty(500)
    dist.reduce_scatter(integers, [torch.ones(500, dtype=torch.int64)] * 2)
    with ltp.reliable():
        dist.reduce_scatter(floats, [torch.ones(500)] * 2)
    return {
        "transposed": (transposed.flatten().tolist(), transposed.is_leaf, transposed.is_contiguous()),
        "parameter": weight.tolist(),
        "coalesced": [[tensor.sum().item() for tensor in pair] for pair in outputs],
        "reliable pieces": [integers.sum().item(), floats.sum().item()],
    }


def test_odd_tensors_lose_what_they_must(processes):
    """Of (50, 40) elements each rank owns half of the rows. What is lost is no step of autograd."""
    answers = processes(2, on_rank_send_odd_tensors)
    for rank, answer in enumerate(answers):
        assert answer["transposed"] == ([1.0] * 1000 + [10.0] * 1000, True, False)
        assert answer["parameter"] == [1.0] * 1000
        assert answer["reliable pieces"] == [1000, 1000.0]
        others = [0.0, 3.0 * (1 + 9 * (1 - rank))]  # 800 floats are lost, three are less than a packet
        assert answer["coalesced"][1 - rank] == others
        assert answer["coalesced"][rank] == [800.0 * (1 + 9 * rank), 3.0 * (1 + 9 * rank)]


def on_rank_begin(gathers: bool) -> list[bool]:
    """The results lose packets once each, and the links are drawn in the order of the calls."""
    lossy, repair = network(), "rescale" if gathers else "zero"
    ltp.init_process_group(lossy, algorithm="ring", repair=repair, reliable_gather=False)
    reference = Reference(3, dist.group.WORLD, "ring", repair, False)
    messages = [[whole_numbers(rank, size).tolist() for rank in range(2)] for size in (800, 900, 1000)]
    mine = [torch.tensor(parts[dist.get_rank()]) for parts in messages]
    results = [torch.empty(2 * len(x)) for x in mine] if gathers else mine
    works = [
        dist.all_gather_into_tensor(result, x, async_op=True) if gathers else dist.all_reduce(x, async_op=True)
        for result, x in zip(results, mine, strict=True)
    ]
    drawn = lossy.state_dict()
    works[2].wait()  # in another order than begun
    works[0].get_future().wait()
    while not works[1].is_completed():
        pass
    once = [result.tolist() for result in results]
    for work in works:
        work.wait()
        work.get_future().wait()
    return [
        once == [(reference.gather if gathers else reference.sum)(parts) for parts in messages],
        once == [result.tolist() for result in results],
        lossy.state_dict() == drawn,
        all(work.is_completed() for work in works),
    ]


@pytest.mark.parametrize("gathers", [False, True], ids=["sums", "gathers"])
def test_an_asynchronous_operation_loses_once_and_in_the_order_of_the_calls(processes, gathers):
    """Whether it was waited for, its future was, or it was asked until it had ended."""
    assert processes(2, on_rank_begin, gathers) == [[True] * 4] * 2


def on_rank_leave_the_waiting_to_torch() -> list[bool]:
    ltp.init_process_group(network(1.0), reliable_gather=False)
    group: Any = dist.group.WORLD
    x_N, gathered_N, pieces = torch.ones(100), torch.ones(200), [torch.ones(100), torch.ones(100)]
    lists = [[torch.ones(100), torch.ones(50)] for _ in range(2)]
    operations: list[tuple[torch.Tensor, Callable[[], Any]]] = [
        (x_N, lambda: dist.all_reduce(x_N, async_op=True)),
        (gathered_N, lambda: dist.all_gather_into_tensor(gathered_N, torch.ones(100), async_op=True)),
        (pieces[1 - dist.get_rank()], lambda: dist.all_gather(pieces, torch.ones(100), async_op=True)),
        (lists[1 - dist.get_rank()][1], lambda: group.allgather_coalesced(lists, [torch.ones(100), torch.ones(50)])),
    ]
    answers = []
    for tensor, begin in operations:
        _register_work(tensor, begin())
        answers.append(wait_tensor(tensor).eq(0).any().item())
    return [*answers, not group._under_way]


def test_cplusplus_can_wait_for_a_handle_that_python_has_forgotten(processes):
    """A handle whose Python half is gone would wait for ever."""
    assert processes(2, on_rank_leave_the_waiting_to_torch) == [[True] * 5] * 2


def on_rank_ask_for_results() -> list:
    ltp.init_process_group(network(0.0))
    group: Any = dist.group.WORLD
    answers = []
    for _ in range(2):
        outputs = [[torch.zeros(30), torch.zeros(20)] for _ in range(2)]
        inputs = [torch.full((30,), 1.0 + dist.get_rank()), torch.full((20,), 3.0 + dist.get_rank())]
        work = group.allgather_coalesced(outputs, inputs)
        values = work.get_future().wait() if not answers else work.result()
        answers.append([value.mean().item() for value in values])
        answers.append([work.is_completed(), work.is_success(), work.exception()])
    return answers


def test_a_handle_of_several_has_their_results(processes):
    each = [[1.0, 2.0, 3.0, 4.0], [True, True, None]] * 2
    assert processes(2, on_rank_ask_for_results) == [each] * 2


def start(backend: str) -> None:
    if backend == "gloo":
        dist.init_process_group("gloo")
    else:
        ltp.init_process_group(network(0.0), reliable_gather=backend == "lossy")


def tiny_model(*, buffers: bool = False, rank: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32) if buffers else nn.Tanh(), nn.Linear(32, 6))


def data() -> Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(dist.get_rank()))


def total(tensors: Any) -> float:
    return sum(tensor.double().sum().item() for tensor in tensors)


def state_dict_of_rank_0() -> list[float]:
    model = tiny_model()
    given = dict(tiny_model(rank=5).state_dict()) if dist.get_rank() == 0 else {}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    set_model_state_dict(model, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return [total(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).values())]


def full_state_dict_of_fsdp() -> list[float]:
    model = FullyShardedDataParallel(tiny_model(), device_id=torch.device("cpu"))
    model(data()).sum().backward()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return [total(model.state_dict().values())]


def sparse_embedding() -> list[float]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Embedding(40, 12, sparse=True))
    model(torch.tensor([dist.get_rank(), 3])).square().sum().backward()
    gradient: Any = model.module.weight.grad
    return gradient.to_dense().flatten().tolist()


def join_uneven_inputs() -> list[float]:
    model = DistributedDataParallel(tiny_model())
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2 + dist.get_rank()):
            model(data()).square().sum().backward()
    return [total(parameter.grad for parameter in model.parameters())]


def compiled(*, static_graph: bool) -> list[float]:
    torch._dynamo.reset()
    model = DistributedDataParallel(tiny_model(buffers=True), static_graph=static_graph)
    run = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        run(data()).square().sum().backward()
    return [total(parameter.grad for parameter in model.parameters()), total(model.buffers())]


def monitored_barriers() -> list[str]:
    dist.monitored_barrier()
    dist.monitored_barrier(dist.new_group([0, 1]), timedelta(seconds=30), wait_all_ranks=True)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7))
    group: Any = dist.group.WORLD
    told = [str(group._get_backend(torch.device("cpu")).options._timeout)]
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
            dist.monitored_barrier(timeout=timedelta(milliseconds=50))
    return told


FEATURES: dict[str, Callable[[], list]] = {
    "a state dict of rank 0": state_dict_of_rank_0,
    "FSDP's full state dict": full_state_dict_of_fsdp,
    "DDP with a sparse embedding": sparse_embedding,
    "DDP with uneven inputs": join_uneven_inputs,
    "DDP compiled, with buffers": lambda: compiled(static_graph=False),
    "DDP compiled, with buffers and a static graph": lambda: compiled(static_graph=True),
    "monitored barriers and a timeout": monitored_barriers,
}


def on_rank_run(name: str, backend: str) -> list:
    start(backend)
    return FEATURES[name]()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["lossy", "lossy gather"])
@pytest.mark.parametrize("name", FEATURES)
def test_without_losses_it_is_as_over_gloo(processes, name, backend):
    assert processes(2, on_rank_run, name, backend) == processes(2, on_rank_run, name, "gloo")


def on_rank_sum_sparse_ones() -> float:
    ltp.init_process_group(network(1.0))
    x_N = torch.sparse_coo_tensor([list(range(100))], torch.ones(100), (100,))
    dist.all_reduce(x_N, group=new_group(network(1.0), algorithm="sender"))
    return x_N.to_dense().sum().item()


def test_a_sparse_sum_is_reliable(processes):
    assert processes(2, on_rank_sum_sparse_ones) == [200.0] * 2


def on_rank_join_over_losses() -> tuple[float, int]:
    lossy = network(0.3)
    ltp.init_process_group(lossy, reliable_gather=False)
    return join_uneven_inputs()[0], lossy.summary("training")["lost"]


def test_uneven_inputs_end_over_losses_too(processes):
    """DDP keeps only the C++ half of the handles of joined ranks."""
    for gradients, lost in processes(2, on_rank_join_over_losses):
        assert math.isfinite(gradients)
        assert lost > 0
