"""Divides a model into the parts of a pipeline, and tells which stages and parts use a variable."""

from __future__ import annotations

import math
from collections.abc import Sequence

import keras

from tfdist.control.exit_codes import ConfigError
from tfdist.training.parallel.segments import Cut, Segment


def divide(model: Cut, parts: int, cut: str) -> list[list[Segment]]:
    """Divides a model's segments into `parts` parts, so that the largest part has as few parameters as possible.

    cut: if given, the names of the segments with which parts 1, 2, ... begin instead, for example "block_02,block_05".
    Raises ConfigError if there are too few segments, the names do not fit, or more than one tensor would cross a cut.
    """
    segments = model.segments
    names = [segment.gives[0] for segment in segments]
    if len(segments) < parts:
        raise ConfigError(
            f"The pipeline has {parts} parts (pipe x --pipe_chunks), but the model can only be cut into"
            f" {', '.join(names)}: lower one of them, or add layers."
        )
    if cut:
        starts = [names.index(name) if name in names else -1 for name in cut.split(",")]
        if len(starts) != parts - 1 or starts != sorted(set(starts)) or starts[0] < 1:
            raise ConfigError(
                f"--pipe_cut={cut} must name {parts - 1} of {', '.join(names[1:])}, in order: the parts after the first"
                " begin with them."
            )
    else:
        starts = _balanced(
            [sum(math.prod(variable.shape) for variable in segment.part.trainable_variables) for segment in segments],
            parts,
        )
    divided = [list(segments[start:stop]) for start, stop in zip([0, *starts], [*starts, len(segments)], strict=True)]
    _check_one_tensor(model, divided)
    return divided


def _check_one_tensor(model: Cut, parts: Sequence[Sequence[Segment]]) -> None:
    """Raises ConfigError unless each part passes on one tensor, the first output of its last segment."""
    if len(model.inputs) != 1 or len(model.outputs) != 1:
        raise ConfigError(
            f"--mesh has pipe=, whose stages take one tensor and return one, but the model has {len(model.inputs)}"
            f" inputs and {len(model.outputs)} outputs: use data= instead."
        )
    sent = model.inputs[0]
    for part in parts:
        inside = {name for segment in part for name in segment.gives}
        others = {name for segment in part for name in segment.takes} - inside - {sent}
        if others or model.outputs[0] in inside and part is not parts[-1]:
            raise ConfigError(
                f"--mesh has pipe=, whose stages pass on one tensor, but {part[0].gives[0]} and what follows it need"
                " more than that from before them (a mask, such as of Embedding(mask_zero=True), an input, or an"
                " earlier layer's output): use data= instead."
            )
        sent = part[-1].gives[0]


def _balanced(sizes: list[int], parts: int) -> list[int]:
    """Returns the segments at which parts 1, 2, ... begin, with the smallest possible largest sum. Dynamic programming
    over (number of first segments, number of parts)."""
    best: dict[tuple[int, int], tuple[int, list[int]]] = {
        (stop, 1): (sum(sizes[:stop]), []) for stop in range(1, len(sizes) + 1)
    }
    for count in range(2, parts + 1):
        for stop in range(count, len(sizes) + 1):
            best[stop, count] = min(
                (
                    (max(best[start, count - 1][0], sum(sizes[start:stop])), [*best[start, count - 1][1], start])
                    for start in range(count - 1, stop)
                ),
                key=lambda found: found[0],
            )
    return best[len(sizes), parts][1]


def stages_of(model: keras.Model, parts: Sequence[Sequence[Segment]], stages: int) -> dict[int, tuple[int, ...]]:
    """id of a variable -> the stages that use it, in order; all stages if none uses it."""
    users: dict[int, set[int]] = {id(variable): set() for variable in model.variables}
    for number, part in enumerate(parts):
        for segment in part:
            for variable in segment.part.variables:
                users[id(variable)].add(number % stages)
    return {key: tuple(sorted(found)) or tuple(range(stages)) for key, found in users.items()}


def first_users(parts: Sequence[Sequence[Segment]], variables: Sequence[keras.Variable]) -> list[list[keras.Variable]]:
    """For each part, the regularized variables among `variables` that no earlier part uses; the last part also gets
    those that no part uses."""
    left = {id(variable): variable for variable in variables if variable.regularizer is not None}
    found = [
        [
            left.pop(id(variable))
            for segment in part
            for variable in segment.part.trainable_variables
            if id(variable) in left
        ]
        for part in parts
    ]
    found[-1] += left.values()
    return found
