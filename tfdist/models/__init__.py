"""Models: one file each, their names in model_names.py."""
