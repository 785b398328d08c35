"""A network whose losses are real: contributions cross UDP sockets, and what does not arrive is missing."""
