"""Measure a real link: numbered datagrams over UDP, what became of them, and the file that keeps it."""
