"""Write a pretrained model's README.md, with what a reader needs to use the model or to reproduce it."""

import math
from typing import Any

TEMPLATE = """\
---
language: en
library_name: transformers
pipeline_tag: text-generation
---
# {model_name}

A GPT-2 of {parameters:,} parameters for experiments on lossy tensor parallelism: small enough to fine-tune on a laptop,
pretrained so that fine-tuning measures tolerance of packet loss, not how fast a model learns from nothing.
It knows a little English and no facts.

| | |
|---|---|
| data | {data}, packed into blocks of {block_size} tokens |
| vocabulary | byte-level BPE of {vocabulary} tokens |
| training | {tokens:,} tokens: {steps:,} steps of {batch_size} blocks |
| learning rate | {learning_rate:g}, {schedule} decay to {smallest:g} |
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

Text from Wikipedia is under CC BY-SA, sources of Python's standard library under the PSF licence; the weights are under
this project's.
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
        data=config["data_glob"],
        tokens=timing["steps"] * config["batch_size"] * config["block_size"],
        schedule=config["schedule"],
        precision="float32, with autocast to bfloat16" if config["bf16"] else "float32",
        smallest=config["min_learning_rate"],
        validation_loss=loss,
        perplexity=math.exp(loss),
        commit=record["commit"],
        processor=where["processor"],
        torch=where["torch"],
        hours=timing["train_seconds"] / 3600,
    )
