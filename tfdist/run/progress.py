"""Converts the number of steps into the position in the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Progress:
    """Counts samples consumed and trained on. size: samples in a pass over the data; None for a stream."""

    def __init__(self, global_batch: int, size: int | None):
        self.global_batch, self.size = global_batch, size
        # consumed - step * global_batch: due to earlier steps with another batch, and to rollbacks
        self._skipped = 0
        self._passed_over = 0  # samples passed over by rollbacks

    def consumed(self, step: int) -> int:
        """Samples consumed when `step` steps are done: the position in the data."""
        return step * self.global_batch + self._skipped

    def trained(self, step: int) -> int:
        """Samples trained on when `step` steps are done."""
        return self.consumed(step) - self._passed_over

    def epochs(self, step: int) -> float | None:
        """Passes over the data when `step` steps are done; None for a stream."""
        return self.trained(step) / self.size if self.size else None

    def steps_per_epoch(self) -> int:
        """Steps in a pass over the data, where the last step may reach into the next pass; 0 for a stream."""
        return math.ceil((self.size or 0) / self.global_batch)

    def pass_over(self, samples: int) -> None:
        """Moves past samples that are not trained on."""
        self._skipped += samples
        self._passed_over += samples

    def restore(self, manifest: Mapping[str, Any], step: int) -> None:
        """Continues at `step` from the result of `manifest_fields`, possibly with another global batch."""
        self._skipped = manifest["consumed"] - step * self.global_batch
        self._passed_over = manifest.get("passed_over", manifest.get("skipped_samples", 0))

    def manifest_fields(self, step: int) -> dict[str, int]:
        return {
            "consumed": self.consumed(step),
            "skipped_samples": self._skipped,
            "passed_over": self._passed_over,
        }
