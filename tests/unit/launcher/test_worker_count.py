"""How many workers there are to be."""

from tfdist.launcher.worker_count import WorkerCount


def test_a_rank_that_fails_twice_without_progress_is_left_out_and_tried_again_later():
    clock = [0.0]
    count = WorkerCount(3, 2, grow_after=100, now=lambda: clock[0])
    count.failed(1, progress=False)
    assert count.wanted() == 3
    count.failed(1, progress=False)
    assert count.wanted() == 2 and count.left_out == [1]
    clock[0] = 99.0
    assert count.wanted() == 2
    clock[0] = 100.0
    assert count.wanted() == 3 and count.left_out == []
    count.failed(1, progress=False)
    count.failed(1, progress=False)
    clock[0] = 299.0
    assert count.wanted() == 2  # the wait has doubled
    clock[0] = 300.0
    assert count.wanted() == 3


def test_who_is_left_out_is_told_by_its_place_in_the_whole_job():
    """Ranks change with the number of workers. The last one was left out, whoever had failed."""
    count = WorkerCount(4, 1)
    for rank, left_out in ((0, [0]), (1, [0, 2]), (0, [0, 1, 2])):
        count.failed(rank, progress=False)
        count.failed(rank, progress=False)
        assert count.left_out == left_out and count.wanted() == 4 - len(left_out)


def test_a_failure_before_the_job_grew_was_of_another_place():
    clock = [0.0]
    count = WorkerCount(3, 1, grow_after=60.0, now=lambda: clock[0])
    for _ in range(2):
        count.failed(0, progress=False)
    count.failed(1, progress=False)  # place 2
    clock[0] = 61.0
    assert count.wanted() == 3
    count.failed(1, progress=False)  # place 1
    assert count.wanted() == 3


def test_progress_other_ranks_and_the_least_number_keep_it():
    count = WorkerCount(3, 2)
    for rank, progress in ((1, False), (1, True), (2, False), (1, False), (None, False), (None, False)):
        count.failed(rank, progress)
    assert count.wanted() == 3
    for _ in range(9):
        count.failed(0, False)
    assert count.wanted() == 2
    always = WorkerCount(3, 0)
    for _ in range(9):
        always.failed(0, False)
    assert always.wanted() == 3


def test_a_job_has_only_numbers_of_workers_that_fit():
    """A mesh with pipe=2 has two, four, ..."""
    even = {"fits": lambda count: count % 2 == 0}
    count = WorkerCount(6, 3, **even)
    for _ in range(6):
        count.failed(1, progress=False)
    assert count.wanted() == 4  # 3 is allowed, but does not fit
    assert count.left_out == [1, 5]
    count = WorkerCount(2, 1, **even)
    count.failed(1, progress=False)
    count.failed(1, progress=False)
    assert count.wanted() == 2
    assert WorkerCount(6, 1, discover="echo 5", **even).ask() == 4
    assert WorkerCount(6, 1, discover="echo 1", **even).ask() == 6  # too few: what was known stays


def test_discover_decides(tmp_path):
    room = tmp_path / "room"
    room.write_text("2\n")
    clock = [0.0]
    count = WorkerCount(4, 1, discover=f"cat {room}", now=lambda: clock[0])
    assert count.ask() == 2
    for text, expected in (("9", 4), ("0", 1), ("nonsense", 1), ("3", 3)):
        room.write_text(text)
        clock[0] += 10
        assert count.ask() == expected
    room.unlink()
    clock[0] += 10
    assert count.ask() == 3  # no answer: what was known stays


def test_wanted_does_not_wait_for_an_answer(tmp_path):
    """Which comes when it has returned."""
    returned = tmp_path / "returned"
    count = WorkerCount(4, 1, discover=f"for i in $(seq 200); do [ -e {returned} ] && echo 2 && break; sleep 0.1; done")
    assert count.wanted() == 4 and not count._asking.join(0) and count._asking.is_alive()
    returned.touch()
    assert count.ask() == 2
