"""Pretraining of small GPT-2s on running text, for fine-tuning to start from."""
