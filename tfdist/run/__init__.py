"""A run from start to end: session, recovery, elastic groups, health, results."""
