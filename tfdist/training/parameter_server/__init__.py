"""Training on parameter servers: what workers compute, where variables live, and the loop that hands out batches."""
