"""Training on parameter servers: the workers' computations, the placement of variables, the loop that assigns
batches."""
