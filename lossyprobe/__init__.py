"""Measure the packet losses of a real network: `python -m lossyprobe`."""
