"""Training plane: precision, schedule, optimizer, the step and the loop."""
