import re

import numpy as np
import pytest

from lossytp.network.probe.trace_file import FlowTrace, ProbeTrace, write_trace
from lossytp.training.config import TrainConfig

NEEDS_OWN_LAYERS = (
    " needs this project's tensor-parallel layers, which know where a message is from: leave it out, or give "
    "implementation = 'lossytp' and tensor_parallel_size above 1"
)
NEEDS_THEM_ALONE = (
    " needs this project's layers, and tensor parallelism alone: leave it out, or leave out implementation, "
    "data_parallel_size and pipeline_parallel_size"
)
ELSEWHERE = [{"implementation": "dtensor"}, {"implementation": "megatron"}]
ONE_RANK = [{"tensor_parallel_size": 1}, {"tensor_parallel_size": 1, "data_parallel_size": 2}]
SPREAD = [{"data_parallel_size": 2}, {"pipeline_parallel_size": 2}]
OWN = {"reliable_gather": False}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(
            ({**value, **how}, f"{name} = {value[name]!r}" + reason)
            for value, hows, reason in (
                ({"repair": "stale"}, ELSEWHERE + SPREAD, NEEDS_THEM_ALONE),
                ({"repair": "stale()"}, SPREAD, NEEDS_THEM_ALONE),
                ({"control": "noise"}, ELSEWHERE + SPREAD, NEEDS_THEM_ALONE),
                ({"sequence_parallel": True}, ELSEWHERE + ONE_RANK, NEEDS_OWN_LAYERS),
                ({"exact_adjoint": True}, ELSEWHERE + ONE_RANK, NEEDS_OWN_LAYERS),
                ({"wire_dtype": "bf16"}, ELSEWHERE + ONE_RANK, NEEDS_OWN_LAYERS),
                ({"lossy_module": "mlp"}, ELSEWHERE + ONE_RANK, NEEDS_OWN_LAYERS),
                ({"lossy_layers": "0:1"}, ELSEWHERE + ONE_RANK, NEEDS_OWN_LAYERS),
            )
            for name in value
            for how in hows
        ),
        *(
            (
                {"repair": "local", **how},
                "repair = 'local' does not work with a pipeline or fsdp, in whose sends and all-gathers a receiver has "
                "no part of its own: choose another repair",
            )
            for how in ({"pipeline_parallel_size": 2}, {"data_parallel_size": 2, "data_parallel_type": "fsdp"})
        ),
        (
            {"repair": "protect(0.1)", "algorithm": "ring", "data_parallel_size": 2},
            "repair = 'protect(0.1)' does not work with algorithm = 'ring', whose packets carry sums that no single "
            "process knows: choose direct, or only this project's tensor parallelism",
        ),
        (
            {
                "repair": "protect(0.1)",
                "algorithm": "switch",
                "tensor_parallel_size": 1,
                "data_parallel_size": 2,
                "data_parallel_type": "fsdp",
            },
            "repair = 'protect(0.1)' does not work with algorithm = 'switch', whose packets carry sums that no single "
            "process knows: choose direct, or only this project's tensor parallelism",
        ),
        (
            {"exact_adjoint": True, "lossy_direction": "backward"},
            "exact_adjoint = True has no effect with lossy_direction = 'backward', because forward loses nothing: "
            "leave one out",
        ),
        (
            {"control": "elements", "loss_type": "g-e", "ge_config": "one"},
            "control = 'elements' does not work with loss_type = 'g-e', because controls are independent from "
            "element to element: give loss_type = 'ber'",
        ),
        ({"tensor_parallel_size": 0, "algorithm": "ring"}, "tensor_parallel_size = 0 is below 1: give 1 or more"),
        (
            {"tensor_parallel_size": 1, "data_parallel_size": 2, "lossy_direction": "forward"},
            "lossy_direction = 'forward' loses nothing with ddp alone, which sums gradients in backward: leave it out, "
            "or choose data_parallel_type = 'fsdp'",
        ),
        (
            {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "lossy_phase": "reduce"},
            "lossy_phase = 'reduce' loses nothing in a pipeline alone, which sums nothing: leave it out",
        ),
        (
            {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "lossy_links": "1>2"},
            "link 1>2 names rank 2, which is above 1, the last of 2 ranks: name links among ranks 0 to 1",
        ),
        (
            {**OWN, "tensor_parallel_size": 1},
            "reliable_gather = False has no effect where nothing is summed: give tensor_parallel_size above 1",
        ),
        (
            {**OWN, "tensor_parallel_size": 1, "data_parallel_size": 2, "replicated_gradients": "none"},
            "replicated_gradients = 'none' has no effect with tensor_parallel_size = 1, where no rank holds copies: "
            "give more ranks, or leave it out",
        ),
        *(
            (
                {"replicated_gradients": how, **shared},
                f"replicated_gradients = {how!r} has no effect where all ranks share a residual stream: give "
                "reliable_gather = False, or leave it out",
            )
            for how in ("lossy", "none")
            for shared in ({}, {**OWN, "sequence_parallel": True})
        ),
        (
            {**OWN, "replicated_gradients": "lossy", "repair": "local"},
            "replicated_gradients = 'lossy' does not work with repair = 'local', which would take a rank's own "
            "gradient for the sum of all: choose another repair",
        ),
        (
            {**OWN, "resync_every": 5},
            "resync_every = 5 has no effect where copies do not drift: give replicated_gradients = 'lossy' or 'none', "
            "or leave it out",
        ),
        (
            {**OWN, "pipeline_parallel_size": 2},
            "reliable_gather = False does not work with a pipeline, whose stages hand on one residual stream: leave "
            "one out",
        ),
        (
            {**OWN, "algorithm": "sender"},
            "reliable_gather = False does not work with algorithm = 'sender', whose sum reaches every rank: choose "
            "another algorithm",
        ),
        (
            {"repair": "local", "algorithm": "sender"},
            "repair = 'local' does not work with algorithm = 'sender', where every rank lacks what is lost, and none "
            "has a part to fill in: choose another algorithm",
        ),
        (
            {**OWN, "repair": "local", "sequence_parallel": True},
            "repair = 'local' does not work with sequence_parallel and reliable_gather = False, because a rank has no "
            "part of what it gathers: choose another repair",
        ),
        (
            {
                "exact_adjoint": True,
                "repair": "rescale",
                "pipeline_parallel_size": 2,
                "tensor_parallel_size": 1,
            },
            "exact_adjoint = True works in a pipeline only with repair = 'zero', not 'rescale': give 'zero', or leave "
            "exact_adjoint out",
        ),
        (
            {"exact_adjoint": True, "repair": "local"},
            "exact_adjoint does not work with repair = 'local': choose another repair",
        ),
        *(
            (
                {"exact_adjoint": True, **how},
                "exact_adjoint does not work with lossy gathers or sequence_parallel, because the adjoint of a gather "
                "would be another lossy collective: leave reliable_gather True and sequence_parallel False",
            )
            for how in (OWN, {"sequence_parallel": True})
        ),
        (
            {"control": "noise", "algorithm": "ring"},
            "control = 'noise' does not work with algorithm = 'ring', whose hops carry several ranks' parts: "
            "choose one of direct, sender, switch",
        ),
        (
            {"control": "noise", "algorithm": "switch", "sequence_parallel": True},
            "control = 'noise' does not work with algorithm = 'switch', whose hops carry several ranks' parts: "
            "choose one of direct",
        ),
        *(
            (
                {"control": "noise", **how},
                "control = 'noise' loses no packets that a repair or an adjoint could act on: leave both out",
            )
            for how in ({"repair": "rescale"}, {"exact_adjoint": True})
        ),
        ({"control": "salt"}, "control = 'salt' is unknown: choose one of elements, noise"),
        ({"wire_dtype": "fp8"}, "wire_dtype = 'fp8' is unknown: choose one of fp32, bf16"),
        (
            {"replicated_gradients": "some"},
            "replicated_gradients = 'some' is unknown: choose one of reliable, lossy, none",
        ),
        (
            {**OWN, "replicated_gradients": "none", "resync_every": 0},
            "resync_every = 0 is below 1: give 1 or more",
        ),
        ({"reliable_gather": "no"}, "reliable_gather = 'no' is of the wrong type: give true or false"),
        (
            {"output_dir": "a\0b"},
            "output_dir = 'a\\x00b' holds a NUL character, or bytes that are not UTF-8: give another value",
        ),
        (
            {"output_dir": "a\udcff"},
            "output_dir = 'a\\udcff' holds a NUL character, or bytes that are not UTF-8: give another value",
        ),
        ({"learning_rate": 1e38}, "learning_rate = 1e+38 is above 1e+37: give 1e+37 or less"),
        ({"lossy_direction": "up"}, "direction = 'up' is unknown: choose one of forward, backward"),
        ({"lossy_module": "norm"}, "module = 'norm' is unknown: choose one of attention, mlp"),
        (
            {"lossy_phase": "gather"},
            "lossy_phase = 'gather' loses nothing where gathers are reliable: give reliable_gather = False",
        ),
        (
            {"lossy_links": "0>1,2>0", "tensor_parallel_size": 2},
            "lossy_links names 2>0, over which 'direct' of 2 ranks sends nothing that may be lost: choose among "
            "0>1,1>0",
        ),
        (
            {"lossy_links": "0>1", "tensor_parallel_size": 1},
            "lossy_links names 0>1, over which 'direct' of 1 ranks sends nothing that may be lost: choose among none",
        ),
        (  # on its way down the sum is reliable
            {"lossy_links": "-1>0", "algorithm": "switch", "tensor_parallel_size": 2},
            "lossy_links names -1>0, over which 'switch' of 2 ranks sends nothing that may be lost: choose among "
            "0>-1,1>-1",
        ),
        (
            {**OWN, "lossy_links": "1>0", "algorithm": "tree", "tensor_parallel_size": 2, "lossy_phase": "gather"},
            "lossy_links names 1>0, over which 'tree' of 2 ranks sends nothing that may be lost: choose among 0>1",
        ),
        ({"lossy_phase": "scatter"}, "phase = 'scatter' is unknown: choose one of reduce, gather"),
        *(
            (
                {"lossy_layers": text},
                f"lossy_layers = {text!r} is not understood: write first:stop, such as 0:2 (in YAML in quotes)",
            )
            for text in ("2", "0-2", ":2", "0:", "-1:2", "0:2:1", "a:b")
        ),
        (
            {"lossy_layers": "2:2"},
            "layers = (2, 2) is not a range: give the first layer and the layer after the last, such as (0, 2)",
        ),
        (
            {"lossy_layers": "3:1"},
            "layers = (3, 1) is not a range: give the first layer and the layer after the last, such as (0, 2)",
        ),
        ({"lossy_layers": "3:5"}, "lossy_layers = '3:5' is beyond gpt2-nano's 4 blocks: stop at 4"),
        (
            {"lossy_layers": 63},
            'lossy_layers = 63 is of the wrong type: give str or nothing, in YAML within quotes: "63"',
        ),
        ({"max_steps": 1.0}, "max_steps = 1.0 is of the wrong type: give int, such as 1"),
        *(
            (
                {"lossy_links": text},
                f"lossy_links = {text!r} is not understood: write source>destination, such as 0>1,2>3",
            )
            for text in ("0-1", "0>", "0>1,", "0>1;2>3", "-2>0", "0>1>2")
        ),
        (
            {"tensor_parallel_size": 1, "loss_rate": 0.5},
            "loss_rate = 0.5 has no effect on a single rank, which sends nothing: give tensor_parallel_size above 1, "
            "or loss_rate = 0",
        ),
        (
            {"data_parallel_size": 2, "lossy_phase": "gather"},
            "lossy_phase = 'gather' loses nothing where gathers are reliable: give reliable_gather = False",
        ),
        *(
            (
                {"dataset": "squad", **how},
                f"dataset = 'squad', whose answers are generated, does not work with {words}: tensor-parallel ranks "
                "with different logits would continue with different tokens; choose another dataset",
            )
            for how, words in (
                ({"implementation": "dtensor", **OWN}, "dtensor and reliable_gather = False"),
                ({"data_parallel_size": 2, "data_parallel_type": "fsdp"}, "fsdp"),
            )
        ),
        (
            {"repair": "fec(8, 10)"},
            "repair = 'fec(8, 10)': n = 8 leaves no parity packet in addition to k = 10: give n of at least 11",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_reason(values, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TrainConfig.from_dict(values)


@pytest.mark.parametrize(
    "values",
    [
        {"implementation": "dtensor", **OWN, "algorithm": "ring", "replicated_gradients": "none", "resync_every": 3},
        {"implementation": "megatron", "repair": "fec(10, 8)", "algorithm": "tree"},
        {"data_parallel_size": 2, **OWN, "replicated_gradients": "lossy"},
        {"data_parallel_size": 2, "sequence_parallel": True, "exact_adjoint": False, "wire_dtype": "bf16"},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 1, "exact_adjoint": True},
        {"pipeline_parallel_size": 2, "sequence_parallel": True, **OWN},
        {"data_parallel_size": 2, "lossy_module": "mlp", "lossy_layers": "0:4", "control": "elements"},
        {"sequence_parallel": True, **OWN, "algorithm": "sender"},
        {"control": "noise", "algorithm": "switch", **OWN},
        {"repair": "local", **OWN, "algorithm": "tree"},
        {"repair": "stale", **OWN},
        {"dataset": "squad", "implementation": "dtensor"},
        {"dataset": "squad", **OWN},
        {"dataset": "squad", "data_parallel_size": 2, **OWN},
        {"data_parallel_size": 2, "data_parallel_type": "fsdp", "lossy_phase": "gather"},
    ],
)
def test_what_can_be_combined_of_the_wiring_is_not_refused(values):
    config = TrainConfig.from_dict(values)
    assert config.changes() == {name: value for name, value in values.items() if value is not False or name in OWN}


def test_a_recording_of_fewer_ranks_is_refused(tmp_path):
    flows = [FlowTrace(lost=np.array([True, False]), src=str(src), dst=str(dst)) for src, dst in ((0, 1), (1, 0))]
    write_trace(tmp_path / "losses.parquet", ProbeTrace(flows=dict(enumerate(flows))))
    recorded = f"replay({str(tmp_path / 'losses.parquet')!r})"
    TrainConfig(loss_type=recorded, tensor_parallel_size=2)
    TrainConfig(loss_type=recorded, tensor_parallel_size=4, lossy_links="0>1")
    with pytest.raises(
        ValueError, match=r"^the recording has no link 0>2, only 0>1, 1>0: give a recording with as many"
    ):
        TrainConfig(loss_type=recorded, tensor_parallel_size=4)
