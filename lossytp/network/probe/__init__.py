"""Measure a real link with numbered UDP datagrams, and keep their fates in a file."""
