"""Telemetry package: observers of training events. It receives values and never reaches back into the loop."""
