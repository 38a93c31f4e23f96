"""Checks whether all ranks launch their collectives in the same order. If not, NCCL hangs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from tfdist.runtime.launch_order import Launch


def problems(recordings: Mapping[int, Sequence[Launch]]) -> Iterator[str]:
    """Yields, in words, what is wrong with the launches that each rank has recorded."""
    launches: dict[tuple[int, int], dict[int, Launch]] = {}
    for rank, recording in recordings.items():
        for launch in recording:
            launches.setdefault((launch.group, launch.number), {})[rank] = launch
    for found in launches.values():
        first = next(iter(found.values()))
        if missing := sorted(set(first.ranks) - set(found)):
            yield f"ranks {missing} never launch {first.kind} {first.number} of ranks {list(first.ranks)}"
        if len(kinds := {launch.kind for launch in found.values()}) > 1:
            yield f"call {first.number} of ranks {list(first.ranks)} is {' on one, '.join(sorted(kinds))} on another"
    before: dict[tuple[int, int], set] = {}
    for recording in recordings.values():
        for one, other in zip(recording, recording[1:], strict=False):
            before.setdefault((other.group, other.number), set()).add((one.group, one.number))
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        circle = [next(iter(launches[place].values())) for place in error.args[1]]
        words = " before ".join(f"{each.kind} {each.number} of ranks {list(each.ranks)}" for each in circle)
        yield f"no order suits all ranks: {words}"
