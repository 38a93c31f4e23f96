"""What workers of tf.distribute's strategies tell each other between steps."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.gpu.graph_audit import audit
from tfdist.config import StrategyConfig
from tfdist.runtime.mirrored import CARRIER, StrategyRuntime, communication_options


class _Alone(StrategyRuntime):
    """The first of two workers; the other adds zeros to whatever it says."""

    def __init__(self):
        super().__init__(tf.distribute.get_strategy(), communication_options(StrategyConfig()), rank=0, size=2)
        self.dtypes = set()
        self._sum_function = self._sum_with_zeros

    def _sum_with_zeros(self, words: tf.Tensor) -> tf.Tensor:
        self.dtypes.add(words.dtype)
        return words


def test_what_carries_them_can_be_summed_and_split_on_gpus():
    keys = {"group_size": 2, "group_key": 1, "instance_key": 1, "ordering_token": []}

    def all_reduce(words):  # as tf.distribute packs and unpacks it
        packed = tf.concat([tf.reshape(words, [-1])], 0)
        summed = tf.raw_ops.CollectiveReduceV2(input=packed, merge_op="Add", final_op="Id", **keys)
        return tf.reshape(tf.split(summed, [tf.size(words)])[0], tf.shape(words))

    with tf.device("GPU:0"):
        traced = tf.function(all_reduce, autograph=False).get_concrete_function(tf.TensorSpec([3], CARRIER))
    assert audit(traced).findings == ()


@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "int64", "float16", "float32", "float64"])
def test_arrays_of_any_type_are_summed_as_one_that_gpus_sum(dtype):
    runtime = _Alone()
    array = np.array([[1, 0, 3], [0, 1, 5]]).astype(dtype)
    gathered = runtime.all_gather(array)
    assert gathered.dtype == array.dtype
    np.testing.assert_array_equal(gathered, [array, np.zeros_like(array)])
    (told,) = runtime.broadcast([array])
    assert told.dtype == array.dtype
    np.testing.assert_array_equal(told, array)
    runtime.barrier()
    assert runtime.dtypes == {CARRIER}


def test_rows_of_tables_travel_under_numbers_that_gpus_pad():
    runtime, seen = _Alone(), []
    values, indices = tf.ones([2, 3]), tf.constant([4, 1], tf.int64)

    class Context:
        def all_reduce(self, _, tensors, options):
            seen.extend(tensors)
            return tensors

    slices = tf.IndexedSlices(values, indices, tf.constant([9, 3], tf.int64))
    with mock.patch.object(tf.distribute, "get_replica_context", Context):
        total, whole = runtime.all_reduce([slices, values])
    assert [each.indices.dtype for each in seen if isinstance(each, tf.IndexedSlices)] == [tf.int32]
    assert total.indices.dtype == tf.int64 and total.dense_shape is slices.dense_shape
    np.testing.assert_array_equal(total.indices, indices)
    np.testing.assert_array_equal(whole, values)
