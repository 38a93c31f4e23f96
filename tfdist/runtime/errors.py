"""Translates TensorFlow's errors into messages for the user."""

from __future__ import annotations

import re
from dataclasses import dataclass

import tensorflow as tf

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import (
    ConfigError,
    DataError,
    MemoryShortError,
    PeerLostError,
    StartupError,
    TfdistError,
)
from tfdist.control.passing_errors import reading_failed
from tfdist.control.user_errors import failure, failure_in_text, failure_of_own, said, what_in_text, without_internals
from tfdist.runtime import negative_weights
from tfdist.runtime.damaged_record import damaged_file
from tfdist.runtime.ring.ring_error import MARK, user_error

_PEER_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)

# Horovod's error for whatever ends its background threads, and Gloo's errors where they reach an operation.
_HOROVOD_DOWN = re.compile(r"Horovod has been shut down|gloo/.*(Connection|[Tt]imed? ?out|peer)")
# Messages of tfdist's own tf.debugging.assert_equal, and tfdist's errors raised in Python code that TensorFlow calls.
_OWN_ASSERTION = re.compile(r"\[tfdist: t(he [^\]]*\.)\]")
_ROW = re.compile(
    r"(indices|segment_ids)\[[\d, ]+\] = -?\d+ is (not in|out of range) \[0, \d+\)"
    r"|rows of table \S+ are not in \[0, \d+\)"
)
_OWN_ERRORS = {error.__name__: error for error in (ConfigError, DataError, StartupError)}
_OWN_ERROR = re.compile(rf"\b({'|'.join(_OWN_ERRORS)}): (.*)")
# The names that runtime/collectives.py gives its operations.
_GROUP = re.compile(r"tfdist_(?P<kind>\w+?)_of_ranks_(?P<ranks>\d\w*?)_end")


# Messages of tf.io.parse_example and the image decoders about a record.
_RECORD = re.compile(r"Key: \S+\.  |Feature: \S+ \(data type: |Unknown image file format|Could not parse example input")
# Marks an error of one of tf.data's steps.
_READING = re.compile(r"__wrapped__IteratorGetNext|Error in user-defined function passed to|\{\{node IteratorGetNext")
_READING_IN_STEP = re.compile(r"\[\[(?:\S*/)?IteratorGetNext\]\]")  # the same, in a step with a loop
_KERAS_DATA = re.compile(r"keras/src/trainers/data_adapters/\w+\.py")  # in a traceback of Python in tf.data
_LABEL = re.compile(r"Received a label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")
_LABEL_DETERMINISTIC = re.compile(  # the same, from the operations that TensorFlow uses if operations are deterministic
    r"indices\[[\d, ]*\] = (-?\d+) is not in \[0, (\d+)\)\s.*SparseSoftmaxCrossEntropyWithLogits/GatherV2"
)
_NOT_COMPILED = re.compile(r"Detected unsupported operations when trying to compile graph .*? on \S+: (\w+)")
_XLA_WANTS = re.compile(r"XLA compilation requires [^.\n]*|[^.\n]*must be a compile-time constant")
# Message of TensorFlow's placer (core/common_runtime/colocation_graph.cc) if soft placement is off.
_NO_KERNEL = re.compile(
    r"Cannot assign a device for operation (?:\{\{node )?([^\s:}]+).*no supported kernel for", re.DOTALL
)


@dataclass(frozen=True)
class BadLabel:
    """A label that is not one of the classes 0 to `classes` - 1."""

    value: int
    classes: int

    @property
    def sentence(self) -> str:
        return (
            f"A label is {self.value}, but the model has outputs for the classes 0 to {self.classes - 1}: fix it, give"
            " the model more outputs (tfdist's own: num_outputs in --model_args), or leave out the sample or token with"
            " a weight of 0 (and any valid label)."
        )


def bad_label(error: BaseException) -> BadLabel | None:
    """Returns the bad label if TensorFlow's error is about one, else None."""
    if not isinstance(error, tf.errors.InvalidArgumentError):
        return None
    found = _LABEL.search(str(error)) or _LABEL_DETERMINISTIC.search(str(error))
    return BadLabel(int(found[1]), int(found[2])) if found else None


def missing_row(error: BaseException) -> str:
    """Returns a sentence if TensorFlow's error is about a row that a table does not have, else ""."""
    found = _ROW.search(str(error)) if isinstance(error, tf.errors.OpError) else None
    if not found:
        return ""
    return (
        f"A row is looked up that does not exist ({found[0]}): fix the indices in the data, or give the table"
        " more rows."
    )


def message_of(error: tf.errors.OpError) -> str:
    """The message of TensorFlow's error, without its class."""
    return str(error.message)  # pyright: ignore[reportAttributeAccessIssue] - TensorFlow's types do not know it


def explain_own_code(error: BaseException) -> ConfigError | None:
    """Returns a ConfigError that names the failing line of the user's own code, as in a layer's first call, or None."""
    failure = "" if isinstance(error, (TfdistError, tf.errors.OpError)) else failure_of_own(error)
    return ConfigError(f"Your own code {failure}") if failure else None


def explain(error: BaseException, cluster: Cluster) -> TfdistError | None:
    """Returns the error as a sentence with its exit code, or None if the error is not a known one."""
    if not isinstance(error, (TfdistError, tf.errors.OpError)) and MARK in said(error):
        return user_error(said(error))  # Keras may have put words around it
    if isinstance(error, MemoryError):
        return MemoryShortError(
            "Out of memory: lower --micro_batch (tfdist.fit: a smaller batch_size), or keep less data in memory. Python"
            f" {failure(error)}"
        )
    if isinstance(error, TfdistError) or not isinstance(error, tf.errors.OpError):
        return None
    text = message_of(error)
    if _HOROVOD_DOWN.search(text):
        return PeerLostError(
            "Horovod stopped: a worker died, was silent for --heartbeat_timeout, or did not enter a collective within"
            " --collective_timeout. Look at the log of the worker that ended first, or has not ended, for the cause,"
            " then start all workers again."
        )
    if isinstance(error, tf.errors.ResourceExhaustedError) and "No space left on device" in text:
        return ConfigError(
            f"The disk is full: make room, or choose another --run_dir. TensorFlow reports: {cause(text)}"
        )
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return MemoryShortError(
            "Out of memory: lower --micro_batch (and raise --accumulation by as much), or use --precision=bfloat16"
            " (tfdist.fit: a smaller batch_size, with the optimizer's gradient_accumulation_steps raised by as much, or"
            f' keras.config.set_dtype_policy("mixed_bfloat16")). TensorFlow reports: {_first_line(text)}'
        )
    if MARK in text:
        return user_error(text)
    if sentence := negative_weights.sentence_of(text):
        return DataError(sentence)
    if found := _OWN_ASSERTION.search(text):
        return ConfigError(f"T{found[1]}".replace("\\'", "'"))
    if sentence := _refused_by_gpus(text):
        return ConfigError(sentence)
    if found := _OWN_ERROR.search(text):  # raised by a source inside tf.data
        return _OWN_ERRORS[found[1]](found[2])
    if isinstance(error, tf.errors.DataLossError) or _RECORD.search(text):
        where = damaged_file(text)
        return DataError(f"A record of the data cannot be read: {cause(text)}{'. ' if where else ''}{where}")
    if label := bad_label(error):
        return DataError(label.sentence)
    if sentence := missing_row(error):
        return DataError(sentence)
    if reason := failure_in_text(text):  # raised by the user's own code, inside tf.data or the step
        return reading_failed(f"Your own function, called by TensorFlow, {reason}", text)
    if _KERAS_DATA.search(text):
        return DataError(
            "The data given to tfdist.fit cannot be read; each batch must be a tuple (x, y) or (x, y, weights) of the"
            f" same structure and types. Keras reports: {without_internals(what_in_text(text))}"
        )
    # Reading is also cancelled when something else has failed.
    if _READING.search(text) or (_READING_IN_STEP.search(text) and not isinstance(error, _PEER_ERRORS)):
        passes = isinstance(error, (tf.errors.UnavailableError, tf.errors.DeadlineExceededError))
        return reading_failed(f"The data cannot be read, check --source and --augment: {cause(text)}", text, passes)
    if cluster.size > 1 and (isinstance(error, _PEER_ERRORS) or "ollective" in text):
        return _lost_peer(error, text, cluster)
    return None


def _refused_by_gpus(text: str) -> str:
    """A sentence about what XLA, TensorFlow or NCCL cannot do on these GPUs, with a fix; "" for other errors."""
    if found := _NOT_COMPILED.search(text):
        return (
            f"XLA cannot compile the operation {found[1]}: train with --nojit_compile (tfdist.fit: compile the model"
            " with jit_compile=False), remove jit_compile=True from your own functions, or replace it in the model or"
            " objective."
        )
    if found := _XLA_WANTS.search(text):
        return (
            f"XLA cannot compile the step ({found[0]}): train with --nojit_compile (tfdist.fit: compile the model with"
            " jit_compile=False)."
        )
    if found := _NO_KERNEL.search(text):
        return (
            f"The operation {found[1]} has no kernel for GPUs: replace it in the model or objective, place it on the"
            ' host with tf.device("CPU:0"), or let such operations run there: without --nosoft_placement.'
        )
    if "NCCL: invalid usage" in text:
        return (
            "NCCL rejects these GPUs, most often because two workers share one: start one worker for each GPU, with a"
            " different one in the CUDA_VISIBLE_DEVICES of each; or let them share it with --strategy=sockets"
            ' --communication=socket (tfdist.fit: tfdist.init(communication="socket")). TensorFlow reports:'
            f" {_first_line(text)}"
        )
    return ""


def _lost_peer(error: tf.errors.OpError, text: str, cluster: Cluster) -> PeerLostError:
    if isinstance(error, tf.errors.DeadlineExceededError) or "timed out" in text.lower():
        if group := _GROUP.search(text, text.lower().rfind("timed out") + 1):
            ranks = group["ranks"].replace("_to_", " to ").replace("_", ", ")
            return PeerLostError(
                f"The {group['kind']} of ranks {ranks} did not end within --collective_timeout, or one of them was"
                " silent for --heartbeat_timeout: it is stopped, stuck, much slower, or does not consider itself part"
                " of that group. Look at their logs, then start all workers again."
            )
        return PeerLostError(
            "A collective did not end within --collective_timeout: a peer is stuck or much slower, or the timeout is"
            f" shorter than its longest save or evaluation. TensorFlow reports: {_first_line(text)}"
        )
    return PeerLostError(
        f"Lost contact with {_peer(text, cluster)}: look at its log for the cause, then start all workers again."
        f" TensorFlow reports: {_first_line(text)}"
    )


def _peer(text: str, cluster: Cluster) -> str:
    """The first other task that TensorFlow's message names, as rank and address."""
    own_task = f"/job:{cluster.role}/replica:0/task:{cluster.index}"
    for role, index in re.findall(r"/job:(\w+)/replica:0/task:(\d+)", text):
        if (
            f"/job:{role}/replica:0/task:{index}" != own_task
            and role in cluster.spec
            and int(index) < len(cluster.spec[role])
        ):
            return cluster.name(cluster.peers.index(cluster.spec[role][int(index)]))
    return "a peer"


def _first_line(text: str) -> str:
    return cause(text)[:300] or "nothing"


_PLACE = re.compile(
    r"^Graph execution error:|^Detected at node .*|^<stack traces unavailable>|\[Op:\w+\].*$"
    r"|^\s*File \".*\", line \d+, in .*"
)


def cause(text: str) -> str:
    """The first line of TensorFlow's error text, without its own operations and devices."""
    text = re.sub(r"^(?:.*?Error in user-defined function passed to .*?: )", "", text.strip(), count=1, flags=re.DOTALL)
    lines = (without_internals(_PLACE.sub("", line)) for line in text.splitlines())
    return next(filter(None, lines), "")[:300]
