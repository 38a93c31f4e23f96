"""TensorFlow's collectives among some of the workers; tests/multi runs them between processes."""

import contextlib
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist.runtime import collectives
from tfdist.runtime.collectives import Group


@pytest.mark.parametrize("nccl", [False, True])
def test_members_meet_where_all_else_travels(nccl, monkeypatch):
    """TensorFlow holds a group to the kind of device that it met on: on a GPU `communication="ring"` lost its peers.
    And a place must be named with its task, as others in the cluster have a CPU, too."""
    group = Group([0, 1], 0, tasks=["/job:worker/replica:0/task:0", "/job:worker/replica:0/task:1"], nccl=nccl)
    places = []

    def noted(input, **_):
        places.append(tf.identity(input).device)
        return input

    for name in ("CollectiveReduceV2", "CollectiveGatherV2", "CollectiveAllToAllV2"):
        monkeypatch.setattr(tf.raw_ops, name, noted)
    monkeypatch.setattr(collectives, "ordering_token", lambda: SimpleNamespace(handle=None))

    def calls():
        for call in (group._all_reduce, group.all_gather, group.all_to_all):
            call(tf.ones([2, 3]))

    monkeypatch.setattr(tf, "function", lambda function, **_: function)  # the meeting, in the graph below
    with tf.Graph().as_default(), monkeypatch.context() as here:
        here.setattr(tf, "init_scope", contextlib.nullcontext)
        group.meet(1.0)
        calls()
    wanted = "" if nccl else "/job:worker/replica:0/task:0/device:CPU:0"
    assert len(places) == 4 and set(places) == {wanted}


@pytest.mark.parametrize("nccl", [False, True])
def test_where_the_order_of_a_sum_counts_no_collective_adds(nccl, monkeypatch):
    group = Group([0, 1, 2], 0, tasks=["a", "b", "c"], nccl=nccl).in_order
    monkeypatch.setattr(group, "_placed", contextlib.nullcontext)
    monkeypatch.setattr(collectives, "ordering_token", lambda: SimpleNamespace(handle=None))
    # The other members have the same.
    monkeypatch.setattr(tf.raw_ops, "CollectiveAllToAllV2", lambda input, **_: tf.stack([input[0]] * 3))
    monkeypatch.setattr(tf.raw_ops, "CollectiveGatherV2", lambda input, **_: tf.concat([input] * 3, 0))
    for name in ("CollectiveReduceV2", "CollectiveReduceScatterV2"):
        monkeypatch.setattr(tf.raw_ops, name, None)
    for dtype in (tf.float32, tf.bfloat16, tf.int32):
        found = group.all_reduce(tf.constant([[1, 2], [3, 4]], dtype))
        assert found.dtype == dtype and tf.cast(found, tf.int32).numpy().tolist() == [[3, 6], [3, 6]]
        assert tf.cast(group.reduce_scatter(tf.constant([1, 2, 3], dtype)), tf.int32).numpy().tolist() == [3]
