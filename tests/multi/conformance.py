"""Checks from inside what every Runtime must do: one process of tests/multi/test_conformance.py.

python -m tests.multi.conformance [train flags]      with TF_CONFIG for more than one worker
"""

from __future__ import annotations

import os
import sys

from tfdist.config.strategies import Strategy


def check(runtime, strategy: Strategy) -> None:
    import keras
    import ml_dtypes
    import numpy as np
    import tensorflow as tf

    from tfdist.control.exit_codes import ConfigError
    from tfdist.data import input_pipeline
    from tfdist.runtime.host import own_devices
    from tfdist.training import seeds

    rank, size = runtime.rank, runtime.size
    assert (
        0 <= rank < size
        and runtime.replicas == size * runtime.local_replicas
        and runtime.first_replica == rank * runtime.local_replicas
    )

    # A process asks TensorFlow about its own devices only: of those of other processes it knows only the names.
    own, worker = own_devices("CPU"), tf.constant(0).device.rpartition("/device:")[0]
    assert len(own) == max(runtime.local_replicas, 1)
    assert all("/job:" not in name or name.startswith(f"{worker}/") for name in own)

    # Host collectives are exact for every type, bit for bit.
    for array in (
        np.array([rank, -1], "int64"),
        np.array([[-0.0, np.nan], [rank, 3e38]], "float32"),
        np.array([rank], ml_dtypes.bfloat16),
        np.array(rank, "float64"),
        np.array([True, rank > 0]),
        np.zeros([0, 3], "float32"),
        np.frombuffer(b"abc", np.uint8),
    ):
        gathered = runtime.all_gather(array)
        assert gathered.shape == (size, *array.shape) and gathered.dtype == array.dtype
        assert gathered[rank].tobytes() == array.tobytes()
    assert runtime.all_gather(np.array(rank)).tolist() == list(range(size))
    mine = [
        np.full([3, 5], rank - 0.0, "float32") * -1,
        np.array([rank + 7], "int8"),
        np.array(rank, ml_dtypes.bfloat16),
        np.arange(5_000_000, dtype="int32") + rank,
    ]
    chiefs = [
        np.full([3, 5], -0.0, "float32"),
        np.array([7], "int8"),
        np.array(0, ml_dtypes.bfloat16),
        np.arange(5_000_000, dtype="int32"),
    ]
    for received, expected in zip(runtime.broadcast(mine), chiefs, strict=True):
        assert received.dtype == expected.dtype and received.tobytes() == expected.tobytes()

    # All ranks get the chief's object, of any size.
    for value in ({"a": [1, 2.5, None]}, "ü" * 5, (), np.arange(3)):
        found = runtime.broadcast_object(value if rank == 0 else "x" * (100 * rank))
        assert repr(found) == repr(value), found

    # Every replica has its own index, and sums are over all replicas.
    @tf.function(autograph=False)
    def indices():
        return runtime.local(runtime.run(lambda: runtime.replica_id()))

    local = [int(index) for index in indices()]
    assert local == list(range(runtime.first_replica, runtime.first_replica + runtime.local_replicas))

    shapes = [(), (7,), (0,), (33, 65), (1,), (7,), (33, 65)]  # some occur twice, and must not be swapped

    def of_replica(index):
        return [
            np.random.default_rng([index, number]).normal(size=shape).astype("float32")
            for number, shape in enumerate(shapes)
        ]

    def once(count, values):
        return count + 1, runtime.run(lambda tensors: runtime.all_reduce(list(tensors)), (values,))

    @tf.function(autograph=False)
    def summed(n):
        values = runtime.per_replica(
            [
                [tf.constant(value) for value in of_replica(runtime.first_replica + index)]
                for index in range(runtime.local_replicas)
            ]
        )
        # An odd number of rounds, each on the sums before: tensors that are swapped twice are back in place.
        _, values = tf.while_loop(lambda count, _: count < n, once, (0, values))
        return runtime.local(values)

    expected = [
        runtime.replicas**2 * sum(parts)
        for parts in zip(*(map(np.float64, of_replica(index)) for index in range(runtime.replicas)), strict=True)
    ]
    for replica in summed(tf.constant(3)):
        for value, wanted in zip(replica, expected, strict=True):
            np.testing.assert_allclose(value.numpy(), wanted, rtol=1e-5, atol=1e-5)
            everywhere = runtime.all_gather(value.numpy())
            assert all(other.tobytes() == everywhere[0].tobytes() for other in everywhere)

    # bfloat16 is summed to its precision, float32 next to it stays exact, and all replicas get the same bits.
    def sums_of_both(tensors):
        sums = runtime.all_reduce(list(tensors))
        assert [value.dtype for value in sums] == [tf.bfloat16, tf.float32], "a sum has the type of its tensor"
        return [tf.cast(value, tf.float32) for value in sums]

    @tf.function(autograph=False)
    def small():
        values = runtime.per_replica(
            [
                (tf.constant(data[3], tf.bfloat16), tf.constant([2.0**20 + 1]))
                for data in (of_replica(runtime.first_replica + index) for index in range(runtime.local_replicas))
            ]
        )
        return runtime.local(runtime.run(sums_of_both, (values,)))

    if "bf16" in strategy.compression:
        wanted = sum(of_replica(index)[3] for index in range(runtime.replicas))
        for value, exact in small():
            assert exact.numpy().tolist() == [runtime.replicas * (2.0**20 + 1)]
            np.testing.assert_allclose(value.numpy(), wanted, rtol=0.01, atol=0.03 * runtime.replicas)
            everywhere = runtime.all_gather(value.numpy())
            assert all(other.tobytes() == everywhere[0].tobytes() for other in everywhere)

    # Each replica draws different numbers in a step, from a generator that is the same on all, and by tf.random, also
    # in a graph inside, and none occurs again.
    keras.utils.set_random_seed(5)
    with runtime.scope():
        generator = tf.random.Generator.from_seed(4)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])

    def of_replica():
        with seeds.drawing(model, runtime):
            inside = tf.cond(tf.random.uniform([]) >= 0, lambda: tf.random.normal([]), lambda: 0.0)
            return tf.stack([generator.normal([]), generator.normal([]), tf.random.normal([]), inside])

    numbers = tf.function(lambda: tf.stack(runtime.local(runtime.run(of_replica))), autograph=False)
    drawn = runtime.all_gather(np.stack([numbers().numpy() for _ in range(2)]))
    assert len(set(drawn.ravel().tolist())) == 8 * runtime.replicas, drawn

    # The sum of slices consists of the slices of all replicas. A mesh and parameter servers never get any.
    @tf.function(autograph=False)
    def gathered(values):
        return runtime.local(
            runtime.run(
                lambda value: runtime.all_reduce(
                    [
                        tf.ones([3]),
                        tf.IndexedSlices(value, tf.constant([7, 1]) + runtime.replica_id(), tf.constant([9, 4])),
                    ]
                ),
                (values,),
            )
        )

    if runtime.sums_slices:
        own = [tf.fill([2, 4], float(runtime.first_replica + index)) for index in range(runtime.local_replicas)]
        for ones, slices in gathered(runtime.per_replica(own)):
            assert ones.numpy().tolist() == [runtime.replicas] * 3
            rows = sorted(zip(slices.indices.numpy().tolist(), slices.values.numpy()[:, 3].tolist(), strict=True))
            assert rows == sorted((row + index, float(index)) for index in range(runtime.replicas) for row in (7, 1)), (
                rows
            )

    # gather_row gives the rows of all replicas, in one order, with the gradient of the sum of all replicas' losses.
    @tf.function(autograph=False)
    def rows(dtype):
        def of_replica():
            number = tf.cast(runtime.replica_id(), dtype)
            row = tf.stack([number, tf.constant(1.0, dtype)])
            with tf.GradientTape() as tape:
                tape.watch(row)
                found = runtime.gather_row(row)
                loss = (number + 1) * tf.reduce_sum(found[:, 0] * tf.range(runtime.replicas, dtype=dtype))
            return found, tape.gradient(loss, row)

        return runtime.local(runtime.run(of_replica))

    for dtype in (tf.float32, tf.float64):
        for index, (found, gradient) in enumerate(rows(dtype)):
            assert found.numpy().tolist() == [[replica, 1.0] for replica in range(runtime.replicas)], found
            wanted = sum(range(1, runtime.replicas + 1)) * (runtime.first_replica + index)
            assert gradient.numpy().tolist() == [wanted, 0.0], gradient

    # Every replica's copy of a variable can be given its own value.
    with runtime.scope():
        copies = tf.Variable([0.0, 0.0], trainable=False, aggregation=tf.VariableAggregation.MEAN)

    @tf.function(autograph=False)
    def assigned(values):
        runtime.assign(copies, values)
        return runtime.local(runtime.run(lambda: tf.identity(copies)))

    own = [tf.constant([0.1, float(runtime.first_replica + index)]) for index in range(runtime.local_replicas)]
    for found, wanted in zip(assigned(runtime.per_replica(own)), own, strict=True):
        assert found.numpy().tolist() == wanted.numpy().tolist(), (found, wanted)

    # On every replica, variables start with the chief's values, also those that are computed from other variables.
    with runtime.scope():
        variable = tf.Variable(np.full([4], rank, "float32"))
        twice = tf.Variable(tf.cast(2 * variable + 1, tf.bfloat16), trainable=False)
        count = tf.Variable(
            tf.constant(7 * rank, tf.int64),
            trainable=False,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
    for copies, wanted in ((variable, [0.0] * 4), (twice, [1.0] * 4), (count, 0)):
        for found in runtime.local(tf.function(lambda: runtime.run(copies.read_value), autograph=False)()):  # noqa: B023
            told = f"scope: rank {rank} has {found.numpy().tolist()} for the chief's {wanted}"
            assert found.numpy().tolist() == wanted, told

    # Batches that are prefetched to a device come from this worker, although it may know the devices of others, too.
    # (On GPUs, `batch_devices` has this done.)
    assert not runtime.batch_devices()
    own = runtime.strategy.extended.worker_devices if hasattr(runtime, "strategy") else ["/device:CPU:0"]
    assert len(own) == runtime.local_replicas
    for device in own:
        ahead = input_pipeline.ahead_on(
            tf.data.Dataset.range(3).map(lambda i: (10 * i + rank, tf.cast(i, tf.int32))), device
        )
        found = tf.function(lambda iterator: [next(iterator) for _ in range(3)], autograph=False)(iter(ahead))
        assert [(int(a), int(b)) for a, b in found] == [(10 * i + rank, i) for i in range(3)]

    # Workers that make different variables are all refused, also if one makes more of them than another.
    for count, dtype in ((1 + rank, tf.float32), (2, tf.float64 if rank else tf.float32)):
        refused = ""
        try:
            with runtime.scope():
                _ = [tf.Variable(0.0, dtype=dtype) for _ in range(count)]
        except ConfigError as error:
            refused = str(error)
        assert ("build the same model" in refused) == (size > 1), refused
    runtime.barrier()


if __name__ == "__main__":
    from tfdist import build
    from tfdist.config.strategies import strategy_named
    from tfdist.control.resolvers import resolve_cluster
    from tfdist.flags import parse
    from tfdist.runtime.factory import resolve_strategy

    config = parse(sys.argv[1:]).config
    cluster = resolve_cluster(os.environ)
    made = build.start_runtime(config, cluster)
    check(made, strategy_named(resolve_strategy(config, cluster)))
    print(f"conformance: {made.name} rank {made.rank} of {made.size} is as it must be", flush=True)
    made.close()
