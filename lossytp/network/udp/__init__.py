"""Provide a network with real losses: contributions cross UDP sockets, and packets that do not arrive are missing."""
