"""tfdist: a distributed trainer for Keras 3 models on TensorFlow. Importing it imports no TensorFlow."""

__version__ = "0.1.0"
