"""Where operations go that no GPU can run, and where batches wait for a GPU."""

from unittest import mock

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tfdist import flags
from tfdist.runtime.environment import prepare_environment


@pytest.mark.parametrize(
    ("gpus", "given", "soft"), [(1, "", True), (1, "--nosoft_placement", False), (0, "--nosoft_placement", True)]
)
def test_soft_placement_is_as_asked_on_gpus_and_host_memory_pinned(gpus, given, soft, monkeypatch):
    monkeypatch.delenv("TF_GPU_HOST_MEM_LIMIT_IN_MB", raising=False)
    monkeypatch.setattr(context.context(), "_config", None)
    config = flags.parse(["--steps=1", *filter(None, [given])]).config
    before = tf.config.get_soft_device_placement()
    assert before
    try:
        with (
            mock.patch.object(tf.config, "list_physical_devices", lambda kind: ["a GPU"] * gpus),
            mock.patch.object(tf.config.experimental, "set_memory_growth"),
        ):
            prepare_environment(config)
        assert tf.config.get_soft_device_placement() is soft
        assert context.context().config.gpu_options.force_gpu_compatible is bool(gpus)
    finally:
        tf.config.set_soft_device_placement(before)
