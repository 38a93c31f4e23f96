"""Control package: who is in the cluster, and starting and stopping its processes. Imports no TensorFlow."""
