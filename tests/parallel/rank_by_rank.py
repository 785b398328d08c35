"""GPT-2 as tensor-parallel ranks one by one: a naive reference for `lossytp.parallel`, in plain autograd.

No tensor here holds more than one rank's shard, or more than one residual stream. Losses come from `network.send`, one
packet after the other set to zero.

Shapes: B examples, T tokens, D model width, V vocabulary or classes, R ranks, N elements of one message, P projections,
F outputs of one projection and rank, K inputs of one rank.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from transformers import PreTrainedModel

import lossytp as ltp
from lossytp.network.routes import ALGORITHMS, Hops

FLOAT64_BYTES = 8
Tensors = Sequence[Tensor]


class TwoWays(Function):
    """Any map of several tensors, with any other as its backward."""

    @staticmethod
    def forward(ctx: Any, forth: Callable, back: Callable, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(tensor.clone() for tensor in forth(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient.clone() for gradient in ctx.back(gradients))


class Ranks:
    """What R ranks do together, with messages of float64.

    Args:
        way: "own" (a stream on each rank), "shared" (one stream, reliable gather), "adjoint" (the same, and backward
            knows what was lost), "sequence" (one stream in shards, reliable gathers) or "sequence, lossy gather".
    """

    def __init__(self, network: ltp.LossyNetwork, algorithm: str, size: int, way: str) -> None:
        self.network, self.routes, self.size, self.way = network, ALGORITHMS[algorithm], size, way
        self.streams = size if way == "own" else 1

    def cross(self, tensors: Tensors, routes: Callable, unit: int = 1) -> list[Tensor]:
        """Rows that lack what the hops' losses take from them."""
        rows = [tensor.detach().flatten().tolist() for tensor in tensors]
        hops: Hops = routes(len(rows[0]), tuple(range(self.size)), unit)
        room = self.network.wire.elements_per_packet(FLOAT64_BYTES)
        for hop, packets in zip(hops, self.network.send(hops, FLOAT64_BYTES).packets, strict=True):
            for packet in packets.tolist():
                for element in range(hop.start + packet * room, min(hop.start + (packet + 1) * room, hop.stop)):
                    for position in hop.positions:
                        rows[position][element] = 0.0
        return [torch.tensor(row, dtype=torch.float64).view(tensors[0].shape) for row in rows]

    def all_reduce(self, parts: Tensors) -> list[Tensor]:
        total = sum(self.cross(parts, self.routes.reduce))
        return self.cross([total] * self.size, self.routes.gather)

    def all_reduce_to_all_alike(self, parts: Tensors) -> list[Tensor]:
        return [sum(self.cross(parts, self.routes.reduce))]

    def reduce_scatter(self, parts: Tensors) -> list[Tensor]:
        return [sum(self.cross(parts, self.routes.reduce_scatter, unit=parts[0].shape[-1]))]

    def all_gather(self, shards: Tensors) -> list[Tensor]:
        copies = [shards[0]] * self.size
        return self.cross(copies, self.routes.all_gather, unit=shards[0].shape[-1]) if "lossy" in self.way else copies

    def copy(self, tensors: Tensors) -> list[Tensor]:
        return list(tensors)

    def repeat(self, tensors: Tensors) -> list[Tensor]:
        return [tensors[0]] * self.size

    def f(self, streams: Tensors) -> tuple[Tensor, ...]:
        """From the streams to each rank's input of a column-parallel layer."""
        forth, back = {
            "own": (self.copy, self.all_reduce),
            "shared": (self.repeat, self.all_reduce_to_all_alike),
            "adjoint": (self.repeat, self.all_reduce_to_all_alike),
        }.get(self.way, (self.all_gather, self.reduce_scatter))
        return TwoWays.apply(forth, back, *streams)

    def g(self, parts: Tensors) -> tuple[Tensor, ...]:
        """From each rank's product in a row-parallel layer to the streams."""
        if self.way == "adjoint":
            arrives = self.cross([torch.ones_like(part) for part in parts], self.routes.reduce)
            return (sum(part * mask for part, mask in zip(parts, arrives, strict=True)),)
        forth, back = {"own": (self.all_reduce, self.copy), "shared": (self.all_reduce_to_all_alike, self.repeat)}.get(
            self.way, (self.reduce_scatter, self.all_gather)
        )
        return TwoWays.apply(forth, back, *parts)


class RankByRank:
    """The ranks' parameters, their logits, and the gradient of the sum of their training losses."""

    def __init__(self, dense: PreTrainedModel, ranks: Ranks) -> None:
        self.ranks, self.config, size = ranks, dense.config, ranks.size
        self.shards: list[dict[str, Tensor]] = [{} for _ in range(size)]
        self.copies: list[dict[str, Tensor]] = [{} for _ in range(ranks.streams)]
        self.axis = {}  # of the ranks, in the library's shape of a sharded parameter
        for name, parameter in dense.named_parameters():
            weight = parameter.detach()
            layer, kind = name.split(".")[-2:]
            if layer in ("c_attn", "c_fc"):
                shape = (3 if layer == "c_attn" else 1, size, -1)
                self.axis[name] = 2 if kind == "weight" else 1
                pieces = weight.view(*((len(weight), *shape) if kind == "weight" else shape)).unbind(self.axis[name])
            elif layer == "c_proj" and kind == "weight":
                self.axis[name] = 0
                pieces = weight.view(size, -1, weight.shape[1]).unbind(0)
            else:
                for copy in self.copies:
                    copy[name] = weight.clone().requires_grad_()
                continue
            for shard, piece in zip(self.shards, pieces, strict=True):
                shard[name] = piece.clone().requires_grad_()

    def gradients(self, *, own_copies: bool) -> dict[str, Tensor]:
        """In the library's shapes: replicated parameters' the mean over ranks, or with `own_copies` each rank's own."""
        found = {}
        for name, axis in self.axis.items():
            stacked = torch.stack([shard[name].grad for shard in self.shards], axis)
            found[name] = stacked.flatten(max(axis - 1, 0)) if axis else stacked  # a column's projections and ranks
        for name in self.copies[0]:
            each = torch.stack([copy[name].grad for copy in self.copies])
            found[name] = each if own_copies else each.mean(0)
        return found

    def logits(self, ids_BT: Tensor, mask_BT: Tensor) -> list[Tensor]:
        """Of each stream: (B, T, V), or a classifier's (B, V)."""
        positions = torch.arange(ids_BT.shape[1])
        streams = [
            copy["transformer.wte.weight"][ids_BT] + copy["transformer.wpe.weight"][positions] for copy in self.copies
        ]
        for layer in range(self.config.n_layer):
            for module, body in (("attn", self._attention), ("mlp", self._mlp)):
                norm = f"transformer.h.{layer}.ln_{1 if module == 'attn' else 2}"
                inputs = self.ranks.f(self._normed(streams, norm))
                prefix = f"transformer.h.{layer}.{module}"
                parts = [body(x, shard, prefix, mask_BT) for x, shard in zip(inputs, self.shards, strict=True)]
                sums = self.ranks.g(parts)
                streams = [
                    x + y + copy[f"{prefix}.c_proj.bias"] for x, y, copy in zip(streams, sums, self.copies, strict=True)
                ]
        streams = self._normed(streams, "transformer.ln_f")
        if "score.weight" not in self.copies[0]:
            return [x @ copy["transformer.wte.weight"].t() for x, copy in zip(streams, self.copies, strict=True)]
        examples, last = torch.arange(len(ids_BT)), mask_BT.sum(1) - 1
        return [x[examples, last] @ copy["score.weight"].t() for x, copy in zip(streams, self.copies, strict=True)]

    def _normed(self, streams: Tensors, norm: str) -> list[Tensor]:
        return [
            functional.layer_norm(x, x.shape[-1:], copy[f"{norm}.weight"], copy[f"{norm}.bias"], 1e-5)
            for x, copy in zip(streams, self.copies, strict=True)
        ]

    def _attention(self, x_BTD: Tensor, shard: dict[str, Tensor], prefix: str, mask_BT: Tensor) -> Tensor:
        heads = self.config.n_head // self.ranks.size
        weight_DPF, bias_PF = shard[f"{prefix}.c_attn.weight"], shard[f"{prefix}.c_attn.bias"]
        q, k, v = ((x_BTD @ weight_DPF[:, i] + bias_PF[i]).unflatten(-1, (heads, -1)).transpose(1, 2) for i in range(3))
        tokens = x_BTD.shape[1]
        visible = torch.ones(tokens, tokens, dtype=torch.bool).tril() & mask_BT.bool()[:, None, None, :]
        scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).masked_fill(~visible, -math.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ shard[f"{prefix}.c_proj.weight"]

    def _mlp(self, x_BTD: Tensor, shard: dict[str, Tensor], prefix: str, _: Tensor) -> Tensor:
        h = x_BTD @ shard[f"{prefix}.c_fc.weight"][:, 0] + shard[f"{prefix}.c_fc.bias"][0]
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return h @ shard[f"{prefix}.c_proj.weight"]


def training_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """As transformers computes it, but for the cast of a language model's logits to fp32."""
    labels = batch["labels"]
    if logits.ndim == 3:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return functional.cross_entropy(logits, labels)
