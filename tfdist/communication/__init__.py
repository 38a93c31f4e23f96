"""Measures how fast workers of a cluster exchange data, fits models, and shows both. Used by `python -m
tfdist.comm`."""
