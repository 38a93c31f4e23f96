"""Models: one file each, a registry in registry.py."""
