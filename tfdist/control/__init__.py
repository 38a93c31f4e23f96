"""Control package: who is in the cluster, what ends a process and why. Imports no TensorFlow."""
