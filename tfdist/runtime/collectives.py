"""Group: differentiable collective operations among some of the workers, for use inside a tf.function.

They are TensorFlow's own operations on the runtime that MultiWorkerMirroredStrategy starts: over gRPC on CPUs, NCCL on
GPUs. Every member of a group must trace the same calls on it in the same order: the n-th call of one member meets the
n-th call of the others. Members meet once when a group is made, so that a missing member, or one whose group has other
ranks, causes an error that names the ranks (errors.py). Later calls are watched by collective_timeout.py.

Gradients are those of the *sum of all members' losses* with respect to a member's own input:

    forward         backward            forward          backward
    all_reduce      all_reduce          all_to_all       all_to_all
    all_gather      reduce_scatter      broadcast        the sum at the root, 0 elsewhere
    reduce_scatter  all_gather

Legend. n: members of the group. Ranks are those of the whole cluster; a member's *index* is its place in the group.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.runtime.host import HOST, known_dims
from tfdist.runtime.launch_order import Launch, note, ordering_token
from tfdist.runtime.own_gradient import with_gradient

# Operations that only copy support few dtypes; other dtypes travel as one of the same width.
_CARRIED_AS = {
    tf.bfloat16: tf.float16,
    tf.float64: tf.int64,
    tf.uint16: tf.float16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
}
_FIRST_KEY = 2**30  # the strategy itself counts its groups from 1
# Number of calls traced so far, by group key: for TensorFlow, all Group objects of the same ranks are one group.
_calls: dict[int, itertools.count] = {}


class Group:
    """A group of ranks that communicate.

    Args:
      ranks: the members, in the order in which results are laid out.
      rank: this worker's rank, one of `ranks`.
      tasks: TensorFlow's name of each member ("/job:worker/replica:0/task:3"), in the order of `ranks`.
      nccl: whether members exchange tensors from GPU to GPU; otherwise through the memory of their hosts.
      salt: keeps groups of the same ranks apart.
    """

    def __init__(self, ranks: Sequence[int], rank: int, *, tasks: Sequence[str], nccl: bool = False, salt: str = ""):
        assert rank in ranks and len(ranks) == len(tasks)
        self.ranks, self.rank = tuple(ranks), rank
        self.size, self.index = len(self.ranks), self.ranks.index(rank)
        self._tasks, self.nccl = tuple(tasks), nccl
        self._key = _FIRST_KEY + zlib.crc32(f"{salt}{self.ranks}".encode()) % _FIRST_KEY
        self._instances = _calls.setdefault(self._key, itertools.count(1))
        # TensorFlow orders members by the *text* of their task: 0, 1, 10, 11, 2, ...
        order = sorted(range(self.size), key=lambda index: self._tasks[index])
        self._to_wire = None if order == list(range(self.size)) else order  # wire place -> index
        self._from_wire = self._to_wire and [order.index(index) for index in range(self.size)]
        self._pairs: dict[tuple[int, int, str], Group] = {}
        self.adds_in_order = False

    @functools.cached_property
    def in_order(self) -> Group:
        """The same group, whose sums add the members' numbers up in the order of the members, for every element.

        Otherwise the order depends on the place of an element in its tensor and on who the members are, so that two
        groups may get different last digits from the same numbers. As many bytes travel, in two operations.
        """
        if self.size <= 2:  # a + b is b + a
            return self
        other = copy.copy(self)  # counts its calls with this one
        other.adds_in_order = True
        return other

    def meet(self, timeout: float) -> None:
        """Returns when all members have called it.

        Raises tf.errors.DeadlineExceededError after `timeout` seconds; 0: waits forever.
        """

        def first_call() -> tf.Tensor:
            return self._all_reduce(tf.constant(1.0), timeout=timeout)

        if self.size > 1:
            with tf.init_scope():
                tf.function(first_call, autograph=False)()

    # -- collectives -----------------------------------------------------------------------------------------------

    def all_reduce(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the sum over members, bitwise the same on all. float16, bfloat16, float32, float64, int32, int64; the
        same shape on all.
        """
        return self._differentiable(self._sum, self._sum, x)

    def all_max(self, x: tf.Tensor) -> tf.Tensor:
        """The element-wise maximum over members; has no gradient."""
        return tf.stop_gradient(self._all_reduce(x, "Max"))

    def all_gather(self, x: tf.Tensor, axis: int = 0) -> tf.Tensor:
        """Concatenates the members' tensors, of one shape, in order along dim `axis`. [.., a, ..] -> [.., n * a, ..]"""
        return self._differentiable(lambda t: self._all_gather(t, axis), lambda t: self._reduce_scatter(t, axis), x)

    def all_gather_numbered(self, x: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        """Gathers along dim 0 a tensor whose shape is known only when the graph runs; has no gradient.

        TensorFlow requires a collective to keep the shape of its first run. number: int32 [], the number of this call,
        the same on all members; no other call of the group may have this number, so all of its calls must be numbered.
        """
        return tf.stop_gradient(self._all_gather(x, 0, number))

    def reduce_scatter(self, x: tf.Tensor, axis: int = 0) -> tf.Tensor:
        """Sums over members; returns this member's part along dim `axis`. [.., n * a, ..] -> [.., a, ..]"""
        return self._differentiable(lambda t: self._reduce_scatter(t, axis), lambda t: self._all_gather(t, axis), x)

    def all_to_all(self, x: tf.Tensor) -> tf.Tensor:
        """x: [n, ...], row i is for member i. Returns [n, ...], row i is from member i."""
        return self._differentiable(self._all_to_all, self._all_to_all, x)

    def broadcast(self, x: tf.Tensor, root: int) -> tf.Tensor:
        """Returns the tensor of rank `root`; the other ranks pass one of the same shape and dtype."""

        def back(gradient: tf.Tensor) -> tf.Tensor:
            total = self._sum(gradient)
            return total if self.rank == root else tf.zeros_like(total)

        return self._differentiable(lambda t: self._broadcast(t, root), back, x)

    # -- without gradients -----------------------------------------------------------------------------------------

    def _sum(self, x: tf.Tensor) -> tf.Tensor:
        if not self.adds_in_order:
            return self._all_reduce(x)
        size = math.prod(known_dims(x.shape))
        flat = tf.pad(tf.reshape(x, [-1]), [[0, -size % self.size]])
        return tf.reshape(self._all_gather(self._reduce_scatter(flat, 0), 0)[:size], x.shape)

    def _all_reduce(self, x: tf.Tensor, merge: str = "Add", timeout: float = 0.0) -> tf.Tensor:
        if self.size == 1:
            return x
        arguments = self._arguments("all_reduce") | {"timeout_seconds": timeout}
        with self._placed():
            return tf.raw_ops.CollectiveReduceV2(
                input=x, merge_op=merge, final_op="Id", **arguments, **self._ordering()
            )

    def _all_gather(self, x: tf.Tensor, axis: int, number: tf.Tensor | None = None) -> tf.Tensor:
        """The TensorFlow operation concatenates along dim 0."""
        if self.size == 1:
            return x
        carried = _carried(x[tf.newaxis])
        arguments = self._arguments("all_gather")
        if number is not None:
            arguments["instance_key"] = number
        with self._placed():
            rows = tf.raw_ops.CollectiveGatherV2(input=carried, **arguments, **self._ordering())
        rows = self._reordered(_uncarried(rows, x.dtype), self._from_wire)
        if axis == 0:
            return (
                tf.reshape(rows, tf.concat([[-1], tf.shape(x)[1:]], 0))
                if x.shape[1:].num_elements() is None
                else tf.reshape(rows, [-1, *x.shape[1:]])
            )
        return tf.concat(tf.unstack(rows, self.size), axis)

    def _reduce_scatter(self, x: tf.Tensor, axis: int) -> tf.Tensor:
        if self.size == 1:
            return x
        if axis == 0 and x.shape[0] is not None and x.shape[1:].is_fully_defined():
            rows = tf.reshape(x, [self.size, known_dims(x.shape)[0] // self.size, *x.shape[1:]])  # without a copy
        else:
            rows = tf.stack(tf.split(x, self.size, axis))  # [n, ...]
        if self.nccl and not self.adds_in_order:
            rows = self._reordered(rows, self._to_wire)
            shares = tf.raw_ops.CollectiveReduceScatterV2(
                input=rows, merge_op="Add", final_op="Id", **self._arguments("reduce_scatter"), **self._ordering()
            )
            return shares[0]
        rows = self._all_to_all(rows, "reduce_scatter")  # the operation above is for NCCL only, in an order of its own
        return _added_in_order(rows, self.size) if self.adds_in_order else tf.reduce_sum(rows, 0)

    def _all_to_all(self, x: tf.Tensor, kind: str = "all_to_all") -> tf.Tensor:
        if self.size == 1:
            return x
        carried = self._reordered(_carried(x), self._to_wire)
        with self._placed():
            rows = tf.raw_ops.CollectiveAllToAllV2(input=carried, **self._arguments(kind), **self._ordering())
        return self._reordered(_uncarried(rows, x.dtype), self._from_wire)

    def _broadcast(self, x: tf.Tensor, root: int) -> tf.Tensor:
        if self.size == 1:
            return x
        with tf.control_dependencies([x]):  # keep the dependencies of x even where its value is unused
            out = self.put_or_take(x if self.rank == root else None, root, x.shape, x.dtype)
        with tf.control_dependencies([out]):  # otherwise the send would be pruned
            return tf.identity(x) if self.rank == root else out

    def put_or_take(
        self, x: tf.Tensor | None, root: int, shape: tf.TensorShape | Sequence[int], dtype: tf.DType
    ) -> tf.Tensor:
        """The bare broadcast: the root sends x, the other ranks receive a tensor of static `shape`."""
        arguments = self._arguments("broadcast" if self.size > 2 else f"send_from_{root}")
        with self._after_the_others(), self._placed():
            if self.rank == root:
                assert x is not None
                return self._before_the_others(tf.raw_ops.CollectiveBcastSendV2(input=_carried(x), **arguments))
            wire = _CARRIED_AS.get(dtype, dtype)
            size = tf.constant(known_dims(tf.TensorShape(shape)), tf.int32)
            taken = self._before_the_others(tf.raw_ops.CollectiveBcastRecvV2(shape=size, T=wire, **arguments))
        return _uncarried(taken, dtype)

    # -- keys, order and names ---------------------------------------------------------------------------------------

    def _differentiable(self, forward: Callable, backward: Callable, x: tf.Tensor) -> tf.Tensor:
        return with_gradient(forward, backward, x)

    def _arguments(self, kind: str) -> dict:
        """The arguments that all operations take. The name appears in errors, and leads back to the ranks."""
        ranks = "_".join(map(str, self.ranks)) if self.size <= 64 else f"{self.ranks[0]}_to_{self.ranks[-1]}"
        number = next(self._instances)
        note(Launch(self._key, number, self.ranks, kind))
        return {
            "group_size": self.size,
            "group_key": self._key,
            "instance_key": number,
            "communication_hint": "nccl" if self.nccl else "auto",
            "name": f"tfdist_{kind}_of_ranks_{ranks}_end",
        }

    def _placed(self) -> contextlib.AbstractContextManager:
        """Context manager for the group's device: TensorFlow ties a group to the kind of device of its first call."""
        # The full name: a function's results must be in one place, and other tasks in the cluster have a CPU, too.
        return contextlib.nullcontext() if self.nccl else tf.device(f"{self._tasks[self.index]}/device:{HOST}")

    def _ordering(self) -> dict:
        return {"ordering_token": [ordering_token().handle] if self.nccl else []}

    def _after_the_others(self) -> contextlib.AbstractContextManager:
        """Context manager for operations that take no token: they wait for everything traced earlier with the token."""
        return tf.control_dependencies([ordering_token().assign(0.0)] if self.nccl else [])

    def _before_the_others(self, out: tf.Tensor) -> tf.Tensor:
        """Returns the same tensor; everything traced later with the token waits for it."""
        if not self.nccl:
            return out
        with tf.control_dependencies([out]), tf.control_dependencies([ordering_token().assign(0.0)]):
            return tf.identity(out)

    def _reordered(self, rows: tf.Tensor, order: list[int] | None) -> tf.Tensor:
        return rows if order is None else tf.gather(rows, order)

    def pair(self, source: int, to: int, salt: str = "") -> Group:
        """The group of two in which `source` sends to `to` with `put_or_take`.

        Calls are counted separately for each direction and salt.
        """
        if (source, to, salt) not in self._pairs:
            places = sorted((self.ranks.index(source), self.ranks.index(to)))
            self._pairs[source, to, salt] = Group(
                [self.ranks[place] for place in places],
                self.rank,
                tasks=[self._tasks[place] for place in places],
                nccl=self.nccl,
                salt=f"{self._key} {source} to {to} {salt} ",
            )
        return self._pairs[source, to, salt]


def _added_in_order(rows: tf.Tensor, n: int) -> tf.Tensor:
    """The sum over dim 0, of size n. (tf.reduce_sum may add another element in another order.)"""
    wide = tf.cast(rows, tf.float32) if rows.dtype in (tf.float16, tf.bfloat16) else rows
    return tf.cast(tf.add_n(tf.unstack(wide, n)), rows.dtype)


def _carried(x: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(x, _CARRIED_AS[x.dtype]) if x.dtype in _CARRIED_AS else x


def _uncarried(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.bitcast(x, dtype) if dtype in _CARRIED_AS else x
