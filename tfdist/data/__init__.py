"""Data package: the order of samples as a pure function, sources, and the tf.data pipeline over both."""
