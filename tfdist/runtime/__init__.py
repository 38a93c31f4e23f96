"""The runtime package: the only code that uses tf.distribute, Horovod or raw collectives."""
