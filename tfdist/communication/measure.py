"""Times the collectives of a runtime over sizes, as NVIDIA's nccl-tests do.

| collective     | S, the size in bytes, is that of     | bus bandwidth / algorithm bandwidth |
|----------------|--------------------------------------|-------------------------------------|
| all_reduce     | the vector                           | 2 (n-1)/n                           |
| all_gather     | the result, all parts together       | (n-1)/n                             |
| reduce_scatter | what each rank puts in               | (n-1)/n                             |
| all_to_all     | what each rank puts in               | (n-1)/n                             |
| broadcast      | the vector                           | 1                                   |

Algorithm bandwidth is S / time; bus bandwidth is what the slowest link carries if the algorithm wastes nothing.
Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfdist.runtime import operations
from tfdist.runtime.base import Runtime

BUS_FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}
_ROUNDS_SECONDS = 0.1  # of one measurement: as many rounds as fit
_MOST_ROUNDS = 200


@dataclass(frozen=True)
class Measurement:
    """One collective at one size."""

    collective: str
    workers: int
    size: int  # bytes, see above
    seconds: float  # median over repeats, of a round; of each repeat the slowest worker counts

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes a second."""
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second."""
        return self.algorithm_bandwidth * BUS_FACTOR[self.collective](self.workers)


def measure(runtime: Runtime, names: Sequence[str], sizes: Sequence[int], repeats: int) -> list[Measurement]:
    """Measurements of those of the named collectives that the runtime has. Called by every worker in the same way.

    All sizes take turns, `repeats` times, so that a slow minute of the machine does not fall on one of them alone.
    """
    found = []
    for name in names:
        runs = [(size, run) for size in sizes if (run := _prepare(runtime, name, _elements(size, runtime.size))) is not None]
        rounds = []
        for _, run in runs:
            run(2)  # traces, and opens connections
            rounds.append(_agreed_rounds(runtime, _timed(runtime, run, 3)))
        seconds = [[_timed(runtime, run, count) for (_, run), count in zip(runs, rounds, strict=True)] for _ in range(repeats)]
        slowest = runtime.all_gather(np.array(seconds, np.float64)).max(axis=0) if runs else []
        found += [Measurement(name, runtime.size, 4 * _elements(size, runtime.size), statistics.median(slowest[:, index])) for index, (size, _) in enumerate(runs)]
    return found


def _elements(size: int, workers: int) -> int:
    """float32 elements of about `size` bytes that can be divided among the workers."""
    return max(1, size // 4 // workers) * workers


def _agreed_rounds(runtime: Runtime, seconds: float) -> int:
    """How many rounds a measurement has: the chief decides."""
    seconds = float(runtime.broadcast([np.array([seconds], np.float64)])[0][0])
    return max(1, min(_MOST_ROUNDS, int(_ROUNDS_SECONDS / seconds)))


def _timed(runtime: Runtime, run: Callable[[int], None], rounds: int) -> float:
    """Seconds per round."""
    runtime.barrier()
    begin = time.perf_counter()
    run(rounds)
    return (time.perf_counter() - begin) / rounds


def _prepare(runtime: Runtime, name: str, elements: int) -> Callable[[int], None] | None:
    """A function that makes so many rounds of the collective, one after the other; None if the runtime has no such."""
    mine = elements // runtime.size if name == "all_gather" else elements
    on_host = operations.on_host(runtime).get(name)
    if on_host:
        array = np.ones(mine, np.float32)

        def run(rounds: int) -> None:
            for _ in range(rounds):
                on_host(array)

        return run
    operation = operations.in_graph(runtime).get(name)
    if operation is None:
        return None
    x = tf.ones([mine])

    def once(x: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([last]):  # so that rounds do not overlap
            return tf.reshape(operation(tf.identity(x)), [-1])[0]

    @tf.function
    def many(rounds: tf.Tensor) -> tf.Tensor:
        last = tf.constant(0.0)
        for _ in tf.range(rounds):
            last = runtime.local(runtime.run(once, (x, last)))[0]
        return last

    return lambda rounds: many(tf.constant(rounds)).numpy()
