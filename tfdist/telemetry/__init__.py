"""Telemetry room: observers of training events. Receives values; never reaches back into the loop."""
