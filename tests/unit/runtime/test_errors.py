"""TensorFlow's errors in our words."""

import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as framework_config

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import (
    ConfigError,
    DataError,
    ExitCode,
    MemoryShortError,
    PeerLostError,
    StartupError,
)
from tfdist.control.user_errors import failure
from tfdist.runtime.errors import cause, explain, explain_own_code
from tfdist.runtime.ring.ring_error import MARK

CLUSTER = Cluster("worker", 0, 0, 2, ("a:1", "b:2"), {"worker": ["a:1", "b:2"]})


@pytest.mark.parametrize(
    "error, kind, words",
    [
        (
            tf.errors.UnavailableError(
                None,
                None,
                "from /job:worker/replica:0/task:0: Connection reset by peer /job:worker/replica:0/task:1\nmore",
            ),
            PeerLostError,
            ["worker 1 (rank 1, b:2)", "Connection reset"],
        ),
        (
            tf.errors.DeadlineExceededError(None, None, "Collective has timed out during execution."),
            PeerLostError,
            ["--collective_timeout"],
        ),
        (
            tf.errors.DeadlineExceededError(
                None,
                None,
                "at node tfdist_all_gather_of_ranks_7_end (most recent call last):\nCollective has timed out waiting"
                " for other workers.\n [[{{node tfdist_all_reduce_of_ranks_0_1_10_end_3}}]]",
            ),
            PeerLostError,
            ["all_reduce of ranks 0, 1, 10 ", "--collective_timeout"],
        ),
        (tf.errors.InternalError(None, None, "Collective ops is aborted by: x"), PeerLostError, ["a peer"]),
        (
            tf.errors.InternalError(None, None, "Collective ops is aborted by: NCCL: invalid usage (run with NCCL_DE"),
            ConfigError,
            ["one worker for each GPU", "CUDA_VISIBLE_DEVICES"],
        ),
        (
            tf.errors.UnknownError(
                None, None, f"RingError: {MARK}lost contact with rank 1 (it closed the connection).\nTraceback"
            ),
            PeerLostError,
            ["lost contact with rank 1"],
        ),
        (
            tf.errors.ResourceExhaustedError(None, None, "run/export/x; No space left on device"),
            ConfigError,
            ["The disk is full: make room", "run/export/x"],
        ),
        (
            RuntimeError(f"Exception encountered when calling M.call().\n\n{MARK}DataError: Other batches.\nArguments"),
            DataError,
            ["Other batches."],
        ),
        (
            tf.errors.InvalidArgumentError(
                None, None, "Graph execution error:\nassertion failed: [tfdist: the model\\'s outputs do not.] [x] [8]"
            ),
            ConfigError,
            ["The model's outputs do not."],
        ),
        (
            tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[9]"),
            MemoryShortError,
            ["--micro_batch", "tfdist.fit: a smaller batch_size", "gradient_accumulation_steps", "shape[9]"],
        ),
        (MemoryError("1 PiB"), MemoryShortError, ["--micro_batch", "tfdist.fit: a smaller batch_size", "1 PiB"]),
        (
            tf.errors.InvalidArgumentError(
                None,
                None,
                "Cannot assign a device for operation model/AsString: Could not satisfy explicit device specification"
                " '/device:GPU:0' because no supported kernel for GPU devices is available.\nColocation Debug Info:",
            ),
            ConfigError,
            ["The operation model/AsString has no kernel for GPUs", "--nosoft_placement"],
        ),
        (
            tf.errors.InvalidArgumentError(
                None,
                None,
                "Detected unsupported operations when trying to compile graph __inference_step_11[_XlaMustCompile=true]"
                " on XLA_GPU_JIT: AsString (No registered 'AsString' OpKernel for XLA_GPU_JIT devices)\nat: ",
            ),
            ConfigError,
            ["XLA cannot compile the operation AsString", "--nojit_compile", "jit_compile=False"],
        ),
        (
            tf.errors.InvalidArgumentError(
                None,
                None,
                "Graph execution error:\nXLA compilation requires a fixed tensor list size. Set the max number.\nat: ",
            ),
            ConfigError,
            ["XLA cannot compile the step (XLA compilation requires a fixed tensor list size)", "--nojit_compile"],
        ),
        (
            tf.errors.InvalidArgumentError(None, None, "DataError: record 7 of x.tfrecord is damaged.\n stack"),
            DataError,
            ["record 7 of x.tfrecord is damaged."],
        ),
    ],
)
def test_explained(error, kind, words):
    told = explain(error, CLUSTER)
    assert type(told) is kind and all(word in str(told) for word in words) and "\n" not in str(told)


def test_what_is_not_known_stays_as_it_is():
    assert explain(KeyError("x"), CLUSTER) is None
    assert explain(tf.errors.InvalidArgumentError(None, None, "shapes"), CLUSTER) is None
    assert explain(tf.errors.UnavailableError(None, None, "alone"), Cluster()) is None
    assert PeerLostError.exit_code == ExitCode.PEER_LOST


def test_the_users_own_line_in_a_layer_that_is_called_for_the_first_time():
    class Wrong(keras.layers.Layer):
        def call(self, x):
            return x + missing  # noqa: F821

    try:
        Wrong()(tf.zeros([2]))
    except NameError as error:
        told = str(explain_own_code(error))
    assert "test_errors.py:" in told and "in call: NameError" in told and "'missing' is not defined" in told, told
    try:
        json.loads("{")
    except ValueError as error:
        assert explain_own_code(error.with_traceback(error.__traceback__.tb_next)) is None  # what is installed alone


def raises_in_a_generator():
    yield 1
    raise RuntimeError("the file is gone")


def told_by_tensorflow(generator):
    """The error of a dataset that reads it."""
    data = tf.data.Dataset.from_generator(generator, output_signature=tf.TensorSpec([], tf.int32))
    with pytest.raises(tf.errors.OpError) as raised:
        list(data)
    return raised.value


def test_the_users_own_line_where_tensorflow_called_it():
    for cluster in (Cluster(), CLUSTER):
        found = explain(told_by_tensorflow(raises_in_a_generator), cluster)
        assert (
            isinstance(found, DataError)
            and str(found).startswith("Your own function, called by TensorFlow, failed at ")
            and "\n" not in str(found)
        )
        assert "test_errors.py:" in str(found) and str(found).endswith(
            "in raises_in_a_generator: RuntimeError: the file is gone"
        )


def loses_its_server():
    yield 1
    raise ConnectionResetError("reset by storage")


def test_what_the_data_come_from_may_answer_again():
    found = explain(told_by_tensorflow(loses_its_server), CLUSTER)
    assert isinstance(found, StartupError) and "ConnectionResetError: reset by storage; this may be temporary" in str(
        found
    )
    reading = "{{function_node __wrapped__IteratorGetNext_output_types_1}} Error executing an HTTP request"
    for kind, expected in ((tf.errors.UnavailableError, StartupError), (tf.errors.NotFoundError, DataError)):
        assert type(explain(kind(None, None, reading), CLUSTER)) is expected


def rotten(number):
    def read(number):
        if int(number) == 1:
            raise ValueError("map 1 is rotten")
        return number

    return tf.numpy_function(read, [number], tf.int64)


def told_below(number):
    def read(number):
        if int(number) == 1:
            broken(number)
        return number

    return tf.numpy_function(read, [number], tf.int64)


@tf.autograph.experimental.do_not_convert
def broken(number):
    raise ValueError(f"map {number} is rotten")


@pytest.mark.parametrize(
    "function, words",
    [
        (rotten, r"failed in read: ValueError: map 1 is rotten"),
        (told_below, r"failed at \S+test_errors.py:\d+, in broken: ValueError: map 1 is rotten"),
    ],
)
def test_a_function_that_autograph_has_rewritten_is_named_without_its_passing_file(function, words):
    with pytest.raises(tf.errors.OpError) as raised:
        list(tf.data.Dataset.range(3).map(function))
    found = explain(raised.value, Cluster())
    assert isinstance(found, DataError)
    assert re.fullmatch(f"Your own function, called by TensorFlow, {words}", str(found)), found


def test_what_fails_in_tf_data_is_told_without_its_iterators():
    data = tf.data.Dataset.from_tensors("abc").map(tf.strings.to_number, num_parallel_calls=2).prefetch(1)
    with pytest.raises(tf.errors.OpError) as raised:
        list(data)
    found = explain(raised.value, Cluster())
    assert isinstance(found, DataError)
    words = "StringToNumberOp could not correctly convert string: abc"
    assert str(found) == f"The data cannot be read, check --source and --augment: {words}"
    assert failure(raised.value).endswith(f": InvalidArgumentError: {words}")


def test_a_batch_that_keras_cannot_read():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batches = ((np.zeros([4, 2]), np.zeros([4, 1])) if number < 2 else None for number in range(3))
    with pytest.raises(tf.errors.OpError) as raised:
        model.fit(batches, verbose=0)
    found = explain(raised.value, Cluster())
    assert isinstance(found, DataError) and str(found).startswith(
        "The data given to tfdist.fit cannot be read; each batch must be a tuple (x, y)"
    )
    assert str(found).endswith("Keras reports: ValueError: Structures don't have the same nested structure.")


def test_a_label_that_is_no_class():
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[1, -1], logits=tf.zeros([2, 4]))
    found = explain(raised.value, Cluster())
    assert isinstance(found, DataError) and str(found).startswith(
        "A label is -1, but the model has outputs for the classes 0 to 3: fix it"
    )


def test_a_label_that_is_no_class_where_operations_are_deterministic(monkeypatch):
    monkeypatch.setattr(framework_config, "is_op_determinism_enabled", lambda: True)
    loss = tf.function(tf.nn.sparse_softmax_cross_entropy_with_logits)
    for labels, wrong in (([1, -1], -1), ([[1, 2], [9, 0]], 9)):
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            loss(labels=tf.constant(labels), logits=tf.zeros([*np.shape(labels), 4]))
        found = explain(raised.value, Cluster())
        assert isinstance(found, DataError), raised.value
        assert str(found).startswith(f"A label is {wrong}, but the model has outputs for the classes 0 to 3: fix it")


def test_errors_of_tensorflows_own_stay():
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        tf.reshape(tf.zeros([3]), [4])
    assert explain(raised.value, Cluster()) is None


def test_an_operation_of_the_data_that_fails_in_the_loop_of_a_step():
    data = tf.data.Dataset.range(3).map(lambda i: tf.strings.length(tf.io.read_file("/missing/file.png")))
    steps = tf.function(
        lambda iterator: tf.while_loop(lambda i: i < 2, lambda i: i + next(iterator), [tf.constant(0)]), autograph=False
    )
    with pytest.raises(tf.errors.OpError) as raised:
        steps(iter(data))
    found = explain(raised.value, Cluster())
    assert isinstance(found, DataError) and str(found).startswith("The data cannot be read, check --source and --aug")
    assert str(found).endswith("/missing/file.png; No such file or directory")
    lost = tf.errors.CancelledError(None, None, "cancelled\n\t [[while/body/_1/while/IteratorGetNext]]")
    assert explain(lost, Cluster()) is None  # reading is cancelled when something else has failed


def test_of_a_record_that_does_not_fit_the_cause_alone():
    record = tf.train.Example().SerializeToString()
    features = {"label": tf.io.FixedLenFeature([], tf.int64)}
    for read in (
        lambda: tf.io.parse_example([record], features),
        lambda: list(
            tf.data.Dataset.from_tensors([record]).map(lambda records: tf.io.parse_example(records, features))
        ),
    ):
        with pytest.raises(tf.errors.OpError) as raised:
            read()
        sentence = "Feature: label (data type: int64) is required but could not be found."
        assert cause(str(raised.value)).endswith(sentence) and len(cause(str(raised.value))) < 120
        found = explain(raised.value, Cluster())
        assert (
            isinstance(found, DataError)
            and str(found).startswith("A record of the data cannot be read: ")
            and str(found).endswith(sentence)
        )
    assert cause("{{function_node __wrapped__Add_device_/job:localhost}} it is so [Op:Add] name: ") == "it is so"
    assert (
        cause("Graph execution error:\n\nDetected at node A defined at (most recent call last):\nthe cause")
        == "the cause"
    )
    where = (
        'Detected at node A defined at (most recent call last):\n  File "<frozen runpy>", line 198, in _run\n\n  File'
        ' "a b.py", line 1, in f\n\nthe cause'
    )
    assert cause(f"Graph execution error:\n\n{where}") == "the cause"
    assert cause("Detected at node A defined at (most recent call last):\n<stack traces unavailable>\nit") == "it"
    assert cause("") == ""


@pytest.mark.parametrize("how", ["lookup", "gradient"])
def test_a_row_that_is_not_there(how):
    """Of a table that a model looks up; XLA finds it in the gradient alone."""
    rows = tf.constant([[0, 12]])
    with pytest.raises(tf.errors.InvalidArgumentError) as found:
        if how == "lookup":
            tf.gather(tf.zeros([11, 2]), rows)
        else:
            tf.convert_to_tensor(tf.IndexedSlices(tf.ones([2, 3]), rows[0], tf.constant([11, 3])))
    error = explain(found.value, Cluster())
    assert isinstance(error, DataError)
    assert re.match(r"A row is looked up that does not exist \(\w+\[[\d,]+\] = 12 is .* \[0, 11\)\): fix", str(error))
