"""Computes from samples per second: tokens and model FLOPs per second, MFU, scaling efficiency; and memory in use.

Model FLOPs are what the model's mathematics needs, whatever the program does (Chowdhery et al. 2022, arXiv:2204.02311,
appendix B): three times the products and convolutions of the forward pass, recomputed activations not counted. MFU is
their rate as a share of the devices' peak.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

from tfdist.control.memory_amounts import PROCESS, amounts


@dataclass(frozen=True)
class Rates:
    """The facts about a run on which rates depend; 0: not known, and then what follows from it is left out."""

    forward_flops: float = 0.0  # of one sample
    tokens: int = 0  # of one sample
    peak_flops: float = 0.0  # per second, of all devices together
    baseline: float = 0.0  # samples per second of one worker alone
    workers: int = 1
    samples: int = 0  # of an epoch

    def values(self, samples_per_s: float, consumed: int) -> dict[str, float]:
        """The values of a train event that follow from the speed and the position in the data order."""
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
    """Bytes of this process in the host's memory, now and at most so far; what the system does not tell is left out."""
    found = amounts(PROCESS)
    if "VmHWM" not in found:  # not Linux, where ru_maxrss would include what the parent process needed
        return {
            "memory/host_peak_bytes": float(
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            )
        }
    return {"memory/host_bytes": found["VmRSS"], "memory/host_peak_bytes": max(found["VmRSS"], found["VmHWM"])}
