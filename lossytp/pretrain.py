"""Pretrain a small language model on running text, for fine-tuning to start from.

python -m lossytp.pretrain --output_dir output/pretrain
python -m lossytp.pretrain --data_glob "FOLDER/train-*.parquet" --validation_glob "FOLDER/validation-*.parquet"
torchrun --standalone --nproc_per_node 2 -m lossytp.pretrain --tensor_parallel_size 2 --loss_rate 0.05
"""

from typing import Any

from lossytp.parallel.group import rank_and_world_size
from lossytp.training.command_line import parse, run_as_command
from lossytp.training.config import PretrainConfig
from lossytp.training.logs import check_installed
from lossytp.training.progress import waiting


def main() -> None:
    """Pretrain from the command line, and print the validation loss."""
    config = parse(PretrainConfig, __doc__)
    layout = config.layout(*rank_and_world_size())
    check_installed(config)

    with waiting("importing torch and transformers"):
        from lossytp.training.loop import run  # torch takes seconds to import: check the arguments first

    record = run(config)
    if layout.rank > 0:
        return
    file = f"{config.output.output_dir}/record.json"
    try:
        status, steps = record["status"], record["timing"]["steps"]
        outcome = None if status == "not finite" else _outcome(config, record["final"])
    except (KeyError, TypeError, ValueError) as error:  # an earlier run's record is damaged
        raise ValueError(f"{file} is not a record ({error!r}): delete it to run again") from error
    if outcome is None:
        raise ValueError(
            f"the training or validation loss is not finite at step {steps}: lower learning_rate = "
            f"{config.optimizer.learning_rate:g}, and give another output_dir"
        )
    print(f"{outcome}: see {file}")


def _outcome(config: PretrainConfig, final: dict[str, Any]) -> str:
    loses = config.network.process().loss_rate > 0
    over = final["cross_entropy_lossy"]
    lossy = f", {'not finite' if over is None else f'{over:.4f}'} over the lossy network" if loses else ""
    clean = final["cross_entropy_clean"]
    return f"validation loss {clean:.4f} nats a token{lossy}, after {config.tokens:,} tokens"


if __name__ == "__main__":
    run_as_command(main)
