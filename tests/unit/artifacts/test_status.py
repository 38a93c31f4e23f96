"""tfdist/artifacts/status.py: whether a run has ended, for processes that have lost its chief."""

from __future__ import annotations

from tfdist.artifacts.status import is_finished, stored_status, write_status


def test_an_earlier_end_is_not_that_of_a_run_that_goes_on(tmp_path):
    """A finished run was given more steps, and its chief died before it wrote a status: workers ended with 0."""
    before = stored_status(str(tmp_path), tmp_path)
    for attempt in range(2):
        assert not is_finished(str(tmp_path), tmp_path, before)
        write_status(tmp_path, "finished", "abc", attempt)
        assert is_finished(str(tmp_path), tmp_path, before)
        before = stored_status(str(tmp_path), tmp_path)
