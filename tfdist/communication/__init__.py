"""How fast workers of a cluster exchange data: measured, fitted, shown. Used by `python -m tfdist.comm`."""
