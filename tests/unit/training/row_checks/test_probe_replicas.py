"""A trial of a model under a strategy of TensorFlow's asks nobody: not all workers try the same."""

import subprocess
import sys

import pytest

from tests.e2e.job import ENVIRONMENT

PROGRAM = """
import keras, numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from tests.unit.training.test_unsaved_state_checks import Counts
from tfdist.compat.tensorflow_graphs import captured_by
from tfdist.training.row_checks.model_probe import Conditions, Probe
rows = np.ones([4, 6], "float32")
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    model = keras.Sequential([keras.Input((6,)), Counts()])
    probe = Probe(model, rows, lambda x, places: x[places], 4)
    with probe.watching():
        call = tf.function(lambda: probe.outputs(rows, [], Conditions(True)), autograph=False).get_concrete_function()
print([str(each) for each in captured_by(call.graph) if "total" in str(each)])
"""


@pytest.mark.usefixtures("warm_start")
def test_a_metric_in_a_layer_is_read_here(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(script)], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
