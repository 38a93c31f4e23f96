"""What a run needs and costs, by its configuration alone: memory, communication, time, reliability. No TensorFlow."""
