"""Artifact plane: snapshots (policy, retention, writer, restore) and exports."""
