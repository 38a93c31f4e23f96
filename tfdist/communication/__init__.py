"""Measures how fast workers of a cluster exchange data, fits models, shows both. Used by `python -m tfdist.comm`."""
