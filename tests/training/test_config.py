"""The settings of runs: what they mean, which are refused, and how they are written and read."""

import hashlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab import LabConfig
from lossyprobe.commands import ImportConfig, ReportConfig
from lossytp.network import Scope
from lossytp.network.lossy_network import CommConfig
from lossytp.network.routes import Wire
from lossytp.tolerance.config import ToleranceConfig
from lossytp.training.config import EvaluateConfig, PretrainConfig, TrainConfig, run_settings, settings_class
from lossytp.training.models import MODELS
from lossytp.training.settings import without_obsolete
from tests.training.killed_runs import FSDP

OWN = {"reliable_gather": False}
PIPELINE, TP = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
SEQUENCE = {"sequence_parallel": True}
# what no pipeline can do
ALONE = {"fp16": True, "dataset": "squad", **OWN, "repair": "local", "unfreeze_last_layers": 1}
ALONE["gradient_accumulation_steps"] = 2
NANO = str(MODELS / "gpt2-nano")


def refused(kind, values):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        kind.from_dict(values)
    assert type(error.value) is ValueError
    return str(error.value)


def test_groups_hold_flat_settings():
    config = TrainConfig(loss_rate=0.25, max_steps=9, model_name="gpt2-nano")
    assert (config.network.loss_rate, config.optimizer.max_steps) == (0.25, 9)
    assert TrainConfig(network=config.network, max_steps=9) == config
    assert TrainConfig(network={"loss_rate": 0.5}, loss_rate=0.25, max_steps=9) == config
    assert TrainConfig(network={"seed": 3}, loss_rate=0.25).changes() == {"loss_rate": 0.25, "seed": 3}
    assert config.replace(loss_rate=0.0, seed=3).changes() == {"max_steps": 9, "seed": 3}
    assert TrainConfig.from_dict(config.as_dict()) == config
    assert TrainConfig().changes() == {}
    assert TrainConfig(gradient_clipping=1, dropout=0).changes() == {"gradient_clipping": 1.0}
    with pytest.raises(ValueError, match="frozen"):
        config.network.loss_rate = 0.5


def test_comm_config_and_network_are_what_was_asked_for():
    plain = TrainConfig()
    assert plain.comm() == CommConfig()
    network = plain.network.build()
    assert (network.scope, network.wire, network.seed) == (Scope(), Wire(), 1234)
    config = TrainConfig(**OWN, algorithm="tree", repair="hadamard(16)", wire_dtype="bf16")
    expected = {"algorithm": "tree", "repair": "hadamard(16)", "wire_dtype": "bf16"}
    assert config.comm() == CommConfig.named(reliable_gather=False, **expected)
    for name in ("sequence_parallel", "exact_adjoint"):
        assert TrainConfig(**{name: True}).comm() == CommConfig(**{name: True})
    assert TrainConfig(control="noise").comm() == CommConfig(control="noise")
    assert TrainConfig(control="elements").comm() == CommConfig()
    assert TrainConfig(ranks_per_node=2, loss_rate=0.1).network.build().ranks_per_node == 2
    elements = TrainConfig(control="elements", mtu_bytes=900).network.build()
    assert elements.wire == Wire(mtu_bytes=900, elements=1)
    parts = {"lossy_direction": "forward", "lossy_module": "mlp", "lossy_layers": " 1 : 3 ", "lossy_phase": "gather"}
    scope = Scope(direction="forward", module="mlp", layers=(1, 3), phase="gather")
    assert TrainConfig(**OWN, **parts).network.build().scope == scope


def test_links_that_are_not_named_lose_nothing():
    config = TrainConfig(loss_rate=0.25, lossy_links="0>-1, 2 > -1,-1>3", algorithm="switch", **OWN)
    network = config.network.build()
    lossy = {link for link in itertools.product(range(-1, 4), repeat=2) if network.process(*link).loss_rate}
    assert lossy == {(0, -1), (2, -1), (-1, 3)}


def test_zero_means_none_where_earlier_studies_wrote_it():
    assert TrainConfig(max_samples=0, gradient_clipping=0) == TrainConfig()
    assert PretrainConfig(gradient_clipping=0).optimizer.gradient_clipping is None


def test_a_budget_of_tokens_is_that_many_blocks_of_up_to_4096():
    config = PretrainConfig(model_name="gpt2", block_size=1024, tokens_per_step=524288, microbatch_size=8)
    assert (config.optimizer.batch_size, config.microbatches) == (512, 64)
    assert PretrainConfig(**config.as_dict()) == config
    assert config.replace(data_parallel_size=4).microbatches == 16
    for name in ("gpt2-nano", "gpt2-nano-scratch", "gpt2", "llama-nano", "llama-124m"):
        assert PretrainConfig(model_name=name, block_size=4096, tensor_parallel_size=2).microbatches == 16


def test_the_output_folder_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for kind in (TrainConfig, EvaluateConfig, PretrainConfig):
        for path, expected in (("~/x", f"{tmp_path}/x"), ("a~/~x", "a~/~x"), ("./~x", "./~x")):
            assert kind(output_dir=path).output.output_dir == expected
        for path in ("\n", "a\nb", "a\u2028b", "~nobody-here/x"):
            assert "output_dir" in refused(kind, {"output_dir": path})


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"los_rate": 0.1}, "did you mean loss_rate"),
        *(({"loss_rate": value}, "loss_rate") for value in (1.5, -0.1, float("nan"), "0.1", True)),
        *(({name: 0}, name) for name in ("batch_size", "eval_samples", "data_parallel_size", "checkpoint_steps")),
        *(({name: -1}, name) for name in ("warmup_steps", "max_samples", "unfreeze_last_layers", "learning_rate")),
        *(({"gradient_clipping": value}, "gradient_clipping") for value in (-1.0, float("nan"), float("inf"))),
        *(({"dropout": value}, "dropout") for value in (1.0, -0.1)),
        *(({"bf16": 1}, "bf16"), ({"seed": 8.0}, "seed = 8.0"), ({"output_dir": 2024}, "output_dir = 2024")),
        *(({name: "x"}, name) for name in ("schedule", "implementation", "data_parallel_type", "algorithm", "repair")),
        *(({"dataset": "sst3"}, "dataset = 'sst3'"), ({"model_name": "gpt5"}, "model_name = 'gpt5'")),
        *(({"model_name": "output/none/best"}, "does not exist"), ({"max_length": 129}, "max_length")),
        *(({"mtu_bytes": 40}, "mtu_bytes"), ({"loss_type": "burst"}, "loss_type")),
        *((how, "mean_burst_packets") for how in ({"loss_type": "g-e"}, {"mean_burst_packets": 8.0})),
        ({"loss_type": "g-e", "loss_rate": 0.8, "mean_burst_packets": 2.0}, "mean_burst_packets"),
        ({"loss_type": "g-e", "ge_config": "nope"}, "ge_config"),
        ({"loss_type": "g-e", "ge_config": "one", "loss_rate": 0.1}, "leave out loss_rate"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size"),
        *(({"tensor_parallel_size": 1, "loss_rate": 0.1}, "loss_rate = 0.1"), ({"bf16": True, "fp16": True}, "fp16")),
        ({"target_accuracy": 1.5, "eval_steps": 5}, "target_accuracy"),
        *((how, "eval_steps") for how in ({"target_accuracy": 0.5}, {"patience": 2})),
        ({"warmup_steps": 31, "max_steps": 30}, "warmup_steps"),
        ({"gradient_accumulation_steps": 33}, "gradient_accumulation_steps"),
        ({"implementation": "custom"}, "data_parallel_size"),
        ({"implementation": "dtensor", "data_parallel_size": 2}, "choose fsdp"),
        ({"implementation": "dtensor", "fp16": True}, "choose bf16"),
        *(({"implementation": "megatron", **how}, name) for how in (SEQUENCE, {"repair": "stale"}) for name in how),
        ({"data_parallel_size": 3}, "batch_size"),
        ({**PIPELINE, "data_parallel_size": 2}, "pipeline_parallel_size"),
        *(({**PIPELINE, name: value}, name) for name, value in ALONE.items()),
        ({**PIPELINE, "batch_size": 6}, "pipeline_microbatches"),
        ({**PIPELINE, "exact_adjoint": True, "repair": "rescale"}, "exact_adjoint"),
        *(({**FSDP, **how}, name) for how in ({"gradient_checkpointing": True}, {"dataset": "squad"}) for name in how),
        ({"control": "noise", "loss_type": "g-e", "loss_rate": 0.1, "mean_burst_packets": 8.0}, "control"),
        ({"lossy_links": "0>9"}, "link 0>9"),
        *(
            ({"ranks_per_node": n, "data_parallel_size": of}, f"ranks_per_node = {n}")
            for n, of in ((0, 1), (4, 1), (8, 2))
        ),
        ({"wire_dtype": "int8", "mtu_bytes": 77}, "mtu_bytes = 77"),
        ({"wire_dtype": "int4", "control": "elements"}, "wire_dtype = 'int4'"),
        ({"tensor_parallel_size": 1, **OWN}, "reliable_gather"),
        ({"replicated_gradients": "none"}, "replicated_gradients"),
        ({**OWN, "replicated_gradients": "lossy", "repair": "local"}, "replicated_gradients"),
        *(({name: value}, name) for name, value in (("transport", "udp"), ("link_gbits", 10.0))),
    ],
    ids=str,
)
def test_fine_tuning_refuses(values, name):
    assert name in refused(TrainConfig, values)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        *(({"block_size": 1}, "block_size"), ({"model_name": NANO, "block_size": 129}, "128 positions")),
        *(({"model_name": "a" * 600}, "model_name"), ({"min_learning_rate": 1e38}, "min_learning_rate")),
        ({"learning_rate": 5e-5}, "min_learning_rate"),
        ({"dataset": "shakespeare", "data_glob": "*.txt"}, "data_glob"),
        ({"tokens_per_step": 1000}, "tokens_per_step"),
        *(({"tokens_per_step": 1280, "batch_size": 9}, "batch_size = 9"), ({"data_parallel_size": 3}, "batch_size")),
        *((PIPELINE, "a pipeline"), ({"loss_rate": 0.1}, "loss_rate")),
        ({"warmup_steps": 9, "total_steps": 8}, "warmup_steps"),
        *(({"deferred_init": True, **how}, "deferred_init") for how in ({}, {"data_parallel_size": 2})),
        *(
            ({"enable_loss_parallelism": True, **how}, "enable_loss_parallelism")
            for how in ({}, {**TP, **OWN}, {**TP, **SEQUENCE})
        ),
        *(
            ({"lossy_logits": True, **TP, **how}, "lossy_logits")
            for how in ({}, {"enable_loss_parallelism": True, "algorithm": "sender"})
        ),
        ({"max_steps": 5}, "max_steps"),
    ],
)
def test_pretraining_refuses(values, name):
    assert name in refused(PretrainConfig, values)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((TrainConfig, name) for name in ("checkpoint_path", "lossy_links")),
        *((PretrainConfig, "tokenizer_path"), (EvaluateConfig, "task_folder"), (ToleranceConfig, "loss_rates")),
        *((LabConfig, "data_dir"), (ImportConfig, "column"), (ReportConfig, "output_dir")),
    ],
)
def test_no_text_is_empty_or_has_bytes_that_are_no_text(kind, name):
    """Empty, it would mean the current folder; with such bytes, a run would end without its record."""
    needed = {"file": "a.csv"} if kind is ImportConfig else {"trace": "a.parquet"} if kind is ReportConfig else {}
    for value in ("", "a\udcff", "a\0"):
        assert name in refused(kind, {**needed, name: value})


@pytest.mark.parametrize(
    "values",
    [
        {"data_parallel_size": 2, "fp16": True, "batch_size": 6},  # only a pipeline scales no loss, or cuts batches
        {"pipeline_parallel_size": 4, "pipeline_microbatches": 2},
        *({**PIPELINE, "pipeline_schedule": "1f1b", "pipeline_microbatches": 2}, {**PIPELINE, "bf16": True}),
        {"implementation": "dtensor", "bf16": True, "data_parallel_size": 2, "data_parallel_type": "fsdp"},
        {"implementation": "megatron", "data_parallel_size": 2},
        {"implementation": "dtensor", "data_parallel_size": 2, "tensor_parallel_size": 1, "fp16": True},
        {"warmup_steps": 30, "max_steps": 30},
        {"max_steps": 2},  # below the default of warmup_steps: a short trial
    ],
)
def test_what_can_be_combined_is_not_refused(values):
    assert TrainConfig.from_dict(values).changes() == values


@pytest.mark.parametrize(
    ("values", "world_size", "needed"),
    [
        *(({}, 3, 4), ({"data_parallel_size": 2}, 1, 2), (PIPELINE, 3, 2), ({"implementation": "dtensor"}, 1, 4)),
        ({"implementation": "megatron", "data_parallel_size": 2}, 2, 8),
        ({"ranks_per_node": 4, "data_parallel_size": 2}, 2, 8),  # process 1 is on node 1, but its number is not rank 4
        ({**OWN, "replicated_gradients": "none", **FSDP}, 2, 8),  # virtual ranks' copies are not sharded
    ],
)
def test_too_few_or_too_many_processes_are_refused(values, world_size, needed):
    config = TrainConfig.from_dict({**values, "tensor_parallel_size": 4})
    with pytest.raises(ValueError, match=f"--nproc_per_node {needed}"):
        config.layout(0, world_size)


@pytest.fixture
def over(monkeypatch):
    def make(processes, **values):
        place = {"RANK": "0", "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        return PretrainConfig(**values)

    return make


def test_without_a_number_of_ranks_each_process_that_replicas_leave_is_one(over):
    for values, processes, ranks in (
        ({}, 1, 1),
        ({"loss_rate": 0.1}, 2, 2),
        ({"enable_loss_parallelism": True, "lossy_logits": True, "loss_rate": 0.1}, 2, 2),
        ({"deferred_init": True}, 2, 2),
        ({"data_parallel_size": 2}, 2, 1),
        ({"data_parallel_size": 2, "lossy_links": "2>3", "lossy_direction": "forward", "loss_rate": 0.1}, 4, 2),
        ({"tensor_parallel_size": 4}, 2, 4),
    ):
        config = over(processes, **values)
        assert config.network.tensor_parallel_size == ranks
        config.layout(0, processes)
        assert PretrainConfig.from_dict(config.as_dict()) == config
    with pytest.raises(ValueError, match="link 2>3"):
        over(2, data_parallel_size=2, lossy_links="2>3", loss_rate=0.1)


@pytest.mark.slow
def test_committed_records_are_recognised():
    """Folders of records are named by what their configuration changes."""
    records = Path(__file__).parents[2] / "results" / "paper" / "runs"
    folders = [file.parent for file in records.glob("*/record.json")]
    assert len(folders) > 1000
    for folder in folders[::4]:
        record = json.loads((folder / "record.json").read_text())
        kind = settings_class(record["config"])
        config = kind.from_dict(record["config"])
        written = kind.result_of(without_obsolete(record["config"]))
        assert written.items() <= config.result_settings().items()
        if kind is PretrainConfig:
            continue  # pretraining cells set what records leave out, such as eval_steps; the grids' tests cover them
        changes = config.changes() | ({"processes": record["processes"]} if record["processes"] > 1 else {})
        digest = hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:10]
        assert folder.name.endswith(digest)


def test_records_mention_nodes_only_where_there_are_some():
    assert "ranks_per_node" not in TrainConfig().result_settings()
    assert TrainConfig(ranks_per_node=2).result_settings()["ranks_per_node"] == 2
    assert TrainConfig(ranks_per_node=2).differences(TrainConfig().result_settings()) == ["ranks_per_node"]


def test_cells_are_of_pretraining_if_they_name_what_it_alone_has():
    cells = run_settings([{"max_steps": 3}, {"total_steps": 3}, {"loss_rate": 0.1}])
    assert [type(each) for each in cells] == [TrainConfig, PretrainConfig, TrainConfig]


def test_checking_a_configuration_does_not_wait_for_torch():
    heavy = "{'torch', 'pandas', 'pyarrow', 'transformers', 'datasets', 'evaluate', 'sklearn'}"
    code = "import sys, lossytp.study.grid, lossytp.training.tasks, lossytp.training.config as c"
    code += "; c.TrainConfig(model_name='gpt2-large')"
    code += f"; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
