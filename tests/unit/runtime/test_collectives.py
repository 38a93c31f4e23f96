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
