"""Pretrain a small GPT-2 on running text, for fine-tuning to start from.

python -m lossytp.pretrain --output_dir output/pretrain
python -m lossytp.pretrain --data_glob "FOLDER/train-*.parquet" --validation_glob "FOLDER/validation-*.parquet"
"""

from lossytp.training.command_line import parse, run_as_command
from lossytp.training.config import PretrainConfig


def main() -> None:
    config = parse(PretrainConfig, __doc__)

    from lossytp.training.pretraining.run import run  # after the arguments were checked: torch takes seconds to import

    statistics = run(config)
    print(
        f"validation loss {statistics['validation_loss']:.4f} nats a token, perplexity {statistics['perplexity']:.2f} "
        f"after {statistics['tokens']:,} tokens: see {config.output_dir}/README.md"
    )


if __name__ == "__main__":
    run_as_command(main)
