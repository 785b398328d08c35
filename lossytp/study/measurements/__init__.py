"""Measure links, collectives and transports, which needs no training."""
