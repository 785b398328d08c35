"""GPT-2 by name: presets that train on a laptop's CPU, from random weights."""

from typing import TYPE_CHECKING, Any

from lossytp.network.checks import check_known
from lossytp.parallel.group import check_divides

if TYPE_CHECKING:
    from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast

PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-nano": {"n_embd": 128, "n_layer": 4, "n_head": 8, "vocab_size": 4096, "n_positions": 128},
    "gpt2-micro": {"n_embd": 256, "n_layer": 8, "n_head": 8, "vocab_size": 4096, "n_positions": 128},
}


def check_model(name: str, tensor_parallel_size: int, max_length: int) -> None:
    """Raise ValueError where there is no such preset, or it cannot be split so many ways or read so many tokens."""
    check_known("model_name", name, PRESETS)
    shape = PRESETS[name]
    check_divides(tensor_parallel_size, heads=shape["n_head"], inner=4 * shape["n_embd"])
    if max_length > shape["n_positions"]:
        raise ValueError(f"max_length = {max_length} is above {name}'s {shape['n_positions']} positions: give fewer")


def build_classifier(
    name: str, *, labels: tuple[str, ...], pad_token_id: int, dropout: float, seed: int
) -> "GPT2ForSequenceClassification":
    """The preset with a classification head, its weights drawn from `seed`; torch's generator is left as it was."""
    import torch  # here, so that a configuration is checked without waiting for torch
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(
        **PRESETS[name],
        id2label=dict(enumerate(labels)),
        pad_token_id=pad_token_id,
        bos_token_id=None,
        eos_token_id=None,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        use_cache=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2ForSequenceClassification(config)


def build_language_model(name: str, tokenizer: "PreTrainedTokenizerFast", *, seed: int) -> "GPT2LMHeadModel":
    """The preset with a language-modelling head, its weights drawn from `seed`, without dropout."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        **{**PRESETS[name], "vocab_size": len(tokenizer)},
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)
