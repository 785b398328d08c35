"""Evaluate a language model over a lossy network, without training: a task's score, perplexity, or generated text.

python -m lossytp.evaluate --model_name output/best --loss_rate 0.05
python -m lossytp.evaluate --model_name gpt2-nano --data_glob stdlib --prompt "The river" --loss_rate 0.05
"""

from lossytp.parallel.group import rank_and_world_size
from lossytp.training.command_line import parse, run_as_command
from lossytp.training.config import EvaluateConfig
from lossytp.training.models import check_there
from lossytp.training.progress import waiting


def main() -> None:
    """Evaluate from the command line, and print the results."""
    config = parse(EvaluateConfig, __doc__)
    layout = config.layout(*rank_and_world_size())
    check_there(config.model_name)

    with waiting("importing torch and transformers"):
        from lossytp.training.evaluation import run  # torch takes seconds to import: check the arguments first

    result = run(config)
    if layout.rank > 0:
        return
    if "metric" in result:
        lossy, clean = result["lossy"], result["clean"]
        print(
            f"{result['dataset']}{' (subset)' if result['subset'] else ''}: {result['metric']} {lossy['score']:.4f} "
            f"with packet loss, {clean['score']:.4f} without, on {result['test_examples']} examples"
        )
    if "perplexity" in result:
        lossy, clean = (_shown(result["perplexity"][how]) for how in ("lossy", "clean"))
        print(
            f"perplexity {lossy} with packet loss, {clean} without, on {result['blocks']} blocks of "
            f"{result['max_length']} tokens"
        )
    if "first_tokens" in result:
        print(f"every text begins with {' '.join(result['first_tokens'])}, as the tokenizer asks")
    if "text" in result:
        print(f"with packet loss: {result['text']['lossy']!r}\nwithout: {result['text']['clean']!r}")
    print(f"see {config.output.output_dir}/evaluation.json")


def _shown(perplexity: float | None) -> str:
    return "not finite" if perplexity is None else f"{perplexity:.2f}"


if __name__ == "__main__":
    run_as_command(main)
