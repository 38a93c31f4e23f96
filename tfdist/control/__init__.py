"""Control room: who is in the cluster, starting and stopping. No TensorFlow import."""
