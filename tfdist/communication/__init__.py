"""How fast the workers of a cluster exchange data: measured, fitted, shown. What `python -m tfdist.comm` calls."""
