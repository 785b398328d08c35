"""transformers' Trainer on a model of four virtual ranks, in each of its data-parallel processes."""

import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import lossytp as ltp

dense = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
reliable = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.0))
tokens = torch.randint(0, 64, (32, 24), generator=torch.Generator().manual_seed(0))
trainer = Trainer(
    model=ltp.parallelize(dense, reliable, tensor_parallel_size=2),
    args=TrainingArguments(
        output_dir=sys.argv[2],
        max_steps=4,
        per_device_train_batch_size=4,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
)
trainer.train()
print(*(float(entry["loss"]).hex() for entry in trainer.state.log_history if "loss" in entry))
