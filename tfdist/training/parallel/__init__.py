"""Parallelism beyond data parallelism: each kind takes a few lines on top of runtime/collectives.py."""
