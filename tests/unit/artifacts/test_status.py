"""tfdist/artifacts/status.py: whether a run has ended, for processes that have lost its chief."""

from __future__ import annotations

import time

from tfdist.artifacts.status import is_finished, when_written, write_status


def test_an_earlier_end_is_not_that_of_a_run_that_goes_on(tmp_path):
    """A finished run was given more steps, and its chief died before it wrote a status: workers ended with 0."""
    begun = when_written(tmp_path)
    for _ in range(2):
        assert not is_finished(str(tmp_path), tmp_path, after=begun)
        time.sleep(0.01)  # file systems count time in steps of some milliseconds
        write_status(tmp_path, "finished", "abc")
        assert is_finished(str(tmp_path), tmp_path, after=begun)
        begun = when_written(tmp_path)
