"""Evaluate a trained model over a lossy network: a task's score, perplexity, a generated text."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from lossytp.network.checks import check_at_least
from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.group import Layout, rank_and_world_size
from lossytp.parallel.replicas import merge_counters, on_rank_zero
from lossytp.training.batches import load_dataset
from lossytp.training.config import EvaluateConfig
from lossytp.training.engine import Engine, connected_processes, give_back_freed_memory, this_device
from lossytp.training.files import check_writable, first_line, write_atomically
from lossytp.training.models import (
    GENERATION,
    answers,
    check_tokenizer,
    load_model,
    load_tokenizer,
    prompt,
    told_first_tokens,
)
from lossytp.training.objectives import mean_over_ranks, scores, with_its_task
from lossytp.training.progress import waiting
from lossytp.training.record import describe
from lossytp.training.rows import sample_indices
from lossytp.training.shapes import check_positions
from lossytp.training.text import all_blocks, corpus

BLOCKS_AT_ONCE = 8
EVALUATION = "evaluation.json"
DEFAULT_LENGTH = 64
Found = TypeVar("Found")


def run(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluate with and without losses, write evaluation.json, and return its content.

    Under torchrun every process calls this; the first writes, and all return the result.

    Raises:
        ValueError: if the model has no head for the task, text or prompt of `config`.
    """
    layout = config.layout(*rank_and_world_size())
    with connected_processes(config, layout) as network:
        return _evaluate(config, layout, network)


def _evaluate(config: EvaluateConfig, layout: Layout, network: LossyNetwork) -> dict[str, Any]:
    on_rank_zero(lambda: _check_output_folder(config), network)
    tokenizer = load_tokenizer(config.model_name)
    dense = load_model(config.model_name)
    check_tokenizer(f"model_name = {config.model_name!r}", tokenizer, dense.config.vocab_size)
    config = with_its_task(config, dense.config)
    _check_head(config, dense)
    positions = dense.config.max_position_embeddings
    max_length = config.data.max_length or getattr(
        dense.config, "finetuning_max_length", min(DEFAULT_LENGTH, positions)
    )
    check_at_least(f"{config.model_name}'s finetuning_max_length", max_length, 1)
    check_positions(config.model_name, positions, max_length)
    if config.data.data_glob is not None and max_length < 2:
        raise ValueError(f"max_length = {max_length} leaves no token to predict from earlier ones: give 2 or more")
    prompts = None if config.data.prompt is None else _prompts(config, dense, tokenizer)
    engine = Engine(config.training(), dense, network, layout, this_device(layout))
    del dense
    give_back_freed_memory()
    result: dict[str, Any] = {**describe(config), "dataset": config.data.dataset, "max_length": max_length}
    result |= told_first_tokens(tokenizer)
    if config.data.dataset is not None:
        data = load_dataset(
            config.data.dataset,
            tokenizer,
            max_length=max_length,
            train_samples=1,
            test_samples=config.compute.eval_samples,
            task=config.definition(),
        )
        result["metric"], result["test_examples"] = data.task.metrics[0], len(data.test)
        result["subset"] = bool(data.task.source.subset("test"))
        result["incomplete_rows"] = data.test.incomplete
        measured = _both_ways(network, lambda: scores(engine, data))
        result |= {how: mean_over_ranks(found) for how, found in measured.items()}
    if config.data.data_glob is not None:
        with waiting("reading and tokenising the text"):
            blocks = all_blocks(corpus(config.data.data_glob, split="validation"), tokenizer, block_size=max_length)
        blocks = blocks[torch.from_numpy(sample_indices(len(blocks), config.compute.eval_samples))]
        result["blocks"] = len(blocks)
        result["perplexity"] = _both_ways(network, lambda: _perplexity(blocks, engine))
    if prompts is not None:
        written = _both_ways(
            network, lambda: engine.generate(prompts, new_tokens=config.data.new_tokens, tokenizer=tokenizer)
        )
        result["text"] = {how: tokenizer.decode(ids[0]) for how, ids in written.items()}
    merge_counters(network)
    result["network"] = network.summary("evaluation")
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    on_rank_zero(lambda: write_atomically(Path(config.output.output_dir) / EVALUATION, text), network)
    return result


def _both_ways(network: LossyNetwork, measure: Callable[[], Found]) -> dict[str, Found]:
    """Return what is measured without losses, as "clean", and with them, as "lossy"."""
    with waiting("evaluation without losses"), network.reliable():
        clean = measure()
    with waiting("evaluation with losses"), network.evaluation(0):
        return {"clean": clean, "lossy": measure()}


def _check_output_folder(config: EvaluateConfig) -> None:
    """Raise ValueError if the folder cannot be written, or holds an evaluation.json that is not an evaluation."""
    check_writable(config.output.output_dir)
    file = Path(config.output.output_dir) / EVALUATION
    try:
        if not {"config", "network"} <= json.loads(file.read_text(encoding="utf-8")).keys():
            raise ValueError("it lacks config or network")
    except FileNotFoundError:
        return
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{file} is not an evaluation ({first_line(error)}): move it elsewhere, or give another output_dir"
        ) from error


def _prompts(config: EvaluateConfig, dense: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    """Return the prompt as token ids (1, tokens), with their attention mask.

    Raises:
        ValueError: if the prompt has no tokens, or too many for the model together with the new ones.
    """
    assert config.data.prompt is not None
    encoded = prompt(tokenizer, config.data.prompt)
    length, positions = encoded["input_ids"].shape[1], dense.config.max_position_embeddings
    if length == 0:
        raise ValueError(f"prompt = {config.data.prompt!r} has no token to continue: give a word, or leave it out")
    if length + config.data.new_tokens > positions:
        raise ValueError(
            f"new_tokens = {config.data.new_tokens} after a prompt of {length} tokens exceeds the model's {positions} "
            "positions: give fewer, or a shorter prompt"
        )
    return encoded


def _perplexity(blocks: torch.Tensor, engine: Engine) -> float | None:
    """Return exp of the mean cross-entropy of a token, given the earlier ones in its block; None if not finite."""
    each = engine.cross_entropies({"input_ids": part, "labels": part} for part in blocks.split(BLOCKS_AT_ONCE))
    mean = sum(each) / len(each)
    return math.exp(mean) if mean < math.log(sys.float_info.max) else None


def _check_head(config: EvaluateConfig, dense: Any) -> None:
    """Raise ValueError if the model lacks the head that `config` needs, or `config` names nothing to evaluate."""
    generates = answers(dense, GENERATION)
    for name in ("data_glob", "prompt"):
        if getattr(config, name) is not None and not generates:
            raise ValueError(
                f"{name} = {getattr(config, name)!r} needs a language model, which {config.model_name} is not: give one"
            )
    dataset = config.data.dataset
    if dataset is None:
        if config.data.data_glob is None and config.data.prompt is None:
            raise ValueError(f"nothing to evaluate {config.model_name} on: give dataset, data_glob or prompt")
        return
    task = config.definition()
    if not answers(dense, task.kind) or task.num_logits not in (None, dense.config.num_labels):
        raise ValueError(
            f"dataset = {dataset!r} needs a model fine-tuned on it, which {config.model_name} is not: run "
            f"lossytp.train --dataset {dataset} --save_model, and give the folder it wrote"
        )
    labels = list(getattr(task, "labels", ()))
    learnt = list(dense.config.id2label.values()) if labels else []
    if learnt != labels:
        raise ValueError(
            f"dataset = {dataset!r} has the classes {', '.join(labels)}, but {config.model_name} learnt "
            f"{', '.join(map(str, learnt))}: give a model fine-tuned on {dataset}"
        )
