"""Artifacts room: snapshots (policy, retention, writer, restore) and exports."""
