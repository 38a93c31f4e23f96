"""Times the collectives of a runtime over sizes, as NVIDIA's nccl-tests do (measurement.py defines sizes and
bandwidths).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdist.communication.measurement import Measurement
from tfdist.runtime.base import Runtime
from tfdist.runtime.operations import Collective

_MEASUREMENT_SECONDS = 0.1  # as many rounds as fit
_MOST_ROUNDS = 200
_ITEM = 4  # bytes of a float32

Run = Callable[[int], np.ndarray]  # runs so many rounds, one after another; returns the last result


def measure(
    runtime: Runtime, found: Mapping[str, Collective], sizes: Sequence[int], repeats: int, tell: Callable[[str], None]
) -> Iterator[list[Measurement]]:
    """Yields the measurements of one collective after another, in order of size. All workers must call it alike.

    All sizes take turns, `repeats` times, so that a slow minute of the machine does not fall on one size alone. The
    result at every size is checked once before.

    Args:
      found: name -> collective.
      sizes: bytes; rounded to sizes that can be divided among the members.
      tell: receives a line about what comes next.
    """
    n = runtime.size * runtime.local_replicas
    counts = sorted({max(1, size // _ITEM // n) * n for size in sizes})
    for place, (name, collective) in enumerate(found.items(), 1):
        tell(f"{name} ({place} of {len(found)}): {len(counts)} sizes are traced and checked")
        runs = [_prepare(runtime, name, collective, n, count) for count in counts]
        first = [_timed(runtime, run, 3) for run in runs]
        rounds = runtime.broadcast(
            [np.array([max(1, min(_MOST_ROUNDS, int(_MEASUREMENT_SECONDS / seconds))) for seconds in first])]
        )[0].tolist()
        expected = repeats * sum(count * seconds for count, seconds in zip(rounds, first, strict=True))
        tell(f"{name}: {repeats} measurements of each size, about {expected:.0f} s")
        seconds = [
            [_timed(runtime, run, count) for run, count in zip(runs, rounds, strict=True)] for _ in range(repeats)
        ]
        slowest = runtime.all_gather(np.array(seconds, np.float64)).max(axis=0)  # [repeats, sizes]
        yield [
            Measurement(name, n, count * _ITEM, statistics.median(slowest[:, index]))
            for index, count in enumerate(counts)
        ]


def _timed(runtime: Runtime, run: Run, rounds: int) -> float:
    """Seconds per round, after a barrier."""
    runtime.barrier()
    begin = time.perf_counter()
    run(rounds)
    return (time.perf_counter() - begin) / rounds


def _prepare(runtime: Runtime, name: str, collective: Collective, n: int, count: int) -> Run:
    """A collective at one size (`count` elements in all), traced, with its connections open and its result checked.

    Raises: RuntimeError if the result is wrong, which would be a bug in the runtime.
    """
    expected = _expected(name, n, count)
    mine = count // n if name == "all_gather" else count
    if collective.in_graph:
        run = _in_graph(runtime, collective.in_graph, mine, expected.size)
    else:
        assert collective.on_host
        run = _on_host(runtime, collective.on_host, mine)
    result = run(2)
    if not np.array_equal(result, expected):
        raise RuntimeError(f"{name} of {count} elements over {n} members gave {result}, not {expected}")
    return run


def _expected(name: str, n: int, count: int) -> np.ndarray:
    """The result if member i passes a vector of i + 1."""
    total, numbers = n * (n + 1) / 2, np.arange(1, n + 1, dtype=np.float32)
    return {
        "all_reduce": lambda: np.full(count, total, np.float32),
        "all_gather": lambda: np.repeat(numbers, count // n),
        "reduce_scatter": lambda: np.full(count // n, total, np.float32),
        "all_to_all": lambda: np.repeat(numbers, count // n),
        "broadcast": lambda: np.ones(count, np.float32),
    }[name]()


def _on_host(runtime: Runtime, collective: Callable[[np.ndarray], np.ndarray], mine: int) -> Run:
    array = np.full(mine, runtime.rank + 1, np.float32)

    def run(rounds: int) -> np.ndarray:
        for _ in range(rounds):
            result = collective(array)
        return result

    return run


def _in_graph(runtime: Runtime, collective: Callable[[tf.Tensor], tf.Tensor], mine: int, result_size: int) -> Run:
    """Runs the rounds as a loop within one graph, like training steps."""
    first = runtime.rank * runtime.local_replicas + 1
    x = runtime.per_replica([tf.fill([mine], float(first + index)) for index in range(runtime.local_replicas)])

    def collective_after(x: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([last]):  # rounds must not overlap
            return tf.ensure_shape(tf.reshape(collective(tf.identity(x)), [-1]), [result_size])

    @tf.function(autograph=False)
    def repeat(rounds: tf.Tensor) -> tf.Tensor:
        def next_round(count: tf.Tensor, last: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            copies = runtime.per_replica([last] * runtime.local_replicas)
            return count + 1, runtime.local(runtime.run(collective_after, (x, copies)))[0]

        return tf.while_loop(lambda count, _: count < rounds, next_round, (0, tf.zeros([result_size])))[1]

    def run(rounds: int) -> np.ndarray:
        return repeat(tf.constant(rounds)).numpy()

    return run
