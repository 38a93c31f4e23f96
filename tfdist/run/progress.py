"""Where a run stands in its data, by the number of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Progress:
    """Samples consumed and trained on. `size`: samples of a pass over the data; None of a stream."""

    def __init__(self, global_batch: int, size: int | None):
        self.global_batch, self.size = global_batch, size
        # consumed less step x global batch: of steps with another batch before, and of what rollbacks passed over
        self._skipped = 0
        self._passed_over = 0  # by rollbacks

    def consumed(self, step: int) -> int:
        """Samples consumed when `step` steps are done: the position in the data."""
        return step * self.global_batch + self._skipped

    def trained(self, step: int) -> int:
        """Samples trained on when `step` steps are done."""
        return self.consumed(step) - self._passed_over

    def epochs(self, step: int) -> float | None:
        """Passes over the data when `step` steps are done; None of a stream."""
        return self.trained(step) / self.size if self.size else None

    def steps_per_epoch(self) -> int:
        """Of a pass over the data, the last one maybe into the next; 0 of a stream."""
        return math.ceil((self.size or 0) / self.global_batch)

    def pass_over(self, samples: int) -> None:
        """Goes past samples that are not trained on."""
        self._skipped += samples
        self._passed_over += samples

    def restore(self, manifest: Mapping[str, Any], step: int) -> None:
        """Goes on at `step` from what `manifest_fields` returned, if need be with another global batch."""
        self._skipped = manifest["consumed"] - step * self.global_batch
        self._passed_over = manifest.get("passed_over", manifest.get("skipped_samples", 0))

    def manifest_fields(self, step: int) -> dict[str, int]:
        return {
            "consumed": self.consumed(step),
            "skipped_samples": self._skipped,
            "passed_over": self._passed_over,
        }
