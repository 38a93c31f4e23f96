"""Training package: precision, schedule, optimizer, the step and the loop."""
