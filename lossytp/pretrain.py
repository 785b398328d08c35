"""Pretrain a small language model on running text, for fine-tuning to start from.

python -m lossytp.pretrain --output_dir output/pretrain
python -m lossytp.pretrain --data_glob "FOLDER/train-*.parquet" --validation_glob "FOLDER/validation-*.parquet"
torchrun --standalone --nproc_per_node 2 -m lossytp.pretrain --tensor_parallel_size 2 --loss_rate 0.05
"""

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
    if record["status"] == "not finite":
        fix = f"lower learning_rate = {config.optimizer.learning_rate:g}, and give another output_dir"
        raise ValueError(f"a training or validation loss is not finite at step {record['timing']['steps']}: {fix}")
    final, lossy = record["final"], ""
    if config.network.process().loss_rate > 0:
        over = final["cross_entropy_lossy"]
        lossy = f", {'not finite' if over is None else f'{over:.4f}'} over the lossy network"
    clean = f"validation loss {final['cross_entropy_clean']:.4f} nats a token"
    print(f"{clean}{lossy}, after {config.tokens:,} tokens: see {config.output.output_dir}/record.json")


if __name__ == "__main__":
    run_as_command(main)
