"""What a run needs and costs, from its configuration alone: memory, communication, time, reliability. No TensorFlow."""
