"""Artifacts: snapshots (policy, retention, writer, restore) and exports."""
