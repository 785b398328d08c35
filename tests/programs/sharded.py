"""Inference and gradients of a model that transformers shards."""

import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

sharded = DistributedConfig(tp_size=2)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=sharded, dtype=torch.float32)
tokens = torch.arange(96).view(4, 24) % 64
loss = model(input_ids=tokens, labels=tokens).loss
loss.backward()
generated = model.generate(tokens, max_new_tokens=4, do_sample=False)
print(loss.item().hex(), model.model.norm.weight.grad.sum().item().hex(), generated[:, 24:].tolist())
