"""Tiny random decoders of many families, with a batch for each head.

Shapes: B examples, T tokens.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

HEADS = {"language model": AutoModelForCausalLM, "classifier": AutoModelForSequenceClassification}
NUM_LAYERS, VOCABULARY = 2, 97
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_labels": 3,
    "attention_dropout": 0.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},  # grouped queries
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 8},
    "mistral": {},
    "qwen2": {},  # biases in q, k and v alone
    "qwen3": {},  # norms of the queries and keys of each head
    "gemma": {"head_dim": 16},  # heads wider than the model, tied
    "gemma2": {"head_dim": 8},
    "smollm3": {},
    "granite": {},
    "olmo": {"clip_qkv": None},
    "phi": {"embd_pdrop": 0.0, "resid_pdrop": 0.0},  # attention and MLP side by side, biases
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "gpt_neox": {"hidden_dropout": 0.0},  # one layer for q, k and v, ordered by head
}
GATHERING: dict[str, dict[str, Any]] = {  # each rank needs all outputs of some layers
    "olmo2": {},
    "phi3": {"embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "glm": {"head_dim": 8},
}


def tiny(
    family: str, kind: str = "language model", *, dtype: torch.dtype = torch.float64, **changes: Any
) -> PreTrainedModel:
    """A dense model whose every parameter is random: what starts at zero or one would hide mistakes."""
    settings = SIZES | (FAMILIES | GATHERING).get(family, {}) | changes
    return randomised(AutoConfig.for_model(family.partition(",")[0], **settings), kind, dtype)


def randomised(config: PreTrainedConfig, kind: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = HEADS[kind].from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    model.config.use_cache = False
    return model.to(dtype).train()


def shifted(model: PreTrainedModel) -> dict[str, Tensor]:
    """The gradients of a parallel model in the shapes of the dense model, by `gather` of a model that holds them."""
    import lossytp as ltp

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return dict(ltp.gather(model).named_parameters())
