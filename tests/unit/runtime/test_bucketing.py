"""Which tensors travel together."""

from tfdist.runtime.bucketing import in_buckets


def test_from_the_last_up_to_the_bound():
    assert in_buckets([1, 2, 3, 4], 7) == [[3, 2], [1, 0]]
    assert in_buckets([1, 2, 3, 4], 0) == [[3], [2], [1], [0]]
    assert in_buckets([], 7) == []


def test_a_tensor_beyond_the_bound_travels_alone():
    assert in_buckets([1, 100, 1], 7) == [[2], [1], [0]]


def test_a_bucket_is_of_one_kind():
    assert in_buckets([1, 1, 1, 1], 7, ["a", "b", "b", "a"]) == [[3], [2, 1], [0]]


def test_aligned_tensors_fill_more():
    assert in_buckets([1, 1, 1], 6, align=4) == [[2, 1], [0]]
