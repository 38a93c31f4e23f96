"""Derives from samples per second: tokens and model FLOPs per second, MFU, scaling efficiency. Also: memory in use.

Model FLOPs are those that the model's mathematics needs, whatever the program does (Chowdhery et al. 2022,
arXiv:2204.02311, appendix B): three times the products and convolutions of the forward pass; recomputed activations do
not count. MFU is their rate as a share of the devices' peak.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

from tfdist.control.memory_amounts import PROCESS, amounts


@dataclass(frozen=True)
class Rates:
    """The facts about a run on which rates depend. 0 means unknown; the rates that need it are then left out."""

    forward_flops: float = 0.0  # of one sample
    tokens: int = 0  # of one sample
    peak_flops: float = 0.0  # per second, of all devices together
    baseline: float = 0.0  # samples per second of one worker alone
    workers: int = 1
    samples: int = 0  # of an epoch

    def values(self, samples_per_s: float, consumed: int) -> dict[str, float]:
        """Returns the values of a train event that follow from the speed and the position in the data order."""
        flops = 3 * self.forward_flops * samples_per_s
        found = {
            "perf/tokens_per_s": self.tokens * samples_per_s,
            "perf/model_flops_per_s": flops,
            "perf/mfu": flops / self.peak_flops if self.peak_flops else 0.0,
            "perf/scaling_efficiency": samples_per_s / (self.workers * self.baseline) if self.baseline else 0.0,
            "data/epoch": consumed / self.samples if self.samples else 0.0,
        }
        return {name: value for name, value in found.items() if value}


def host_memory() -> dict[str, float]:
    """Returns this process's host memory in bytes, now and at its peak; leaves out what the system does not report."""
    found = amounts(PROCESS)
    if "VmHWM" not in found:  # not Linux; on Linux ru_maxrss would include the memory of the parent process
        return {
            "memory/host_peak_bytes": float(
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            )
        }
    return {"memory/host_bytes": found["VmRSS"], "memory/host_peak_bytes": max(found["VmRSS"], found["VmHWM"])}
