"""Collectives of our own between processes: over TCP, and through shared memory on one host."""
