"""Data sources: one file each. source_names.py lists them; source_facts.py has what is known before one is opened."""
