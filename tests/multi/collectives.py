"""Checks from inside what a Group must do: one process of tests/multi/test_collectives.py.

python -m tests.multi.collectives MESH        every group of a mesh, with TF_CONFIG
python -m tests.multi.collectives wrong       one rank is left out of the others' group
python -m tests.multi.collectives stuck       one rank stops coming
"""

from __future__ import annotations

import functools
import os
import sys


def check(runtime, axes: tuple[str, ...]) -> None:
    """Compares all collectives of the group along `axes`, and their gradients, with NumPy."""
    import numpy as np

    group = runtime.group(*axes)
    assert group.ranks == runtime.mesh.group(runtime.rank, *axes) and group.ranks[group.index] == runtime.rank
    n, me = group.size, group.index

    def of(
        rank: int, kind: int, shape, dtype="float32"
    ) -> np.ndarray:  # what a rank passes in; small whole numbers are exact in any type
        return np.random.default_rng([rank, kind]).integers(-8, 8, shape).astype(dtype)

    def stacked(kind: int, shape, dtype="float32") -> np.ndarray:
        return np.stack([of(rank, kind, shape, dtype) for rank in group.ranks])

    calls = [(group.all_reduce, 0, [3, 2], [3, 2])]
    for axis in (0, 1):
        whole = [3 * n, 2] if axis == 0 else [3, 2 * n]
        calls.append((lambda x, axis=axis: group.all_gather(x, axis), 2, [3, 2], whole))
        calls.append((lambda x, axis=axis: group.reduce_scatter(x, axis), 4, whole, [3, 2]))
    calls.append((group.all_to_all, 6, [n, 2, 2], [n, 2, 2]))
    calls += [(lambda x, root=root: group.broadcast(x, root), 8, [4], [4]) for root in group.ranks]
    found = iter(results_and_gradients(calls, lambda kind, shape: of(runtime.rank, kind, shape)))

    y, gradient = next(found)
    np.testing.assert_array_equal(y, stacked(0, [3, 2]).sum(0))
    np.testing.assert_array_equal(gradient, stacked(1, [3, 2]).sum(0))

    for axis in (0, 1):
        whole = [3 * n, 2] if axis == 0 else [3, 2 * n]
        y, gradient = next(found)
        np.testing.assert_array_equal(y, np.concatenate(list(stacked(2, [3, 2])), axis))
        np.testing.assert_array_equal(gradient, np.split(stacked(3, whole).sum(0), n, axis)[me])
        y, gradient = next(found)
        np.testing.assert_array_equal(y, np.split(stacked(4, whole).sum(0), n, axis)[me])
        np.testing.assert_array_equal(gradient, np.concatenate(list(stacked(5, [3, 2])), axis))

    y, gradient = next(found)
    np.testing.assert_array_equal(y, stacked(6, [n, 2, 2])[:, me])
    np.testing.assert_array_equal(gradient, stacked(7, [n, 2, 2])[:, me])

    for root in group.ranks:
        y, gradient = next(found)
        np.testing.assert_array_equal(y, of(root, 8, [4]))
        np.testing.assert_array_equal(gradient, stacked(9, [4]).sum(0) if root == runtime.rank else np.zeros(4))

    check_types(group, stacked, of, runtime.rank)
    check_order(group)
    if n > 1:
        check_points(group, of, runtime.rank)


def results_and_gradients(calls, of) -> list:
    """Returns (result, gradient) for each call (collective, kind, shape, shape of the result) at this rank's tensor,
    with upstream gradients of kind + 1. All are in one graph, because most of their cost is tracing.
    """
    import tensorflow as tf

    @tf.function(autograph=False)
    def function(xs, upstreams):
        results = []
        for (collective, *_), x, upstream in zip(calls, xs, upstreams, strict=True):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = collective(x)
            results.append((y, tape.gradient(y, x, upstream)))
        return results

    xs = [tf.constant(of(kind, shape)) for _, kind, shape, _ in calls]
    upstreams = [tf.constant(of(kind + 1, shape)) for _, kind, _, shape in calls]
    function(xs, upstreams)
    results = function(xs, upstreams)  # the second call uses the same keys again
    return [(y.numpy(), gradient.numpy()) for y, gradient in results]


def check_types(group, stacked, of, rank: int) -> None:
    import numpy as np
    import tensorflow as tf

    dtypes = ("float16", "bfloat16", "float32", "float64", "int32", "int64")

    @tf.function(autograph=False)
    def all_kinds(xs):
        return [
            (
                group.all_reduce(x),
                group.all_gather(x),
                group.all_to_all(tf.stack([x] * group.size)),
                group.broadcast(x, group.ranks[-1]),
                group.all_max(x),
            )
            for x in xs
        ]

    found = all_kinds([tf.cast(of(rank, 20, [5]), tf.as_dtype(dtype)) for dtype in dtypes])
    for dtype, results in zip(dtypes, found, strict=True):
        assert {y.dtype for y in results} == {tf.as_dtype(dtype)}
        summed, gathered, swapped, last, largest = (tf.cast(y, tf.float64).numpy() for y in results)
        np.testing.assert_array_equal(summed, stacked(20, [5]).sum(0), dtype)
        np.testing.assert_array_equal(gathered, stacked(20, [5]).ravel(), dtype)
        np.testing.assert_array_equal(swapped, stacked(20, [5]), dtype)
        np.testing.assert_array_equal(last, of(group.ranks[-1], 20, [5]), dtype)
        np.testing.assert_array_equal(largest, stacked(20, [5]).max(0), dtype)

    # Inside loops, as the training step uses them.
    def once(count, x):
        nothing = tf.reduce_sum(group.reduce_scatter(tf.concat([x] * group.size, 0))) * 0
        return count + 1, group.all_reduce(x) / group.size + nothing

    @tf.function(autograph=False)
    def repeated(x, times):
        return tf.while_loop(lambda count, _: count < times, once, (0, x))[1]

    np.testing.assert_allclose(
        repeated(tf.constant(of(rank, 21, [5])), tf.constant(7)), stacked(21, [5]).mean(0), rtol=1e-6
    )


def check_order(group) -> None:
    """Checks that `in_order` adds member after member in every place; TensorFlow begins each part of a tensor with
    another member."""
    import numpy as np
    import tensorflow as tf

    @tf.function(autograph=False)
    def sums(x):
        whole = group.in_order.all_reduce(x)
        return whole, group.in_order.reduce_scatter(tf.repeat(x[:, tf.newaxis], group.size, 1), 1)

    values = np.random.default_rng(22).normal(size=[group.size, 301]).astype("float32")
    for found in sums(values[group.index]):
        np.testing.assert_array_equal(np.ravel(found), functools.reduce(np.add, values))


def check_points(group, of, rank: int) -> None:
    """Sends x around the ring of ranks: each passes on 2 * (what it got). The gradient comes back the other way."""
    import numpy as np
    import tensorflow as tf

    before, after = group.ranks[group.index - 1], group.ranks[(group.index + 1) % group.size]
    first = group.index == 0

    @tf.function(autograph=False)
    def around(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            if first:
                sent = send(group, x, after)
                y = receive(group, before, x.shape, after=sent)
                loss = tf.reduce_sum(y * y) + sent
            else:
                loss = send(group, 2 * receive(group, before, x.shape, after=tf.reduce_sum(x) * 0), after)
        gradient = tape.gradient(loss, x, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return loss, gradient

    x = of(group.ranks[0], 30, [3])
    factor = 2.0 ** (group.size - 1)
    loss, gradient = around(tf.constant(x))
    if first:
        np.testing.assert_allclose(loss, np.sum((factor * x) ** 2))
        np.testing.assert_allclose(gradient, 2 * factor * factor * x)


def send(group, x, to: int):
    """Sends x to rank `to`. Returns float32 [] 0, whose gradient with respect to x is what `to` sends back."""
    import tensorflow as tf

    there, back = group.pair(group.rank, to), group.pair(to, group.rank)

    @tf.custom_gradient
    def sent(t):
        def gradient(upstream):
            with tf.control_dependencies([upstream]):  # it may trigger a send back of our own
                return back.put_or_take(None, to, t.shape, t.dtype)

        with tf.control_dependencies([there.put_or_take(t, group.rank, t.shape, t.dtype)]):
            return tf.constant(0.0), gradient

    return sent(x)


def receive(group, source: int, shape, after):
    """Receives what rank `source` sends, float32. `after`: any float tensor (for example the result of `send`), through
    which the gradient reaches this function."""
    import tensorflow as tf

    there, back = group.pair(source, group.rank), group.pair(group.rank, source)

    @tf.custom_gradient
    def received(anchor):
        def gradient(g):
            with tf.control_dependencies([back.put_or_take(g, group.rank, g.shape, g.dtype)]):
                return tf.identity(tf.zeros_like(anchor))  # the identity: zeros may be folded into a constant

        with tf.control_dependencies([anchor]):
            return there.put_or_take(None, source, shape, tf.float32), gradient

    return received(after)


def check_hierarchical(runtime) -> None:
    """Checks that the two-level sum and its gradient equal those of the flat all-reduce; uneven hosts are refused."""
    import numpy as np
    import pytest
    import tensorflow as tf

    from tfdist.control.exit_codes import ConfigError

    everyone = runtime.group_of(range(runtime.size))
    if runtime.size % 2:
        with pytest.raises(ConfigError, match="host 0 has 2, host 1 has 1"):
            runtime.hierarchical(everyone, 2)
    whole = runtime.size if runtime.size % 2 else 2
    for per_host, sizes in (
        (whole, (whole, runtime.size // whole)),
        (1, (1, runtime.size)),
        (0, (runtime.size, 1)),
    ):  # the addresses are those of one host
        two = runtime.hierarchical(everyone, per_host)
        assert (two.within.size, two.across.size) == sizes

        @tf.function(autograph=False)
        def both(xs, upstreams):
            results = []
            for x, upstream in zip(xs, upstreams, strict=True):
                for group in (everyone, two):  # noqa: B023
                    with tf.GradientTape() as tape:
                        tape.watch(x)
                        y = group.all_reduce(x)
                    results += [y, tape.gradient(y, x, upstream)]
            return results

        def drawn(kind):
            return [
                tf.constant(np.random.default_rng([runtime.rank, kind]).integers(-8, 8, shape).astype("float32"))
                for shape in ([5], [3, 2], [])
            ]

        inexact = tf.constant(np.random.default_rng([runtime.rank, 42]).normal(size=7), tf.float32)
        results = both([*drawn(40), inexact], [*drawn(41), tf.zeros_like(inexact)])
        for start in range(0, 12, 4):
            flat, flat_gradient, y, gradient = results[start : start + 4]
            np.testing.assert_array_equal(y, flat)
            np.testing.assert_array_equal(gradient, flat_gradient)
        flat, _, y, _ = results[12:]  # the order of the additions differs
        np.testing.assert_allclose(y, flat, rtol=1e-5, atol=1e-6)
        assert len({row.tobytes() for row in runtime.all_gather(y.numpy())}) == 1


def leave_one_out(runtime) -> None:
    """Ranks 0 and 1 take their group as one of three, rank 2 as one of two."""
    group = runtime.group_of((0, 1, 2) if runtime.rank < 2 else (1, 2))
    print("met", group.ranks, flush=True)


def get_stuck(runtime) -> None:
    """After the first step, rank 1 does not come back, though its process is alive."""
    import threading

    import tensorflow as tf

    @tf.function(autograph=False)
    def step(x):
        return runtime.run(lambda t: runtime.all_reduce([t]), (x,))

    print("step", step(tf.constant(1.0)), flush=True)
    if runtime.rank == 1:
        threading.Event().wait()
    print("next", step(tf.constant(1.0)), flush=True)


def count_threads(runtime) -> None:
    """Checks that collectives leave nothing behind that grows with their number."""
    import tensorflow as tf

    def step(count, x):
        return count + 1, runtime.run(lambda t: runtime.all_reduce([t / runtime.size]), (x,))[0]

    @tf.function(autograph=False)
    def steps(x, n):
        return tf.while_loop(lambda count, _: count < n, step, (0, x))[1]

    steps(tf.constant(1.0), tf.constant(10))
    before = len(os.listdir("/proc/self/task"))
    steps(tf.constant(1.0), tf.constant(300))
    assert len(os.listdir("/proc/self/task")) < before + 20


def main(argument: str) -> None:
    from tfdist import build
    from tfdist.config import Config
    from tfdist.control.exit_codes import TfdistError
    from tfdist.control.resolvers import resolve_cluster
    from tfdist.runtime.errors import explain

    fault = {"wrong": leave_one_out, "stuck": get_stuck}.get(argument)
    config = Config().replace(
        strategy="mesh", mesh="" if fault else argument, collective_timeout=4.0 if fault else 60.0, communication="ring"
    )
    cluster = resolve_cluster(os.environ)
    try:
        runtime = build.start_runtime(config, cluster)
        if fault:
            fault(runtime)
        else:
            for axes in dict(
                (runtime.mesh.groups(*axes)[0], axes)
                for axes in [("data",), ("model",), ("pipe",), ("expert",), ("data", "model")]
            ).values():
                check(runtime, axes)
            check_hierarchical(runtime)
            count_threads(runtime)
            runtime.close()
            print(f"collectives: rank {runtime.rank} of {runtime.mesh.describe()} is as it must be", flush=True)
    except Exception as error:
        told = error if isinstance(error, TfdistError) else explain(error, cluster)
        if told is None:
            raise
        print(f"tfdist: error: {told}", flush=True)
        os._exit(told.exit_code)


if __name__ == "__main__":
    main(sys.argv[1])
