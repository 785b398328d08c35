"""Pretrain small GPT-2s on running text, as a start for fine-tuning."""
