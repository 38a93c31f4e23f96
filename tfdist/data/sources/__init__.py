"""Data sources: one file each, their names in source_names.py."""
