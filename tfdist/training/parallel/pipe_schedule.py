"""The order in which the stages of a pipeline work, as data: a list of actions per stage. Uses no TensorFlow.

Legend. S stages, M micro-batches, C chunks per stage: stage s holds parts s, S + s, 2 S + s, ... of the S * C parts of
the model. An action takes one micro-batch forward or backward through one part.

    gpipe   all forward, then all backward; M micro-batches live        Huang et al. 2019, arXiv:1811.06965
    1f1b    forward until the pipeline is full, then in turn; S live    Narayanan et al. 2019, arXiv:1806.03377
    1f1b with C > 1: interleaved; a smaller bubble, more traffic        Narayanan et al. 2021, arXiv:2104.04473
"""

from __future__ import annotations

import collections
from typing import NamedTuple


class Action(NamedTuple):
    """Takes one micro-batch forward or backward through one part."""

    forward: bool
    micro: int
    chunk: int

    @property
    def units(self) -> int:
        """Its duration: a backward pass takes twice as long as a forward pass."""
        return 1 if self.forward else 2


Schedule = list[list[Action]]  # for each stage, in order


class Receipt(NamedTuple):
    """A tensor received before an action: the output (forward) or gradient of part `part` for one micro-batch."""

    forward: bool
    micro: int
    part: int  # the part that sends it


def make_schedule(name: str, stages: int, micros: int, chunks: int = 1) -> Schedule:
    """Returns the schedule of all stages."""
    assert chunks == 1 or micros % stages == 0  # planner/mesh_rules.py refuses other numbers
    return [_stage(name, stage, stages, micros, chunks) for stage in range(stages)]


def _stage(name: str, stage: int, stages: int, micros: int, chunks: int) -> list[Action]:
    total = micros * chunks
    forwards = [Action(True, *_nth(k, stages, chunks)) for k in range(total)]
    backwards = [
        Action(False, micro, chunks - 1 - chunk) for micro, chunk in (_nth(k, stages, chunks) for k in range(total))
    ]
    if name == "gpipe":
        return forwards + backwards
    first = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    first = min(first, total)
    turns = [action for pair in zip(forwards[first:], backwards, strict=False) for action in pair]
    return forwards[:first] + turns + backwards[total - first :]


def _nth(k: int, stages: int, chunks: int) -> tuple[int, int]:
    """(micro, chunk) of the k-th action of a kind: rounds of S micro-batches, through one chunk after another."""
    if chunks == 1:
        return k, 0
    return k // (stages * chunks) * stages + k % stages, k // stages % chunks


def timeline(schedule: Schedule) -> list[list[tuple[int, Action]]]:
    """Returns when each action starts, if each takes its `units`.

    Raises ValueError if stages wait for each other forever.
    """
    stages = len(schedule)
    parts = stages * (1 + max(action.chunk for action in schedule[0]))
    ended: dict[Receipt, int] = {}
    free, position = [0] * stages, [0] * stages
    result: list[list[tuple[int, Action]]] = [[] for _ in schedule]
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(schedule):
            while position[stage] < len(actions):
                action = actions[position[stage]]
                part = action.chunk * stages + stage
                if action.forward:
                    needs = [Receipt(True, action.micro, part - 1)] if part else []
                else:
                    after = [Receipt(False, action.micro, part + 1)] if part < parts - 1 else []
                    needs = [Receipt(True, action.micro, part), *after]
                if not all(need in ended for need in needs):
                    break
                start = max([free[stage], *(ended[need] for need in needs)])
                free[stage] = ended[Receipt(action.forward, action.micro, part)] = start + action.units
                result[stage].append((start, action))
                position[stage] += 1
                moved = True
    if any(position[stage] < len(actions) for stage, actions in enumerate(schedule)):
        raise ValueError("the stages wait for each other forever")
    return result


def receipts(schedule: Schedule) -> list[list[list[Receipt]]]:
    """Returns the tensors that each stage receives before each of its actions. It sends the action's result after it.

    NCCL needs one global order of all transfers: here the order in which results are made with the times of `timeline`.
    Before a stage sends a result, it has received all tensors that were made earlier, even those that it uses later.
    """
    stages = len(schedule)
    last = stages * (1 + max(action.chunk for action in schedule[0])) - 1
    lines = timeline(schedule)
    made = [[_made(start, action, stage, stages) for start, action in line] for stage, line in enumerate(lines)]
    waiting: list[list[tuple[int, Receipt]]] = [[] for _ in schedule]
    for transfer in sorted(transfer for of_stage in made for transfer in of_stage):
        to = _goes_to(transfer[1])
        if 0 <= to <= last:
            waiting[to % stages].append(transfer)
    found: list[list[list[Receipt]]] = []
    for stage, line in enumerate(lines):
        queue, of_stage = collections.deque(waiting[stage]), []
        for (_, action), own in zip(line, made[stage], strict=True):
            part, before = action.chunk * stages + stage, []
            needed = Receipt(action.forward, action.micro, part - 1 if action.forward else part + 1)
            sends = 0 <= _goes_to(own[1]) <= last
            while queue and (sends and queue[0] < own or any(receipt == needed for _, receipt in queue)):
                before.append(queue.popleft()[1])
            of_stage.append(before)
        found.append(of_stage)
    return found


def _made(start: int, action: Action, stage: int, stages: int) -> tuple[int, Receipt]:
    """(when an action ends, the tensor that it makes)."""
    return start + action.units, Receipt(action.forward, action.micro, action.chunk * stages + stage)


def _goes_to(receipt: Receipt) -> int:
    """The part that uses the tensor; a number outside of the model's parts means none."""
    return receipt.part + 1 if receipt.forward else receipt.part - 1


def live(schedule: Schedule) -> list[int]:
    """For each stage, the most (micro-batch, chunk) pairs whose activations it holds at once."""
    most = []
    for actions in schedule:
        held = peak = 0
        for action in actions:
            held += 1 if action.forward else -1
            peak = max(peak, held)
        most.append(peak)
    return most
