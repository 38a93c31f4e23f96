"""Which way tensors of plain processes take, from what each says of itself."""

import pytest

from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.peer_choice import Worker, choose

CPU, GPU = Worker("auto", False, False), Worker("auto", True, False)


@pytest.mark.parametrize(
    ("workers", "way", "words"),
    [
        ([CPU, CPU], "socket", ""),
        ([GPU, GPU], "nccl", ""),
        ([GPU, CPU, GPU], "socket", "rank 1 has no GPU"),
        ([GPU, GPU._replace(has_computed=True)], "socket", "call tfdist.init() before"),
        ([CPU._replace(has_computed=True)] * 2, "socket", ""),
        ([GPU._replace(asked="socket", has_computed=True)] * 2, "socket", ""),
        ([CPU._replace(asked="ring")] * 2, "ring", ""),
        ([GPU._replace(asked="nccl")] * 2, "nccl", ""),
    ],
)
def test_the_way(workers, way, words):
    found, remark = choose(workers)
    assert found == way and words in remark and bool(words) == bool(remark)


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ([CPU, CPU._replace(asked="ring")], "--communication=auto on rank 0, but --communication=ring on rank 1"),
        ([GPU._replace(asked="nccl"), CPU._replace(asked="nccl")], "rank 1 has no GPU"),
        ([CPU._replace(asked="ring"), CPU._replace(asked="ring", has_computed=True)], "call tfdist.init() before"),
        ([GPU._replace(asked="nccl", has_computed=True)] * 2, "on rank 0, 1 already"),
    ],
)
def test_what_is_refused(workers, words):
    with pytest.raises(ConfigError) as error:
        choose(workers)
    assert words in str(error.value)
