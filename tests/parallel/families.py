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
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": NUM_LAYERS}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64, "attention_dropout": 0.0}
SIZES |= {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 3}
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
    "helium": {"head_dim": 8},
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

FEW_HEADS: dict[str, dict[str, Any]] = {  # at 2 ranks or more, several ranks share a key-value head
    "llama, one key-value head": {"num_key_value_heads": 1},
    "qwen2, one key-value head": {"num_key_value_heads": 1},
    "qwen3, one key-value head": {"num_key_value_heads": 1},
    "gemma3_text, one key-value head": {"num_key_value_heads": 1, "head_dim": 16},
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": EXPERTS | {"head_dim": 8},
    "olmoe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 48},  # every token visits a shared expert, too
    "deepseek_v3": EXPERTS  # attention that is not sharded; shared experts that are; one block without experts
    | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 2}
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    | {"num_key_value_heads": 8},
}
ALL = FAMILIES | GATHERING | FEW_HEADS | MIXTURES


def tiny(
    family: str, kind: str = "language model", *, dtype: torch.dtype = torch.float64, **changes: Any
) -> PreTrainedModel:
    """A dense model whose every parameter is random: what starts at zero or one would hide mistakes."""
    settings = SIZES | ALL.get(family, {}) | changes
    return randomised(AutoConfig.for_model(family.partition(",")[0], **settings), kind, dtype)


def randomised(config: PreTrainedConfig, kind: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config._experts_implementation = "eager"  # the others do not compute in float64
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
