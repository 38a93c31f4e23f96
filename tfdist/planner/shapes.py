"""A model as the planner describes it: its parts in order, with their weights, work and activations per sample.

A *part* lies between two places where the model can be cut (a block, or a layer). Built-in models are described by
formula (formulas.py), which takes no time; any other model by training/model_cost.py, which reads its graph and prints
the input of `from_json`. Bytes are for one sample, before any sharding.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tfdist.config import Config, parse_args
from tfdist.control.exit_codes import ConfigError
from tfdist.data.sources.source_facts import BYTES, DIGIT_SHAPE, DIGITS, SYNTHETIC

_SPREAD_EXPERTS = re.compile(r"(^|/)block_\d+_experts_(up|down)/")  # what training/parallel/expert.py spreads


@dataclass(frozen=True)
class Weight:
    """A trained variable. axis: the mesh axis that can divide it: "model", "expert", or "" for none."""

    path: str
    shape: tuple[int, ...]
    axis: str = ""
    element_bytes: int = 4

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelPart:
    """A part of a model, which may be repeated `repeat` times in a row."""

    name: str
    weights: tuple[Weight, ...] = ()
    constants: int = 0  # elements that are kept but not trained (moving averages)
    flops: float = 0.0  # of the forward pass; only products and convolutions; a multiplication plus an addition are two
    is_counted: bool = True  # False: more operations than `flops`, in a loop (recurrent layers)
    saved: float = 0.0  # bytes that the forward pass saves for the backward pass
    divided: float = 0.0  # those of them that tensor parallelism divides
    largest: float = 0.0  # bytes of the largest tensor; the backward pass needs a few more of that size
    fixed: float = 0.0  # bytes saved whatever the batch size: weights cast to the compute type, masks
    output: float = 0.0  # bytes passed to the next part
    block: bool = False  # can begin a stage, or be recomputed
    repeat: int = 1

    @property
    def parameters(self) -> int:
        """The number of parameters of one repetition."""
        return sum(weight.elements for weight in self.weights)

    @cached_property
    def elements(self) -> dict[str, int]:
        """Parameters of one repetition, by the axis that can divide them."""
        return {
            axis: sum(weight.elements for weight in self.weights if weight.axis == axis)
            for axis in {weight.axis for weight in self.weights}
        }

    @cached_property
    def largest_weights(self) -> dict[str, int]:
        """Elements of the largest variable, by the axis that can divide it."""
        return {axis: max(weight.elements for weight in self.weights if weight.axis == axis) for axis in self.elements}


@dataclass(frozen=True)
class ModelShape:
    """A model as the planner sees it."""

    name: str
    parts: tuple[ModelPart, ...]
    tokens: int = 1  # per sample; 1 if samples are no sequences
    heads: int = 1  # must be divisible by the degree of tensor parallelism
    source: str = "formula"  # or "graph"

    @property
    def parameters(self) -> int:
        return sum(part.parameters * part.repeat for part in self.parts)

    @property
    def flops(self) -> float:
        """The FLOPs of the forward pass of one sample."""
        return sum(part.flops * part.repeat for part in self.parts)

    @property
    def blocks(self) -> int:
        """Number of places where it can be cut into stages, plus one."""
        return sum(part.repeat for part in self.parts if part.block)

    @property
    def axes(self) -> set[str]:
        """The mesh axes besides data and pipe that can divide it."""
        return {weight.axis for part in self.parts for weight in part.weights} - {""}

    @property
    def experts(self) -> set[int]:
        """The numbers of experts in its layers; empty if it has no mixture of experts."""
        return {weight.shape[0] for part in self.parts for weight in part.weights if weight.axis == "expert"}

    def stages(self, pipe: int) -> list[list[ModelPart]]:
        """Returns the parts cut into `pipe` stages of about the same work, each with at least one block."""
        assert pipe == 1 or pipe <= self.blocks, (pipe, self.blocks)
        if pipe not in self._cut:
            self._cut[pipe] = _cut(self.parts, pipe, self.flops)
        return self._cut[pipe]

    @cached_property
    def _cut(self) -> dict[int, list[list[ModelPart]]]:
        return {}


def _cut(parts: Sequence[ModelPart], pipe: int, total: float) -> list[list[ModelPart]]:
    stages: list[list[ModelPart]] = [[] for _ in range(pipe)]
    at, done, left, has_block = 0, 0.0, sum(part.repeat for part in parts if part.block), False
    for part in itertools.chain.from_iterable(itertools.repeat(each, each.repeat) for each in parts):
        due = (done + part.flops / 2) * pipe >= (at + 1) * total
        # A stage begins with a block: when its share of the work is reached, or when the later stages need all the
        # blocks that are left.
        if part.block and has_block and at < pipe - 1 and (due or left < pipe - at):
            at, has_block = at + 1, False
        last = stages[at][-1] if stages[at] else None
        if last is not None and last.block and last.name == part.name:
            stages[at][-1] = dataclasses.replace(last, repeat=last.repeat + 1)
        else:
            stages[at].append(dataclasses.replace(part, repeat=1))
        has_block, left, done = has_block or part.block, left - part.block, done + part.flops
    return stages


def from_json(values: Mapping[str, Any], sample: Sample | None = None) -> ModelShape:
    """Reads the output of `python -m tfdist.training.model_cost`. sample: what it was given in place of the source."""
    parts = tuple(
        ModelPart(
            part["name"],
            tuple(
                Weight(path, tuple(shape), "expert" if _SPREAD_EXPERTS.search(path) else "")
                for path, shape in part["weights"]
            ),
            constants=part["constants"],
            flops=part["flops"],
            is_counted=part["is_counted"],
            saved=sum(part["saved"]),
            largest=max(part["saved"], default=0.0),
            fixed=part["fixed"],
            output=part["output"],
        )
        for part in values["parts"]
    )
    return ModelShape(values["name"], parts, sample.tokens if sample else values["tokens"], source="graph")


@dataclass(frozen=True)
class Sample:
    """The shape of a sample's x (float32 images or int32 tokens), and the number of classes or tokens."""

    shape: tuple[int, ...]
    outputs: int
    is_text: bool = False  # x are tokens, and a target for each

    @property
    def tokens(self) -> int:
        """1 if samples are no texts."""
        return self.shape[0] if self.is_text else 1


def sample_of(config: Config, shape: str = "", outputs: int = 0) -> Sample | None:
    """Returns the samples of a built-in source without opening it. The user's `shape` ("224,224,3") and `outputs` have
    precedence.

    Returns None if the source must be opened to find out. Raises ConfigError for an invalid shape.
    """
    data, options = config.data, parse_args("source_args", config.data.source_args)
    found: Sample | None = None
    if data.source == "digits":
        found = Sample(DIGIT_SHAPE, DIGITS)
    elif data.source == "text":
        found = Sample((data.sequence_length,), BYTES, is_text=True)
    elif data.source == "synthetic":
        options = {**SYNTHETIC, **options}
        found = (
            Sample((data.sequence_length,), options["vocab"], is_text=True)
            if options["task"] == "text"
            else Sample(tuple(options["shape"]), options["classes"])
        )
    elif "image_size" in options and outputs:
        found = Sample((options["image_size"], options["image_size"], 3), outputs)
    if shape:
        try:
            sizes = tuple(int(size) for size in shape.split(","))
        except ValueError:
            sizes = (0,)
        if min(sizes) < 1:
            raise ConfigError(
                f"--input_shape={shape} must be whole numbers, for example 224,224,3 for images or 1024 for tokens."
            )
        if not outputs and not found:
            raise ConfigError(f"--input_shape={shape} needs --outputs=N, the number of classes or tokens.")
        known = found.is_text if found else False
        is_text = known or config.model.objective == "next_token" or config.model.model == "transformer"
        found = Sample(sizes, outputs or (found.outputs if found else 0), is_text and len(sizes) == 1)
    return dataclasses.replace(found, outputs=outputs) if found and outputs else found
