"""Where operations go that no GPU can run."""

from unittest import mock

import pytest
import tensorflow as tf

from tfdist import build, flags


@pytest.mark.parametrize(("gpus", "given", "soft"), [(1, "", False), (1, "--soft_placement", True), (0, "", True)])
def test_soft_placement_is_off_on_gpus(gpus, given, soft):
    config = flags.parse(["--steps=1", *filter(None, [given])]).config
    before = tf.config.get_soft_device_placement()
    assert before
    try:
        with (
            mock.patch.object(tf.config, "list_physical_devices", lambda kind: ["a GPU"] * gpus),
            mock.patch.object(tf.config.experimental, "set_memory_growth"),
        ):
            build.prepare_environment(config)
        assert tf.config.get_soft_device_placement() is soft
    finally:
        tf.config.set_soft_device_placement(before)
