"""Tiny GPT-2s, batches and naive references that the tests of `lossytp.parallel` share.

Shapes: B examples, T tokens, D model width; R ranks, N elements of one message.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedModel

import lossytp as ltp

NUM_LAYERS, NUM_HEADS, WIDTH, VOCABULARY = 2, 8, 64, 97
# B * T * D = 5,824 elements: 16 fp32 packets of 364 elements, 8 bf16 packets of 728, and halves and quarters of both
NUM_EXAMPLES, NUM_TOKENS = 7, 13
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_labels": 3}
MODELS = {"language model": GPT2LMHeadModel, "classifier": GPT2ForSequenceClassification}


def tiny_gpt2(kind: str = "language model", *, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """A dense model whose every parameter, biases included, is random: what starts at zero would hide mistakes."""
    settings: dict[str, Any] = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0) | TOKENS
    settings |= {"n_embd": WIDTH, "n_layer": NUM_LAYERS, "n_head": NUM_HEADS, "n_positions": 64, "use_cache": False}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[kind](GPT2Config(**settings | changes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).train()


def tiny_batch(kind: str = "language model", *, padded: bool = False) -> dict[str, Tensor]:
    """Token ids (B, T) and labels; padded: on the right, each example by another length."""
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(3, VOCABULARY, (NUM_EXAMPLES, NUM_TOKENS), generator=generator)
    batch = {"input_ids": ids_BT}
    labels = ids_BT.clone()
    if padded:
        lengths_B = torch.arange(NUM_EXAMPLES) + NUM_TOKENS - NUM_EXAMPLES
        real_BT = torch.arange(NUM_TOKENS) < lengths_B[:, None]
        ids_BT[~real_BT] = 0
        labels[~real_BT] = -100
        batch["attention_mask"] = real_BT.long()
    batch["labels"] = labels if kind == "language model" else torch.arange(NUM_EXAMPLES) % 3
    return batch


def bernoulli(loss_rate: float, *, seed: int = 0, **settings: Any) -> ltp.LossyNetwork:
    return ltp.LossyNetwork(ltp.Bernoulli(loss_rate=loss_rate), seed=seed, **settings)


def gradients(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of every parameter, each once where parameters are tied, after one forward and backward."""
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def gradient_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest norm of a difference, relative to the largest gradient norm of the model.

    Not to each gradient's own: the key bias of attention has no gradient at all, only rounding.
    """
    assert actual.keys() == expected.keys()
    largest = max(gradient.norm() for gradient in expected.values())
    return float(max((actual[name] - expected[name]).norm() for name in expected) / largest)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).detach().norm() / expected.detach().norm())


def training_losses(model: PreTrainedModel, batch: dict[str, Tensor], *, steps: int) -> list[float]:
    """Train the model in place with AdamW; its training loss at every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class FakeProcessGroup:
    """What is asked of a process group, or a 1-D mesh, before anything is sent."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank
