"""PEFT's LoRA on a model that transformers shards."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

torch.manual_seed(0)
sharded = DistributedConfig(tp_size=2)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=sharded, dtype=torch.float32)
model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
generator = torch.Generator().manual_seed(0)
for _ in range(4):
    tokens = torch.randint(0, 64, (4, 24), generator=generator)
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item().hex())
