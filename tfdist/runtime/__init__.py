"""Runtime room: the only code that touches tf.distribute, Horovod or raw collectives."""
