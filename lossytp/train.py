"""Fine-tune a tensor-parallel language model on a task over a lossy network.

python -m lossytp.train --loss_rate 0.05 --output_dir output
python -m lossytp.train --config run.yaml --seed 7
torchrun --standalone --nproc_per_node 2 -m lossytp.train --tensor_parallel_size 2 --output_dir output
"""

from lossytp.parallel.group import rank_and_world_size
from lossytp.training.command_line import parse, run_as_command
from lossytp.training.config import TrainConfig
from lossytp.training.logs import check_installed
from lossytp.training.models import check_there
from lossytp.training.progress import waiting


def main() -> None:
    """Train from the command line, and print the outcome."""
    config = parse(TrainConfig, __doc__)
    layout = config.layout(*rank_and_world_size())
    check_installed(config)
    check_there(config.model_name)

    with waiting("importing torch and transformers"):
        from lossytp.training.loop import run  # torch takes seconds to import: check the arguments first

    record = run(config)
    if layout.rank == 0:
        finite = record["status"] != "not finite"  # else no model is saved
        saved = ", and the model in float32" if config.output.save_model and finite else ""
        print(f"{_outcome(config.data.dataset, record)}: see {config.output.output_dir}/record.json{saved}")


def _outcome(dataset: str, record: dict) -> str:
    if record["status"] == "not finite":
        return f"the training loss was not finite at step {record['timing']['steps']}"
    data, final = record["data"], record["final"]
    share = data["majority_share"]  # of classes that are not scored by accuracy
    frequent = "" if share in (None, data["chance"]) else f", most frequent class {share:.4f}"
    return (
        f"{dataset}{' (subset)' if data['subsets'] else ''}: {data['metric']} {final['score_lossy']:.4f} with "
        f"packet loss, {final['score_clean']:.4f} without, {data['chance']:.4f} by chance{frequent} "
        f"({record['status']})"
    )


if __name__ == "__main__":
    run_as_command(main)
