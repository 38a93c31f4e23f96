"""TensorFlow's collectives among some of the workers; tests/multi runs them between processes."""

import pytest

from tfdist.runtime.collectives import Group


@pytest.mark.parametrize("nccl", [False, True])
def test_members_meet_on_the_kind_of_device_on_which_tensors_are(nccl):
    """TensorFlow holds a group to it: on a GPU `communication="ring"`, which met there, lost its peers."""
    group = Group([0, 1], 0, tasks=["/job:worker/task:0", "/job:worker/task:1"], nccl=nccl)
    places = []
    group._all_reduce = lambda x, timeout: places.append(x.device)
    group.meet(1.0)
    assert [("CPU" in place) != nccl for place in places] == [True]  # what is not pinned lies on a GPU
