"""Evaluate a trained model over a lossy network: a task's score, perplexity, a generated text."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from lossytp.network.checks import check_at_least, check_at_most, refuse_if
from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.backend import this_device
from lossytp.parallel.group import Layout, rank_and_world_size
from lossytp.parallel.replicas import merge_counters, on_rank_zero
from lossytp.training.batches import load_dataset
from lossytp.training.config import EvaluateConfig
from lossytp.training.corpus import corpus
from lossytp.training.engine import Engine, connected_processes, give_back_freed_memory
from lossytp.training.files import check_writable, refuse, write_atomically
from lossytp.training.models import (
    GENERATION,
    answers,
    check_tokenizer,
    first_token_names,
    load_model,
    load_tokenizer,
    prompt,
)
from lossytp.training.objectives import mean_over_ranks, scores
from lossytp.training.progress import waiting
from lossytp.training.record import describe
from lossytp.training.rows import sample_indices
from lossytp.training.saved_models import with_its_task
from lossytp.training.shapes import check_positions
from lossytp.training.text import all_blocks

BLOCKS_AT_ONCE = 8
EVALUATION = "evaluation.json"
DEFAULT_LENGTH = 64
Found = TypeVar("Found")


def run(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluate with and without losses, write evaluation.json, and return its content.

    Under torchrun every process calls this; the first writes, and all return the result.
    """
    layout = config.layout(*rank_and_world_size())
    with connected_processes(config, layout) as network:
        on_rank_zero(lambda: _check_output_folder(config), network)
        result = _evaluate(config, layout, network)
        text = json.dumps(result, indent=1, allow_nan=False) + "\n"
        on_rank_zero(lambda: write_atomically(Path(config.output.output_dir) / EVALUATION, text), network)
    return result


def _evaluate(config: EvaluateConfig, layout: Layout, network: LossyNetwork) -> dict[str, Any]:
    tokenizer = load_tokenizer(config.model_name)
    dense = load_model(config.model_name)
    check_tokenizer(f"model_name = {config.model_name!r}", tokenizer, dense.config.vocab_size)
    config = with_its_task(config, dense.config)
    _check_head(config, dense)
    positions = dense.config.max_position_embeddings
    max_length = config.data.max_length or getattr(
        dense.config, "finetuning_max_length", min(DEFAULT_LENGTH, positions)
    )
    check_positions(config.model_name, positions, max_length)
    if config.data.data_glob is not None:
        check_at_least("max_length", max_length, 2)  # a token is predicted from earlier ones
    prompts = None if config.data.prompt is None else _prompts(config, dense, tokenizer)
    engine = Engine(config.training(), dense, network, layout, this_device(layout.rank))
    del dense
    give_back_freed_memory()
    result: dict[str, Any] = {**describe(config), "dataset": config.data.dataset, "max_length": max_length}
    result |= first_token_names(tokenizer)
    if config.data.dataset is not None:
        data = load_dataset(
            config.data.dataset,
            tokenizer,
            max_length=max_length,
            train_samples=1,
            test_samples=config.compute.eval_samples,
            task=config.data.definition(),
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
    if file.exists() and not (file.is_file() and b'"network":' in file.read_bytes()):
        refuse([file])


def _prompts(config: EvaluateConfig, dense: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    """Return the prompt as token ids (1, tokens), with their attention mask."""
    assert config.data.prompt is not None
    encoded = prompt(tokenizer, config.data.prompt)
    length, positions = encoded["input_ids"].shape[1], dense.config.max_position_embeddings
    check_at_most("new_tokens", config.data.new_tokens, positions - 1, f"fewer than the model's {positions} positions")
    most = positions - config.data.new_tokens
    fault = f"has {length} tokens: give 1 to {most}, with new_tokens = {config.data.new_tokens} the model's positions"
    refuse_if(not 0 < length <= most, "prompt", config.data.prompt, fault)
    return encoded


def _perplexity(blocks: torch.Tensor, engine: Engine) -> float | None:
    """Return exp of the mean cross-entropy of a token, given the earlier ones in its block; None if not finite."""
    each = engine.cross_entropies({"input_ids": part, "labels": part} for part in blocks.split(BLOCKS_AT_ONCE))
    mean = sum(each) / len(each)
    return math.exp(mean) if mean < math.log(sys.float_info.max) else None


def _check_head(config: EvaluateConfig, dense: Any) -> None:
    """Raise ValueError if the model lacks the head that `config` needs, or `config` names nothing to evaluate."""
    name, dataset = config.model_name, config.data.dataset
    if (config.data.data_glob or config.data.prompt) is not None and not answers(dense, GENERATION):
        raise ValueError(f"data_glob and prompt need a language model, which {name} is not: give one")
    if dataset is None:
        if config.data.data_glob is None and config.data.prompt is None:
            raise ValueError(f"nothing to evaluate {name} on: give dataset, data_glob or prompt")
        return
    task = config.data.definition()
    labels = list(getattr(task, "labels", ()))
    fits = answers(dense, task.kind) and task.num_logits in (None, dense.config.num_labels)
    fix = f"run lossytp.train --dataset {dataset} --save_model, and give the folder it wrote"
    wrong = not fits or (labels and labels != list(dense.config.id2label.values()))
    refuse_if(wrong, "dataset", dataset, f"needs a model fine-tuned on it, which {name} is not: {fix}")
