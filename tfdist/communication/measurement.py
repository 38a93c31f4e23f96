"""A measurement of a collective, and bandwidth as NVIDIA's nccl-tests define it.

| collective     | S, the size in bytes, is the size of | bus bandwidth / algorithm bandwidth |
|----------------|--------------------------------------|-------------------------------------|
| all_reduce     | the vector                           | 2 (n-1)/n                           |
| all_gather     | the result, all parts together       | (n-1)/n                             |
| reduce_scatter | each member's input                  | (n-1)/n                             |
| all_to_all     | each member's input                  | (n-1)/n                             |
| broadcast      | the vector                           | 1                                   |

Algorithm bandwidth is S / time; bus bandwidth is what the slowest link carries if the algorithm wastes nothing, so that
it can be compared with the hardware's at any number n of members.
Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tfdist.planner.communication import passed_on

BUS_FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * passed_on(n),
    "all_gather": passed_on,
    "reduce_scatter": passed_on,
    "all_to_all": passed_on,
    "broadcast": lambda n: 1.0,
}


@dataclass(frozen=True)
class Measurement:
    """The time of one collective at one size."""

    collective: str
    members: int
    size: int  # bytes, see above
    seconds: float  # per round: median over repeats; in each repeat the slowest worker counts

    @property
    def algorithm_bandwidth(self) -> float:
        """The algorithm bandwidth in bytes per second."""
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """The bus bandwidth in bytes per second."""
        return self.algorithm_bandwidth * BUS_FACTOR[self.collective](self.members)
