"""Data sources: one file each, their names in source_names.py; what is known of them unopened in source_facts.py."""
