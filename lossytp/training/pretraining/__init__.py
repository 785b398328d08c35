"""Pretrain small decoders on running text, as a start for fine-tuning."""
