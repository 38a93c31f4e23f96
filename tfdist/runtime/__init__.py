"""Runtime plane: the only code that touches tf.distribute, Horovod or raw collectives."""
