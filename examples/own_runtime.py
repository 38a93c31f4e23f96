r"""A custom strategy: a star of plain sockets. Workers send the data they exchange to the chief, which sends all of it
to everyone. The class implements the protocol in tfdist/runtime/base.py, and STAR says where the class is.

    source scripts/environment.sh && python -m tfdist.launch --workers=2 -- \
      --strategy=examples/own_runtime.py:STAR --source=digits --model=mlp --global_batch=64 --epochs=5 \
      --run_dir=runs/own_runtime

Expected, in half a minute on two cores: an accuracy of at least 0.9 in the evaluation at the end, and the same
losses in the log as with `--strategy=sockets`.
"""

from __future__ import annotations

import socket
import time

import numpy as np

from tfdist.config.strategies import Strategy
from tfdist.control.exit_codes import StartupError
from tfdist.runtime.single_replica import SingleReplica

# The launcher loads this file, too. So TensorFlow is imported inside functions, after tfdist has set it up.
STAR = Strategy("own_runtime:Star")


class Star(SingleReplica):
    """One replica in each process."""

    name = "star"
    sums_slices = False

    @classmethod
    def create(cls, config, cluster):
        return cls(cluster.rank, cluster.peers, time.monotonic() + config.cluster.startup_timeout)

    def __init__(self, rank, addresses, deadline):
        self.rank = self.first_replica = rank
        self.size = self.replicas = len(addresses)
        self.last = None  # the previous operation in the graph that is being traced
        host, _, port = addresses[0].rpartition(":")
        if rank == 0:
            with socket.create_server((host, int(port)), reuse_port=True) as server:
                server.settimeout(deadline - time.monotonic())
                found = {}
                while len(found) < self.size - 1:
                    connection, _ = server.accept()
                    if hello := _first_byte(connection):  # a probe sends nothing
                        connection.sendall(hello)
                        found[hello[0]] = connection
            self.others = [found[rank] for rank in range(1, self.size)]
        else:
            self.others = [_reached(host, int(port), bytes([rank]), deadline)]
        for connection in self.others:
            connection.settimeout(60)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # otherwise each small message waits 40 ms

    def _exchange(self, data):
        """Returns everyone's bytes, in order of rank. A collective call."""
        if self.rank == 0:
            blocks = [data, *map(_receive, self.others)]
            for connection in self.others:
                for block in blocks:
                    _send(connection, block)
            return blocks
        _send(self.others[0], data)
        return [_receive(self.others[0]) for _ in range(self.size)]

    def _rows(self, x):
        """Returns everyone's tensors, [replicas, ...]. Exchanges happen in the order in which the graph was traced."""
        import tensorflow as tf

        graph = tf.compat.v1.get_default_graph()
        before = [self.last] if self.last is not None and self.last.graph is graph else []

        def exchanged(array):
            array = np.asarray(array)
            return np.stack(
                [np.frombuffer(b, array.dtype).reshape(array.shape) for b in self._exchange(array.tobytes())]
            )

        with tf.control_dependencies(before):
            rows = tf.numpy_function(exchanged, [x], x.dtype)
        self.last = rows.op
        return tf.ensure_shape(rows, [self.size, *x.shape])

    def scope(self):
        from tfdist.runtime.first_values import chiefs_first_values

        return chiefs_first_values(self)

    def all_reduce(self, tensors):
        import tensorflow as tf

        return [tf.reduce_sum(self._rows(tensor), 0) for tensor in tensors]

    def gather_row(self, row):
        import tensorflow as tf

        @tf.custom_gradient
        def gathered(row):
            return self._rows(row), lambda upstream: self.all_reduce([upstream])[0][self.rank]

        return gathered(row)

    def all_gather(self, array):
        array = np.asarray(array)
        return np.stack([np.frombuffer(b, array.dtype).reshape(array.shape) for b in self._exchange(array.tobytes())])

    def broadcast(self, arrays):
        return [self.all_gather(array)[0] for array in arrays]

    def barrier(self):
        self._exchange(b"")

    def close(self):
        self.barrier()
        for connection in self.others:
            connection.close()


def _first_byte(connection):
    connection.settimeout(5)
    try:
        return connection.recv(1)
    except OSError:
        return b""


def _reached(host, port, hello, deadline):
    """Returns the connection on which the chief has answered; another program that listens there does not answer."""
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((host, port))
            connection.sendall(hello)
            if _first_byte(connection) == hello:
                return connection
            connection.close()
        except OSError:
            pass
        time.sleep(0.05)
    raise StartupError(f"The chief at {host}:{port} does not answer: look at its log.")


def _send(connection, data):
    connection.sendall(len(data).to_bytes(8, "big") + data)


def _receive(connection):
    def exactly(length):
        data = bytearray()
        while len(data) < length:
            more = connection.recv(min(length - len(data), 1 << 20))
            if not more:
                raise ConnectionError("the other worker has gone")
            data += more
        return bytes(data)

    return exactly(int.from_bytes(exactly(8), "big"))
