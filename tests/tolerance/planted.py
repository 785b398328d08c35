"""A tiny GPT-2 with a massive activation: one hidden unit of one MLP writes a huge value at the first token.

The token before every text fires the unit. In the next block all tokens attend to what it wrote, and take from there
the direction that predicts the one word of `TEXT`. So losing the packet that carries the value costs all tokens.
"""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lossytp.training.models import load_tokenizer
from tests.training.bos import BOS, with_bos

RANKS, WIDTH, HEADS, TOKENS = 4, 64, 4, 32
UNIT = 250  # of 256, so of the last rank
TEXT = "the" + " the" * 2000
MTU_BYTES = 200  # 39 elements of float32


def save_planted(folder: Path, *, massive: float = 100.0) -> str:
    """Save the model and its tokenizer in a folder; without a massive value, no token stands out."""
    tokenizer = with_bos(load_tokenizer("gpt2-nano"))
    bos, word = tokenizer.convert_tokens_to_ids(BOS), tokenizer(TEXT[:400])["input_ids"][20]
    torch.manual_seed(0)
    shape = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 64, "vocab_size": len(tokenizer)}
    model = GPT2LMHeadModel(GPT2Config(**shape, tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id)).eval()
    first, second = model.transformer.h
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
        embeddings = model.transformer.wte.weight
        embeddings.normal_(0, 0.3)
        embeddings[:, 2:] -= embeddings[:, 2:].mean(1, keepdim=True)  # so that LayerNorm keeps the zeros
        embeddings[:, :2] = 0
        embeddings[bos] = 0
        embeddings[bos, 1] = 5
        first.mlp.c_fc.weight[1, UNIT] = 5
        first.mlp.c_proj.weight[UNIT, 0] = massive
        keys = slice(WIDTH, 2 * WIDTH)
        second.attn.c_attn.bias[:WIDTH] = 1
        second.attn.c_attn.weight[0, keys] = 1
        direction = torch.nn.functional.normalize(torch.randn(WIDTH), dim=0)
        for number in range(HEADS):  # each head, and so each rank, carries its share of the direction
            value = number * WIDTH // HEADS
            second.attn.c_attn.weight[0, 2 * WIDTH + value] = 1
            second.attn.c_proj.weight[value] = direction / 2
        model.lm_head.weight[word] = direction
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
