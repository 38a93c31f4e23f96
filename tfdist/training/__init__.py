"""Training room: precision, schedule, optimizer, the step and the loop."""
