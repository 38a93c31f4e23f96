"""Starts the workers of a job, on this machine or on Ray, watches them, and starts them again. No TensorFlow."""
