"""Save trained models as folders that transformers reads, with what they remember of their training."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lossytp.network.checks import refuse_if
from lossytp.parallel.convert import gather
from lossytp.parallel.data_parallel import BucketedDDP, FlatFSDP
from lossytp.parallel.pipeline import Stage
from lossytp.parallel.replicas import on_rank_zero
from lossytp.parallel.shards import dense_weights
from lossytp.training.config import EvaluateConfig, TrainConfig
from lossytp.training.engine import Engine
from lossytp.training.files import MANIFEST, others, own_files, refuse, remove, saving, sync, write_manifest

# What a saved model remembers of its fine-tuning, in its config.json: the task, its declaration, and the length.


def finetuned_on(config: TrainConfig) -> dict[str, Any]:
    """Return the entries of a model's config.json that say what it is fine-tuned on."""
    entries: dict[str, Any] = {"finetuning_task": config.data.dataset, "finetuning_max_length": config.data.max_length}
    if config.data.declaration is not None:
        entries |= {"finetuning_declaration": config.data.declaration, "finetuning_folder": config.data.task_folder}
    return entries


def with_its_task(config: EvaluateConfig, model_config: Any) -> EvaluateConfig:
    """Return the configuration with the task that the model was fine-tuned on, unless it names a task already."""
    if config.data.dataset is not None:
        return config
    folder, declaration = config.data.task_folder, getattr(model_config, "finetuning_declaration", None)
    fault = f"is for a task that a YAML file declares, and {config.model_name} was fine-tuned on none: leave it out"
    refuse_if(folder is not None and declaration is None, "task_folder", folder, fault)
    return config.replace(
        dataset=getattr(model_config, "finetuning_task", None),
        declaration=declaration,
        task_folder=folder or getattr(model_config, "finetuning_folder", None),
    )


NARROW = {"bf16": "bfloat16", "fp16": "float16"}
CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---
# {config[model_name]}

A language model of {parameters:,} parameters, pretrained to study packet loss in tensor parallelism.

| | |
|---|---|
| data | {text}, packed into blocks of {config[block_size]} tokens |
| vocabulary | byte-level BPE of {data[vocabulary]} tokens |
| training | {tokens:,} tokens: {timing[steps]:,} steps of {config[batch_size]} blocks |
| learning rate | {config[learning_rate]:g}, {schedule} |
| held out | {data[validation_tokens]:,} tokens: {loss:.4f} nats a token, perplexity {perplexity:.2f} |
| weights | stored in bfloat16, trained in {precision} |
| code | commit {commit} |
| made on | {processor}, {timing[threads]} threads, torch {environment[torch]}, {hours:.1f} hours |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(folder)
```

Before you share the weights, look up the licence of the text. Wikipedia's is CC BY-SA, Python's the PSF licence.
"""


def model_card(record: dict[str, Any]) -> str:
    """Return a pretrained model's README.md: what a reader needs to use the model or to reproduce it."""
    config, where, timing = record["config"], record["environment"], record["timing"]
    loss, decay = record["final"]["cross_entropy_clean"], f" decay to {config['min_learning_rate']:g}"
    narrow = [f"float32, with autocast to {name}" for flag, name in NARROW.items() if config[flag]]
    return CARD.format(
        **record,
        text=config["dataset"] or config["data_glob"],
        tokens=timing["steps"] * config["batch_size"] * config["block_size"],
        schedule=config["schedule"] + ("" if config["schedule"] == "constant" else decay),
        loss=loss,
        perplexity=math.exp(loss),
        precision=narrow[0] if narrow else "float32",
        processor=where.get("gpu", where["processor"]),
        hours=timing["train_seconds"] / 3600,
    )


# Save the trained model as a folder that transformers reads.


BEST, LAST = "best", "last"
MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = ("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")


def save_model(engine: Engine, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save the dense model in `folder`, and replace an earlier one. All processes must call this; the first writes.

    If ranks have drifted apart, the first rank's parameters are saved. If the run is killed meanwhile, it saves the
    model again once resumed.

    Raises:
        ValueError: if the folder holds the user's files, or cannot be written.
    """
    dense = _dense_model(engine)

    def write() -> None:
        _check_folder(folder)
        part = _part(folder)
        remove(part)
        own_files(part, ["*"])
        with saving(folder):
            try:
                dense.save_pretrained(part)
                tokenizer.save_pretrained(part)
                write_manifest(part, [path.name for path in part.iterdir() if path.name != MANIFEST])
                sync(part)
            except Exception:
                remove(part)
                raise
            remove(folder)
            part.rename(folder)

    on_rank_zero(write, engine.network)


def save_in_bfloat16(
    engine: Engine, build: Callable[[], PreTrainedModel], folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Save the trained weights, rounded to bfloat16, and the tokenizer among other files of `folder`.

    All processes must call this; the first writes, and calls `build` for a dense model of the same shape.
    """
    trained = _dense_model(engine)

    def write() -> None:
        dense = build()
        dense.load_state_dict(trained.state_dict())
        with saving(folder):
            dense.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
            tokenizer.save_pretrained(folder)

    on_rank_zero(write, engine.network)


def _dense_model(engine: Engine) -> Any:
    """Return the trained model, as transformers knows it, on the first process. All processes must call this."""
    module: Any = engine.module
    if isinstance(module, DistributedDataParallel | BucketedDDP):
        module = module.module
    if isinstance(module, FlatFSDP | FSDPModule | Stage) or engine.implementation in ("dtensor", "megatron"):
        weights = dense_weights(engine.module, engine.layout, engine.network)
        return engine.dense_model(weights) if engine.layout.rank == 0 else None
    with engine.network.reliable(), torch.no_grad():
        return gather(module) if engine.implementation == "lossytp" else module


def check_folders(output_dir: Path) -> None:
    """Raise ValueError if the folders of a run's models hold the user's files."""
    for name in (BEST, LAST):
        _check_folder(output_dir / name)


def _check_folder(folder: Path) -> None:
    for each in (folder, _part(folder)):
        refuse(others(each))


def _part(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.part")
