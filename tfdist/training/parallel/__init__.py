"""Parallelism beyond data parallelism: each a few lines over runtime/collectives.py."""
