"""What runs on GPUs has kernels there, and launches its collectives in one order; looked up without a GPU."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gpu import graph_audit
from tests.gpu.combinations import COMBINATIONS, IMAGES, of_evaluation, of_training, waits_of_training
from tests.gpu.graph_audit import Audit, audit
from tests.gpu.launch_order import problems
from tests.gpu.mesh_reports import of_fits, of_meshes
from tests.gpu.xla_lowering import lowered
from tfdist.runtime.launch_order import Launch


@pytest.mark.parametrize(
    "name",
    [
        "cnn, float16, accumulation, clipping",
        pytest.param("transformer, bfloat16, plain", marks=pytest.mark.slow),
        pytest.param("experts, float32, plain", marks=pytest.mark.slow),
    ],
)
def test_a_step_has_kernels_for_gpus(name):
    found = of_training(COMBINATIONS[name])
    assert found.operations > 500 and not found.findings, found.findings
    assert set(found.on_host) <= {"Timestamp", "Cast", "Sum"}, (
        found.on_host
    )  # the clock, and one element that it waits for


# Without dropout: TensorFlow's generators want their seeds in the host's memory, once a step.
@pytest.mark.parametrize(
    "command_line",
    [
        (*IMAGES, "--model=cnn", "--precision=bfloat16"),
        (*IMAGES, "--model=mlp", "--nojit_compile", "--phase_every=0"),
        pytest.param((*IMAGES, "--model=cnn", "--nojit_compile", "--accumulation=2"), marks=pytest.mark.slow),
    ],
)
def test_a_step_does_not_wait_for_the_gpu(command_line):
    assert not waits_of_training(command_line)


def test_what_waits_for_the_gpu_is_found():
    def function(x):
        def body(i, y):
            y = tf.cond(tf.reduce_sum(y) > 0, lambda: y + 1, lambda: y)
            with tf.control_dependencies([y]), tf.device("CPU:0"):
                now = tf.timestamp()
            y = tf.reshape(y, tf.cast(y[0, :2], tf.int32))
            return i + 1, tf.ensure_shape(y, x.shape) + tf.cast(now, tf.float32)

        return tf.while_loop(lambda i, _: i < 3, body, (tf.constant(0), x))

    with tf.device("GPU:0"):
        traced = tf.function(function, autograph=False).get_concrete_function(LARGE)
    found = [line.split()[0] for line in graph_audit.waits(traced)]
    assert found == ["StatelessIf", "Timestamp", "Reshape"], graph_audit.waits(traced)


def test_an_evaluation_has_kernels_for_gpus():
    assert of_evaluation(COMBINATIONS["mlp, float32, plain"]).findings == ()


@pytest.mark.parametrize("name", ["cnn, float16, plain", "transformer, bfloat16, plain"])
def test_xla_lowers_a_model_for_gpus(name):
    found = lowered(COMBINATIONS[name])
    assert found["dot"] + found["convolution"] >= 9, found


def test_what_xla_cannot_lower_is_found():
    text = "tests.gpu.xla_lowering:through_text"
    with pytest.raises(ValueError, match="AsString"):
        lowered((*IMAGES, f"--model={text}"))


def _of(function, *arguments) -> Audit:
    with tf.device("GPU:0"):
        return audit(tf.function(function, autograph=False).get_concrete_function(*arguments))


LARGE = tf.TensorSpec([256, 256])


def _through_text(x):
    return [tf.ensure_shape(tf.strings.to_number(tf.strings.as_string(x)), x.shape)]


def _pinned(x):
    with tf.device("CPU:0"):
        return x + 1


def _summed_over_workers(x):
    keys = {"group_size": 2, "group_key": 1, "instance_key": 1, "ordering_token": []}
    return tf.raw_ops.CollectiveReduceV2(input=tf.cast(x, tf.int32), merge_op="Add", final_op="Id", **keys)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: tf.strings.length(tf.strings.as_string(x)), "no kernel: AsString"),
        (lambda x: tf.numpy_function(np.sin, [x], tf.float32), "Python: PyFunc"),
        (lambda x: tf.py_function(lambda y: y, [x], tf.float32), "Python: EagerPyFunc"),
        (lambda x: tf.cast(x, tf.float64), "large in float64: Cast"),
        (lambda x: tf.reshape(x, tf.cast(tf.reshape(x, [-1]), tf.int32)), "large on the host: Reshape"),
        (lambda x: tf.while_loop(lambda y: True, _through_text, [x]), "no kernel: AsString"),
        (_pinned, "large on the CPU: AddV2"),
        (_summed_over_workers, "no kernel: CollectiveReduceV2"),
    ],
)
def test_what_would_not_run_on_a_gpu_is_found(function, words):
    assert any(words in str(finding) for finding in _of(function, LARGE).findings), _of(function, LARGE)


def test_what_runs_on_a_gpu_is_not_reported():
    assert _of(lambda x: tf.nn.relu(x @ x), LARGE).findings == ()


@pytest.mark.thorough
@pytest.mark.usefixtures("warm_start")
def test_collectives_of_meshes_have_one_order_and_kernels(tmp_path):
    rows = ["pipe2_interleaved", "expert2_zero3_recompute"]
    reports = of_meshes(2, tmp_path, rows)
    assert sorted(reports) == sorted(rows)
    for report in reports.values():
        assert len(report.launches[0]) > 3 and list(problems(report.launches)) == []
        assert [audit.findings for audit in report.audits] == [(), ()]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_steps_of_fit_have_one_order_and_kernels(tmp_path):
    rows = ["cnn, mixed_float16", "text, float32", "own rows, float32"]
    reports = of_fits(2, tmp_path, rows)
    assert sorted(reports) == sorted(rows)
    for report in reports.values():  # rows are gathered, gradients reduced, results of rows gathered
        assert [launch.kind for launch in report.launches[0]].count("all_gather") >= 2, report.launches
        assert "all_reduce" in {launch.kind for launch in report.launches[0]}
        assert list(problems(report.launches)) == []
        assert [audit.findings for audit in report.audits] == [(), ()]


def test_an_order_that_suits_nobody_is_found():
    pair, other = Launch(1, 1, (0, 1), "all_reduce"), Launch(2, 1, (0, 1), "all_gather")
    assert list(problems({0: [pair, other], 1: [pair, other]})) == []
    (said,) = problems({0: [pair, other], 1: [other, pair]})
    assert "no order suits all ranks" in said
    third = Launch(3, 1, (1, 2), "all_reduce")
    fourth = Launch(4, 1, (0, 2), "all_reduce")
    assert list(problems({0: [fourth, pair], 1: [pair, third], 2: [third, fourth]}))  # round three ranks
    assert "never launch" in next(problems({0: [pair], 1: []}))
    assert "on another" in next(problems({0: [pair], 1: [pair._replace(kind="broadcast")]}))
