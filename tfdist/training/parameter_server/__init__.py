"""Training on parameter servers: what workers compute, where variables are, and the loop that hands out batches."""
