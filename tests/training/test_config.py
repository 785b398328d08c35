import dataclasses
import hashlib
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lossytp.network import Bernoulli, GilbertElliott
from lossytp.network.packets import Wire
from lossytp.network.scope import Scope
from lossytp.network.wiring import Wiring
from lossytp.training.config import TrainConfig


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"los_rate": 0.1}, ["los_rate", "did you mean loss_rate"]),
        ({"zzz": 1}, ["zzz", "known are", "loss_rate"]),
        ({"loss_rate": 1.5}, ["loss_rate", "1.5", "[0, 1]"]),
        ({"loss_rate": float("nan")}, ["loss_rate", "nan"]),
        ({"loss_rate": "0.1"}, ["loss_rate", "'0.1'", "float"]),
        ({"loss_rate": True}, ["loss_rate", "True"]),
        ({"bf16": 1}, ["bf16", "true or false"]),
        ({"loss_type": "burst"}, ["loss_type", "burst", "ber, g-e"]),
        (
            {"loss_type": "g-e", "loss_rate": 0.5, "mean_burst_packets": 0.5},
            ["mean_burst_packets", "0.5", "at least 1"],
        ),
        ({"loss_type": "g-e", "loss_rate": 0.8, "mean_burst_packets": 2.0}, ["mean_burst_packets", "at least 4"]),
        ({"loss_type": "g-e"}, ["needs ge_config"]),
        ({"mean_burst_packets": 8.0}, ["mean_burst_packets", "g-e"]),
        ({"loss_type": "g-e", "ge_config": "nope"}, ["ge_config", "nope", "short_1percent"]),
        ({"loss_type": "g-e", "ge_config": "one", "loss_rate": 0.1}, ["ge_config", "leave out"]),
        ({"tensor_parallel_size": 3}, ["tensor_parallel_size", "3", "1, 2, 4, 8"]),
        ({"dataset": "sst3"}, ["dataset", "sst3", "docstrings"]),
        ({"model_name": "gpt5"}, ["model_name", "gpt5", "gpt2-nano"]),
        ({"max_length": 129}, ["max_length", "129", "128"]),
        ({"algorithm": "star"}, ["algorithm", "star", "direct"]),
        ({"repair": "hope"}, ["repair", "hope", "rescale"]),
        ({"mtu_bytes": 40}, ["mtu_bytes", "40", "52"]),
        ({"batch_size": 0}, ["batch_size", "0"]),
        ({"dropout": 1.0}, ["dropout = 1.0 is not below 1: give a smaller number"]),
        ({"dropout": float("nan")}, ["dropout = nan is not finite: give a finite number"]),
        ({"dropout": -0.1}, ["dropout = -0.1 is below 0: give 0 or more"]),
        ({"target_accuracy": 1.5, "eval_steps": 5}, ["target_accuracy = 1.5 is not in [0, 1]"]),
        ({"warmup_steps": 31, "max_steps": 30}, ["warmup_steps = 31 is above max_steps = 30: give as many or fewer"]),
        ({"warmup_steps": -1}, ["warmup_steps = -1 is below 0"]),
        ({"max_samples": -1}, ["max_samples = -1 is below 0"]),
        ({"eval_samples": 0}, ["eval_samples = 0 is below 1"]),
        ({"learning_rate": -1.0}, ["learning_rate", "-1"]),
        ({"bf16": True, "fp16": True}, ["bf16", "fp16"]),
        ({"implementation": "deepspeed"}, ["implementation", "deepspeed", "lossytp, dtensor, megatron"]),
        ({"data_parallel_type": "zero"}, ["data_parallel_type", "zero", "ddp, fsdp"]),
        ({"data_parallel_size": 0}, ["data_parallel_size", "0", "give 1 or more"]),
        ({"pipeline_parallel_size": 0}, ["pipeline_parallel_size", "0", "give 1 or more"]),
        ({"pipeline_microbatches": 0}, ["pipeline_microbatches", "0", "give 1 or more"]),
        ({"gradient_clipping": 0.0}, ["gradient_clipping", "0.0", "leave it out"]),
        ({"gradient_clipping": float("nan")}, ["gradient_clipping", "nan"]),
        (
            {"pipeline_parallel_size": 2, "data_parallel_size": 2},
            ["pipeline_parallel_size", "data_parallel_size", "choose one"],
        ),
        ({"pipeline_parallel_size": 2, "fp16": True}, ["fp16", "pipeline", "bf16"]),
        (
            {"pipeline_parallel_size": 2, "batch_size": 6},
            ["batch_size = 6", "pipeline_microbatches = 4", "multiple"],
        ),
        (
            {"pipeline_parallel_size": 4, "pipeline_schedule": "1f1b", "pipeline_microbatches": 2},
            ["pipeline_microbatches = 2", "pipeline_parallel_size = 4", "1f1b"],
        ),
        ({"data_parallel_size": 3}, ["batch_size = 32", "data_parallel_size = 3", "multiple"]),
        ({"implementation": "megatron", "bf16": True}, ["megatron", "bf16", "autocast"]),
        ({"implementation": "dtensor", "data_parallel_size": 2}, ["dtensor", "ddp", "choose fsdp"]),
        ({"implementation": "dtensor", "fp16": True}, ["dtensor", "fp16", "choose bf16"]),
        ({"pipeline_parallel_size": 5}, ["pipeline_parallel_size = 5", "4 blocks"]),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_that_names_it(values, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        TrainConfig.from_dict(values)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "values",
    [
        {"data_parallel_size": 2, "fp16": True, "batch_size": 6},  # only a pipeline scales no loss, or cuts batches
        {"pipeline_parallel_size": 4, "pipeline_microbatches": 2},
        {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b", "pipeline_microbatches": 2},
        {"pipeline_parallel_size": 2, "bf16": True},
        {"implementation": "dtensor", "bf16": True, "data_parallel_size": 2, "data_parallel_type": "fsdp"},
        {"implementation": "megatron", "data_parallel_size": 2},
        {"implementation": "dtensor", "data_parallel_size": 2, "tensor_parallel_size": 1, "fp16": True},
    ],
)
def test_what_can_be_combined_is_not_refused(values):
    assert TrainConfig.from_dict(values).changes() == values


NEEDS_OWN_LAYERS = (
    " needs this project's tensor-parallel layers, which know where a message is from: leave it out, or give "
    "implementation = 'lossytp' and tensor_parallel_size above 1"
)
NEEDS_THEM_ALONE = (
    " needs tensor parallelism alone, by this project's layers: leave it out, or implementation, data_parallel_size "
    "and pipeline_parallel_size"
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
                "repair = 'local' with a pipeline or fsdp, in whose sends and all-gathers a receiver has no part of "
                "its own: choose another repair",
            )
            for how in ({"pipeline_parallel_size": 2}, {"data_parallel_size": 2, "data_parallel_type": "fsdp"})
        ),
        (
            {"exact_adjoint": True, "lossy_direction": "backward"},
            "exact_adjoint = True with lossy_direction = 'backward': forward loses nothing to know of",
        ),
        (
            {"control": "elements", "loss_type": "g-e", "ge_config": "one"},
            "control = 'elements' with loss_type = 'g-e': what it loses, or adds, is independent; give loss_type = "
            "'ber'",
        ),
        (
            {**OWN, "tensor_parallel_size": 1},
            "reliable_gather = False where nothing is summed: give tensor_parallel_size above 1",
        ),
        (
            {**OWN, "tensor_parallel_size": 1, "data_parallel_size": 2, "replicated_gradients": "none"},
            "replicated_gradients = 'none' with tensor_parallel_size = 1, where no rank holds copies: give more ranks, "
            "or leave it out",
        ),
        *(
            (
                {"replicated_gradients": how, **shared},
                f"replicated_gradients = {how!r} where all ranks share a residual stream: give reliable_gather = "
                "False, or leave it out",
            )
            for how in ("lossy", "none")
            for shared in ({}, {**OWN, "sequence_parallel": True})
        ),
        (
            {**OWN, "replicated_gradients": "lossy", "repair": "local"},
            "replicated_gradients = 'lossy' with repair = 'local', by which a rank's own gradient would stand for the "
            "sum of all: choose another repair",
        ),
        (
            {**OWN, "resync_every": 5},
            "resync_every = 5 where copies do not drift: give replicated_gradients = 'lossy' or 'none', or leave it "
            "out",
        ),
        (
            {**OWN, "pipeline_parallel_size": 2},
            "reliable_gather = False with a pipeline, whose stages hand on one residual stream: leave one out",
        ),
        (
            {**OWN, "algorithm": "sender"},
            "reliable_gather = False with algorithm = 'sender', whose sum reaches every rank: choose another algorithm",
        ),
        (
            {"repair": "local", "algorithm": "sender"},
            "repair = 'local' with algorithm = 'sender': a loss there is everyone's, so no receiver has a part of its "
            "own to put in; choose another algorithm",
        ),
        (
            {**OWN, "repair": "local", "sequence_parallel": True},
            "repair = 'local' with sequence_parallel and reliable_gather = False: a rank has no part of its own of "
            "what it gathers; choose another repair",
        ),
        (
            {
                "exact_adjoint": True,
                "repair": "rescale",
                "pipeline_parallel_size": 2,
                "tensor_parallel_size": 1,
            },
            "exact_adjoint = True with a pipeline and repair = 'rescale': between stages it is built for repair = "
            "'zero'",
        ),
        (
            {"exact_adjoint": True, "repair": "local"},
            "exact_adjoint with repair = 'local' is not built: choose another repair",
        ),
        *(
            (
                {"exact_adjoint": True, **how},
                "exact_adjoint with lossy gathers or sequence_parallel: the adjoint of a gather would be another "
                "collective, with losses of its own; leave reliable_gather True and sequence_parallel False",
            )
            for how in (OWN, {"sequence_parallel": True})
        ),
        (
            {"control": "noise", "algorithm": "ring"},
            "control = 'noise' with algorithm = 'ring': its hops carry several ranks' parts, whose error adds up; "
            "choose one of direct, sender, switch",
        ),
        (
            {"control": "noise", "algorithm": "switch", "sequence_parallel": True},
            "control = 'noise' with algorithm = 'switch': its hops carry several ranks' parts, whose error adds up; "
            "choose one of direct",
        ),
        *(
            (
                {"control": "noise", **how},
                "control = 'noise' loses nothing that a repair or an adjoint could act on: leave them out",
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
        ({"output_dir": "a\0b"}, "output_dir = 'a\\x00b' holds a NUL character: leave it out"),
        ({"lossy_direction": "up"}, "direction = 'up' is unknown: choose one of forward, backward"),
        ({"lossy_module": "norm"}, "module = 'norm' is unknown: choose one of attention, mlp"),
        ({"lossy_phase": "gather"}, "lossy_phase = 'gather' where gathers are reliable: give reliable_gather = False"),
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
            for text in ("", "2", "0-2", ":2", "0:", "-1:2", "0:2:1", "a:b")
        ),
        ({"lossy_layers": "2:2"}, "layers = (2, 2) is no range: give the first and the one after the last"),
        ({"lossy_layers": "3:1"}, "layers = (3, 1) is no range: give the first and the one after the last"),
        ({"lossy_layers": "3:5"}, "lossy_layers = '3:5' is beyond gpt2-nano's 4 blocks: stop at 4"),
        (
            {"lossy_layers": 63},
            'lossy_layers = 63 is of the wrong type: give str or nothing, in YAML within quotes: "63"',
        ),
        ({"max_steps": 1.0}, "max_steps = 1.0 is of the wrong type: give int, such as 1"),
        *(
            (
                {"lossy_links": text},
                f"lossy_links = {text!r} is not understood: write source>destination, as in 0>1,2>3",
            )
            for text in ("", "0-1", "0>", "0>1,", "0>1;2>3", "-2>0", "0>1>2")
        ),
        (
            {"tensor_parallel_size": 1, "loss_rate": 0.5},
            "loss_rate = 0.5 on one rank alone, which sends nothing: give tensor_parallel_size above 1, or "
            "loss_rate = 0",
        ),
        (
            {"data_parallel_size": 2, "lossy_phase": "gather"},
            "lossy_phase = 'gather' where gathers are reliable: give reliable_gather = False",
        ),
        *(
            (
                {"dataset": "squad", **how},
                f"dataset = 'squad', whose answers are generated, with {words}: tensor-parallel ranks that compute "
                "other logits would go on with other tokens; choose another dataset",
            )
            for how, words in (
                ({"implementation": "dtensor", **OWN}, "dtensor and reliable_gather = False"),
                ({"data_parallel_size": 2, "data_parallel_type": "fsdp"}, "fsdp"),
            )
        ),
        (
            {"repair": "fec(8, 10)"},
            "repair = 'fec(8, 10)': n = 8 leaves no packet of parity beside k = 10: give n of at least 11",
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


def test_wiring_and_network_are_what_was_asked_for():
    plain = TrainConfig()
    assert plain.wiring() == Wiring()
    assert (plain.network().scope, plain.network().wire, plain.network().seed) == (Scope(), Wire(), 1234)
    config = TrainConfig(**OWN, algorithm="tree", repair="hadamard(16)", wire_dtype="bf16")
    assert config.wiring() == Wiring.named(
        algorithm="tree", repair="hadamard(16)", reliable_gather=False, wire_dtype="bf16"
    )
    assert TrainConfig(sequence_parallel=True).wiring() == Wiring(sequence_parallel=True)
    assert TrainConfig(exact_adjoint=True).wiring() == Wiring(exact_adjoint=True)
    assert TrainConfig(control="noise").wiring() == Wiring(control="noise")
    assert TrainConfig(control="elements").wiring() == Wiring()
    assert TrainConfig(control="elements", mtu_bytes=900).network().wire == Wire(mtu_bytes=900, elements=1)
    assert TrainConfig(control="noise").network().wire == Wire()
    parts = {"lossy_direction": "forward", "lossy_module": "mlp", "lossy_layers": " 1 : 3 ", "lossy_phase": "gather"}
    scope = Scope(direction="forward", module="mlp", layers=(1, 3), phase="gather")
    assert TrainConfig(**OWN, **parts).network().scope == scope


def test_links_that_are_not_named_lose_nothing():
    network = TrainConfig(loss_rate=0.25, lossy_links="0>-1, 2 > -1,-1>3", algorithm="switch", **OWN).network()
    lossy = {link for link in itertools.product(range(-1, 4), repeat=2) if network.process(*link).loss_rate}
    assert lossy == {(0, -1), (2, -1), (-1, 3)}
    assert network.process(2, -1) == Bernoulli(loss_rate=0.25)
    assert TrainConfig(loss_rate=0.25).network().process(3, 2) == Bernoulli(loss_rate=0.25)


def test_virtual_ranks_copies_are_not_sharded():
    """Only where each rank has a process can FSDP take them."""
    config = TrainConfig(**OWN, replicated_gradients="none", data_parallel_size=2, data_parallel_type="fsdp")
    assert config.layout(0, 8).tensor_processes == 4
    with pytest.raises(ValueError, match="replicated_gradients") as error:
        config.layout(0, 2)
    assert str(error.value) == (
        "replicated_gradients = 'none' with fsdp, which would shard the axis on which a process holds its ranks' "
        "copies: choose ddp, or start with torchrun --standalone --nproc_per_node 8"
    )
    dataclasses.replace(config, data_parallel_type="ddp").layout(0, 2)
    dataclasses.replace(config, replicated_gradients="reliable").layout(0, 2)


def test_what_did_not_exist_changes_no_older_configuration():
    """Folders of records are named by what their configuration changes."""
    new = {"reliable_gather", "sequence_parallel", "replicated_gradients", "resync_every", "exact_adjoint"}
    new |= {"wire_dtype", "control"} | {name for name in TrainConfig().as_dict() if name.startswith("lossy_")}
    old = {name: value for name, value in TrainConfig(loss_rate=0.1, seed=3).as_dict().items() if name not in new}
    assert TrainConfig.from_dict(old).changes() == {"loss_rate": 0.1, "seed": 3}
    records = Path(__file__).parents[2] / "results" / "paper" / "runs"
    folders = [file.parent for file in records.glob("*/record.json")]
    assert len(folders) >= 48
    for folder in folders:
        record = json.loads((folder / "record.json").read_text())
        changes = TrainConfig.from_dict(record["config"]).changes()
        if record["processes"] > 1:
            changes["processes"] = record["processes"]
        digest = hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:10]
        assert folder.name.endswith(digest)


@pytest.mark.parametrize(
    ("values", "rank", "world_size", "expected"),
    [  # of the processes: a replica's, which replica, which stage
        ({}, 0, 1, (1, 0, 0)),
        ({}, 1, 2, (2, 0, 0)),
        ({"data_parallel_size": 2}, 3, 8, (4, 0, 0)),
        ({"data_parallel_size": 2}, 4, 8, (4, 1, 0)),
        ({"pipeline_parallel_size": 2}, 4, 8, (4, 0, 1)),
        ({"pipeline_parallel_size": 2}, 1, 2, (1, 0, 1)),
        ({"implementation": "dtensor", "data_parallel_size": 2, "data_parallel_type": "fsdp"}, 5, 8, (4, 1, 0)),
        ({"implementation": "megatron", "tensor_parallel_size": 1}, 0, 1, (1, 0, 0)),
    ],
)
def test_layout_is_this_process_place(values, rank, world_size, expected):
    config = TrainConfig.from_dict(values)
    layout = config.layout(rank, world_size)
    assert (layout.tensor_processes, layout.data_index, layout.pipeline_index) == expected
    assert (layout.rank, layout.world_size) == (rank, world_size)
    assert layout.tensor_parallel_size == config.tensor_parallel_size


@pytest.mark.parametrize(
    ("values", "world_size", "words"),
    [
        ({}, 3, ["tensor_parallel_size = 4", "3 processes", "--nproc_per_node 4"]),
        ({}, 8, ["tensor_parallel_size = 4", "8 processes"]),
        ({"data_parallel_size": 2}, 1, ["data_parallel_size = 2", "there are 1", "--nproc_per_node 2"]),
        ({"pipeline_parallel_size": 2}, 3, ["pipeline_parallel_size = 2", "there are 3", "--nproc_per_node 2"]),
        ({"implementation": "dtensor"}, 1, ["implementation = 'dtensor'", "--nproc_per_node 4"]),
        ({"implementation": "megatron", "data_parallel_size": 2}, 2, ["'megatron'", "--nproc_per_node 8"]),
        ({"implementation": "dtensor", "pipeline_parallel_size": 2}, 4, ["'dtensor'", "--nproc_per_node 8"]),
    ],
)
def test_too_few_or_too_many_processes_are_refused(values, world_size, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        TrainConfig.from_dict(values).layout(0, world_size)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)


def test_changes_are_the_fields_that_are_not_at_their_default():
    assert TrainConfig().changes() == {}
    config = TrainConfig(seed=1234, max_steps=5, gradient_clipping=1, dropout=0)
    assert config.changes() == {"max_steps": 5, "gradient_clipping": 1.0}
    assert TrainConfig(**config.changes()) == config


def test_processes():
    assert TrainConfig(loss_rate=0.1).process() == Bernoulli(loss_rate=0.1)
    bursty = TrainConfig(loss_type="g-e", loss_rate=0.1, mean_burst_packets=8.0).process()
    assert bursty == GilbertElliott.from_loss_and_burst(loss_rate=0.1, mean_burst_packets=8)
    assert TrainConfig(loss_type="g-e", ge_config="one").process().loss_rate == pytest.approx(0.05)


def test_dict_round_trip_and_ints_for_floats():
    config = TrainConfig.from_dict({"loss_rate": 0, "seed": 3})
    assert TrainConfig.from_dict(config.as_dict()) == config


def test_checking_a_configuration_does_not_wait_for_torch():
    code = "import sys, lossytp.study.grid, lossytp.training.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_training_examples_are_all_of_them_as_in_earlier_studies():
    assert TrainConfig(max_samples=0) == TrainConfig()
    assert TrainConfig(max_samples=0).as_dict()["max_samples"] is None


def test_the_warm_up_fills_a_run_at_most_but_its_default_stays_in_short_trials():
    assert TrainConfig(warmup_steps=30, max_steps=30).warmup_steps == 30
    assert TrainConfig(max_steps=2).warmup_steps == 20


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (5, "cells = 5 is no list of configurations: give at least one"),
        ([], "cells = [] is no list of configurations: give at least one"),
        ({"seed": 1}, "cells = {'seed': 1} is no list of configurations: give at least one"),
        ([5], "5 is no configuration: give names with values, such as {'seed': 1}"),
        ([{"sed": 5}], "unknown parameter 'sed': did you mean seed?"),
    ],
)
def test_what_are_no_configurations_is_refused(cells, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TrainConfig.from_dicts(cells)
    assert TrainConfig.from_dicts([{"seed": 5}]) == [TrainConfig(seed=5)]
