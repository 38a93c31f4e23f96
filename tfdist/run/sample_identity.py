"""Checks that a run resumes with the same data: with other samples it would use some twice and others never."""

from __future__ import annotations

import functools
from typing import Any

from tfdist.artifacts.snapshot_folder import Snapshot
from tfdist.control.exit_codes import CheckpointError
from tfdist.data import contents
from tfdist.data.sources.split import Split


class SampleIdentity:
    """The identity of the training split, on the chief. Computed at first use."""

    def __init__(self, split: Split):
        self._split = split

    @functools.cached_property
    def found(self) -> dict[str, Any]:
        """The split's identity as written into a snapshot's manifest."""
        return contents.identity(self._split)

    def changes(self, snapshot: Snapshot) -> list[str]:
        """Sentences about data that differ from the snapshot's; none if an older version wrote it without a record."""
        before = snapshot.manifest.get("samples")
        what = before and contents.changed(self._split, before, self.found)
        return [f"The data have changed since {snapshot.path} was written ({what})"] if what else []

    def check(self, snapshot: Snapshot) -> None:
        """Raises CheckpointError if the snapshot was made with other data."""
        for change in self.changes(snapshot):
            raise CheckpointError(
                f"{change}: restore the data of the run, choose another --run_dir, or continue with other data by"
                " --allow_config_change."
            )
