"""Settings of TensorFlow that a worker makes before anything touches a device."""

from __future__ import annotations

import os

import tensorflow as tf

from tfdist.compat import tensorflow_devices
from tfdist.config import Config
from tfdist.control.exit_codes import ClusterError


def prepare_environment(config: Config) -> None:
    """Process-wide settings of TensorFlow; before anything touches a device."""
    tf.get_logger().setLevel("ERROR")  # its warnings are about retracing and packing, which are as meant
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        if (value := os.environ.get(name, "")) and not value.isdecimal():  # TensorFlow would abort
            raise ClusterError(f"{name}={value} in the environment is no number of threads: unset it, or mend it.")
    if config.cluster.intra_op_threads:
        tf.config.threading.set_intra_op_parallelism_threads(config.cluster.intra_op_threads)
    if config.cluster.inter_op_threads:
        tf.config.threading.set_inter_op_parallelism_threads(config.cluster.inter_op_threads)
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        _pin_host_memory()
        # TensorFlow's strategies ask for a GPU for all that a replica computes, and none holds text or int32 variables.
        tf.config.set_soft_device_placement(config.cluster.soft_placement)
    if config.run.deterministic:
        tf.config.experimental.enable_op_determinism()


def _pin_host_memory() -> None:
    """Batches lie where a GPU can read them by itself. Without it nothing could be launched there while one is copied:
    ResNet-50 on an H100 trained 3,640 images a second, and 4,950 with it.

    TensorFlow stops at 64 GB of such memory by itself, which a cache of tf.data may need more of: here all there is.
    """
    megabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    os.environ.setdefault("TF_GPU_HOST_MEM_LIMIT_IN_MB", str(megabytes))
    tensorflow_devices.pin_host_memory()
