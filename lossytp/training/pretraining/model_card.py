"""Write a pretrained model's README.md, with what a reader needs to use the model or to reproduce it."""

import math
from typing import Any

TEMPLATE = """\
---
library_name: transformers
pipeline_tag: text-generation
---
# {model_name}

A language model of {parameters:,} parameters, pretrained to study packet loss in tensor parallelism.

| | |
|---|---|
| data | {data}, packed into blocks of {block_size} tokens |
| vocabulary | byte-level BPE of {vocabulary} tokens |
| training | {tokens:,} tokens: {steps:,} steps of {batch_size} blocks |
| learning rate | {learning_rate:g}, {schedule} |
| held out | {validation_tokens:,} tokens: {validation_loss:.4f} nats a token, perplexity {perplexity:.2f} |
| beside | a Kneser-Ney trigram model of {trigram_tokens:,} of the same tokens: perplexity {trigram_perplexity:.2f} |
| weights | stored in bfloat16, trained in {precision} |
| code | commit {commit} |
| made on | {processor}, {threads} threads, torch {torch}, {hours:.1f} hours |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(folder)
```

Before you share the weights, look up the licence of the text. Wikipedia's is CC BY-SA, Python's the PSF licence.
"""


def model_card(record: dict[str, Any]) -> str:
    """Return the model card, in Markdown, from the run's record."""
    config, data, where, timing = (record[name] for name in ("config", "data", "environment", "timing"))
    loss = record["final"]["cross_entropy_clean"]
    return TEMPLATE.format(
        **{name: config[name] for name in ("model_name", "block_size", "batch_size", "learning_rate")},
        **{name: data[name] for name in ("vocabulary", "validation_tokens", "trigram_perplexity", "trigram_tokens")},
        **{name: timing[name] for name in ("steps", "threads")},
        parameters=record["parameters"],
        data=config["dataset"] or config["data_glob"],
        tokens=timing["steps"] * config["batch_size"] * config["block_size"],
        schedule=_schedule(config),
        precision=_precision(config),
        validation_loss=loss,
        perplexity=math.exp(loss),
        commit=record["commit"],
        processor=where.get("gpu", where["processor"]),
        torch=where["torch"],
        hours=timing["train_seconds"] / 3600,
    )


def _precision(config: dict[str, Any]) -> str:
    narrow = next((name for flag, name in (("bf16", "bfloat16"), ("fp16", "float16")) if config[flag]), None)
    return f"float32, with autocast to {narrow}" if narrow else "float32"


def _schedule(config: dict[str, Any]) -> str:
    return (
        "constant"
        if config["schedule"] == "constant"
        else f"{config['schedule']} decay to {config['min_learning_rate']:g}"
    )
