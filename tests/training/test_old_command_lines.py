"""The command lines that five earlier systems document, with only the script's name changed, and sizes aside."""

import os
import shlex

import pytest

from data_parallel import DataParallelConfig
from lab import BackendLabConfig, LabConfig
from lossytp.training.command_line import parse, read_yaml
from lossytp.training.config import EvaluateConfig, PretrainConfig, TrainConfig
from lossytp.training.loop import run
from tests.training.own_tasks import write_rows

STUDY = "--model_name gpt2-large --batch_size 8 --learning_rate 3e-5 --weight_decay 0.01 --max_length 128 --seed 1234"
STUDIED = (
    "model_name: gpt2-large, batch_size: 8, learning_rate: 3e-5, max_length: 128, max_steps: 500, eval_steps: 20, "
)
STUDIED += "patience: 10, tensor_parallel_size: 2, "
FINE_TUNING = {  # systems 1 and 2, and what they change, in YAML
    f"--tensor_parallel_size 2 {STUDY} --dataset mnli --loss_type ber --loss_rate 0.001 --max_samples 0 "
    "--max_steps 500 --eval_steps 20 --patience 10 --output_dir output_test": STUDIED
    + "dataset: mnli, loss_rate: 0.001, output_dir: output_test",
    f"--tensor-parallel-size 2 {STUDY} --dataset ARC-Easy --loss-type g-e --ge-config one_precent --max-samples 500 "
    "--max-steps 500 --eval-steps 20 --patience 10 --target-accuracy 0.6 --fp16": STUDIED
    + "dataset: arc_easy, loss_type: g-e, ge_config: one_precent, max_samples: 500, target_accuracy: 0.6, fp16: true",
    "--dataset winogrande_l --tensor_parallel_size 4 --max_length 256 --batch_size 16 --patience 15 --max_steps 500": (
        "dataset: winogrande_l, max_length: 256, batch_size: 16, patience: 15, max_steps: 500, eval_steps: 20"
    ),  # 20 is the study's default
    "--local_rank 1 --dataset sst2 --loss_rate 0.01": "dataset: sst2, loss_rate: 0.01",
    "--local-rank=0 --gradient_clipping --eval_interval 50": "gradient_clipping: 1.0, eval_steps: 50",
    "--gradient-clipping 0.5 --eval-interval=50": "gradient_clipping: 0.5, eval_steps: 50",
    "--fp16 --gradient_clipping": "gradient_clipping: 1.0, fp16: true",
    "--dataset squad --target_accuracy 0.6 --gradient_checkpointing --wandb": (
        "dataset: squad, target_accuracy: 0.6, eval_steps: 20, gradient_checkpointing: true, wandb: true"
    ),
    "--implementation megatron --loss_rate 0.005 --dataset hellaswag": (
        "implementation: megatron, loss_rate: 0.005, dataset: hellaswag"
    ),
}
PRETRAINING = {  # systems 3 and 4
    "--tokenizer-path models/gpt2-nano --checkpoint-path checkpoints --data-glob 'data/*.parquet' --batch-size 8 "
    "--block-size 128 --learning-rate 3e-4 --min-learning-rate 3e-5 --warmup-steps 100 --total-steps 2000 "
    "--weight-decay 0.01 --no-streaming --num-proc 4 --trust-remote-code --local_rank 0": (
        "tokenizer_path: models/gpt2-nano, checkpoint_path: checkpoints, data_glob: data/*.parquet, batch_size: 8, "
        "learning_rate: 3e-4, min_learning_rate: 3e-5, total_steps: 2000, weight_decay: 0.01, streaming: false, "
        "num_proc: 4, trust_remote_code: true"
    ),
    "--checkpoint_path checkpoints/step_300.pth --total_steps 300 --local-rank=1": (
        "checkpoint_path: checkpoints/step_300.pth, total_steps: 300"
    ),
    "--tensor_parallel_size 2 --data_parallel_size 2 --data_parallel_type ddp --gradient_clipping --eval_interval 25": (
        "tensor_parallel_size: 2, data_parallel_size: 2, eval_steps: 25"
    ),
    "--data_parallel_size 2 --data_parallel_type fsdp --implementation custom": (
        "data_parallel_size: 2, data_parallel_type: fsdp, implementation: custom"
    ),
    "--dataset shakespeare --gradient_clipping --eval_interval 50": "dataset: shakespeare, eval_steps: 50",
    "--tensor_parallel_size 4 --deferred_init": "tensor_parallel_size: 4, deferred_init: true",
    "--dataset openwebtext --batch_size 8": "dataset: openwebtext, batch_size: 8",
    "--tensor_parallel_size 2 --data_parallel_size 2 --implementation pytorch --enable_loss_parallelism": (
        "tensor_parallel_size: 2, data_parallel_size: 2, enable_loss_parallelism: true"
    ),
    "--data-parallel-size 4 --data-parallel-type ddp --gradient-clipping 0.5 --tensorboard": (
        "data_parallel_size: 4, gradient_clipping: 0.5, tensorboard: true"
    ),
}
LABS = {  # system 5
    (DataParallelConfig, "--epochs 2 --data-dir data --hidden-dim 64"): "epochs: 2, data_dir: data, hidden_dim: 64",
    (BackendLabConfig, "--epochs 1 --data_dir data --local_rank 0"): "epochs: 1, data_dir: data",
    (LabConfig, "--input-dim 1024 --hidden-dim 2048 --num-classes 10 --batch-size 64 --steps 5"): (
        "input_dim: 1024, hidden_dim: 2048, steps: 5"
    ),
}
LINES = {(TrainConfig, line): changes for line, changes in FINE_TUNING.items()}
LINES |= {(PretrainConfig, line): changes for line, changes in PRETRAINING.items()} | LABS


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.mark.parametrize(("kind", "line"), LINES)
def test_an_old_command_line_means_what_it_meant(kind, line):
    expected, words = read_yaml(f"{{{LINES[kind, line]}}}"), shlex.split(line)
    if kind is TrainConfig:  # whose default was gpt2-large
        expected |= {"model_name": "gpt2-large"}
        words += [] if "--model_name" in words else ["--model_name", "gpt2-large"]
    assert parse(kind, None, words).changes() == expected


@pytest.mark.parametrize(
    ("kind", "line", "name"),
    [
        (PretrainConfig, "--teacher-device-map auto", "teacher"),
        (TrainConfig, "--teacher_device_map=auto", "teacher"),
        *((TrainConfig, f"--local_rank{value}", "--local_rank = ") for value in ("", " one")),
        (TrainConfig, "--gradient_clipping much", "gradient_clipping = 'much'"),
        (TrainConfig, "--gradient_clipping --gradient-clipping 1", "--gradient_clipping is given twice"),
        (TrainConfig, "--eval_interval 5 --eval_steps 5", "--eval_steps is given twice"),
        (EvaluateConfig, "--eval_interval 5", "eval"),
    ],
)
def test_what_has_no_counterpart_is_refused(kind, line, name):
    with pytest.raises(ValueError, match=name):
        parse(kind, None, shlex.split(line))


def test_the_number_on_the_node_is_used_if_no_variable_gives_it(monkeypatch):
    parse(TrainConfig, None, ["--local_rank", "3"])
    assert "LOCAL_RANK" not in os.environ  # a single process
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "0")  # so that what is parsed next is undone after the test
    monkeypatch.delenv("LOCAL_RANK")
    parse(TrainConfig, None, ["--local_rank", "3"])
    assert os.environ["LOCAL_RANK"] == "3"
    parse(TrainConfig, None, ["--local_rank", "4"])
    assert os.environ["LOCAL_RANK"] == "3"


def test_lines_of_fine_tuning_and_pretraining_run_at_small_sizes(toy, tmp_path):
    small = (
        f"--dataset {toy().data.dataset} --model_name gpt2-nano-scratch --max_steps 2 --warmup_steps 1 --batch_size 8"
    )
    words = f"--loss_type g-e --ge_config one --max_samples 0 --eval_interval 1 --patience 10 {small}"
    words += f" --target_accuracy 0.6 --gradient_clipping --local_rank 0 --max_length 32 --output_dir {tmp_path}/run"
    record = run(parse(TrainConfig, None, words.split()))
    assert [point["step"] for point in record["curves"]["eval"]] == [1, 2]
    assert record["data"]["train_examples"] == 64

    write_rows(tmp_path / "text/0.parquet", [{"text": f"the sky is blue for the {i}. time"} for i in range(400)])
    words = f"--data-glob {tmp_path}/text/*.parquet --output-dir {tmp_path}/new --block-size 16 --batch-size 2"
    words += " --warmup-steps 1 --num-proc 1 --no-streaming --gradient_clipping --eval_interval 1 --local-rank=0"
    run(parse(PretrainConfig, None, [*words.split(), "--total-steps", "1"]))
    record = run(parse(PretrainConfig, None, f"{words} --total-steps 2 --checkpoint-path {tmp_path}/new".split()))
    assert record["timing"]["resumed_behind_steps"] == [1]
