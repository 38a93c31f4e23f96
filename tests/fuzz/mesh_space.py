"""What can be drawn for --strategy=mesh (axes, shards of state, pipelines), and the models that fit it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from tests.fuzz import models
from tests.fuzz.models import NO_SUMS, STATES, SUMS_AND_MEANS

AXES = ("pipe", "data", "expert", "model")
ELEMENTWISE = ("sgd", "momentum", "adam", "adamw", "lion")
# workers -> meshes
MESHES = {
    2: ["", "", "", "", "data=2", "pipe=2", "pipe=2", "model=2", "expert=2"],
    3: [""],
    4: ["", "pipe=2,data=2", "data=2,model=2", "pipe=2,model=2", "data=2,expert=2"],
}


def draw(
    chance: random.Random, workers: int, model: dict[str, Any], data: dict[str, Any], options: dict[str, Any]
) -> None:
    """Adds options, and changes model and data to suit them."""
    mesh = chance.choice(MESHES[workers])
    degree = degrees(mesh, workers)
    if mesh:
        options["mesh"] = mesh
    if degree["model"] > 1 or degree["expert"] > 1 or degree["pipe"] > 1 and chance.random() < 0.4:
        arguments = "layers=2,width=8,heads=2,num_outputs=12" + (
            ",experts=4,capacity=2.0,balance=0.1" if degree["expert"] > 1 else ""
        )
        model.clear()
        model.update(inputs="steps", blocks=[], head="tokens", embedding="embedding", builtin=arguments)
        options.update(objective="classification", label_smoothing=chance.choice([None, 0.1]))
        for name in ("constant", "offset", "nan"):
            data.pop(name, None)
        options.update(optimizer=chance.choice(["sgd", "momentum", "adam"]), jit_compile=None)
        options["learning_rate"] = 0.01 if options["optimizer"] == "adam" else 0.1
    elif degree["pipe"] > 1:
        model["blocks"] = [block if isinstance(block, list) else [block] for block in model["blocks"]]
        while len(model["blocks"]) < 2:
            model["blocks"].append(chance.choice([["dense"], ["mean_loss"], ["layer_norm"]]))
    if degree["pipe"] > 1:
        options["pipe_schedule"] = chance.choice([None, "gpipe"])
        options["jit_compile"] = None
    if degree["data"] * degree["expert"] > 1 and chance.random() < 0.6:
        options["zero"] = chance.choice([1, 2, 3])
        options["compression"] = None
        if options["zero"] < 3 and chance.random() < 0.2:
            options["offload"] = "optimizer"
        if options["zero"] == 3:
            options["jit_compile"] = None
    elif not mesh and chance.random() < 0.15:
        options.update(all_reduce="hierarchical", workers_per_host=2 if workers == 4 else 1, compression=None)
    if degree["model"] > 1 and degree["pipe"] == 1 and options.get("zero") != 3 and chance.random() < 0.4:
        options["sequence_parallel"] = True
    if "builtin" in model:
        options["recompute"] = chance.choice(
            [None, None, "block", "attention"] if degree["pipe"] == 1 else [None, "block"]
        )
        if degree["pipe"] == 1 and options["recompute"] is None and chance.random() < 0.5:
            kinds = ["scaled", "frozen"]
            if not options.get("sequence_parallel"):  # which gives other layers, too, only a part of the positions
                kinds += ["nested", "own_head"]
                kinds += ["between", models.MIXES_CHANNELS] if degree["model"] > 1 else []
            model["around"] = chance.choice(kinds)
    if options.get("compression") and mesh not in ("", "data=2"):
        options["compression"] = None


def forms(case: dict[str, Any], blocks: list[str], chance: random.Random) -> None:
    """On a pipeline, sometimes draws other forms of the model: a single input or output that is named, or a layer with
    state that the first and the last stage share.
    """
    model, options = case["model"], case.get("options", {})
    if "pipe=" not in options.get("mesh", "") or "builtin" in model:
        return
    if chance.random() < 0.3:
        model["frozen_first"] = True
    named = chance.choice([[], ["input"], ["output"], ["input", "output"]])
    adds = {*NO_SUMS, *SUMS_AND_MEANS, "dense_l2"} & set(blocks)
    if adds and "output" in named:  # which takes a custom objective
        named = ["input"]
    if named:
        model["named"] = named
    if "output" in named:
        options["objective"] = "tests.fuzz.objectives:only"
        options.pop("label_smoothing", None)
        return
    refused_first = adds or case["data"]["weights"] != "none"
    if chance.random() < 0.4 and model["inputs"] == "rows" and not refused_first:
        model["shared"] = True


def compress(chance: random.Random, model: dict[str, Any], *options: dict[str, Any]) -> None:
    """Sometimes draws a compression that carries its errors over, for a resumed run: it must match an uninterrupted
    one.
    """
    if can_compress(options[0]) and chance.random() < 0.5:
        large = model["inputs"] in ("steps", "both")
        kind = chance.choice(["int8", "topk", "powersgd"] if large else ["int8"])
        if kind != "int8":  # these kinds leave small tensors as they are
            model["embedding"] = "embedding_large"
        for each in options:
            each.update(compression=kind, compression_after=chance.choice([0, 1]) if kind != "int8" else 0)


def can_compress(options: Mapping[str, Any]) -> bool:
    """Whether gradients travel whole, not in shards, on a mesh with these options."""
    in_parts = any(options.get(name) for name in ("zero", "offload", "all_reduce"))
    return not in_parts and options.get("mesh", "data=2") == "data=2"


def changes_its_unit(case: Mapping[str, Any]) -> bool:
    """Whether the unit of gradients changes from step to step, so that no errors can be carried on."""
    options = case["options"]
    is_weighted = case["data"]["weights"] != "none" or ":" in options.get("objective", "")
    return is_weighted or options.get("precision") == "float16"


def can_shard(case: Mapping[str, Any]) -> bool:
    """Whether --zero is compatible with the rest of a case on a mesh with a data axis only."""
    options = case["options"]
    return (
        options["optimizer"] in ELEMENTWISE
        and not options.get("compression")
        and not options.get("jit_compile")
        and "mesh" not in options
    )


def degrees(mesh: str, workers: int) -> dict[str, int]:
    """Returns the length of each axis."""
    given = {axis: int(length) for axis, length in (part.split("=") for part in mesh.split(",") if part)}
    rest = workers
    for length in given.values():
        rest //= length
    return {axis: given.get(axis, rest if axis == "data" and "data" not in given else 1) for axis in AXES}


def replicas(options: Mapping[str, Any], workers: int) -> int:
    degree = degrees(options.get("mesh", ""), workers)
    return degree["data"] * degree["expert"]


def conflicts(case: Mapping[str, Any], blocks: list[str], workers: int) -> str:
    """Why a case on a mesh is not allowed; "" if it is."""
    options, model = case["options"], case["model"]
    degree = degrees(options.get("mesh", ""), workers)
    if (options.get("zero") or degree["model"] > 1 or degree["expert"] > 1) and options["optimizer"] not in ELEMENTWISE:
        return "an optimizer that does not treat every element on its own"
    if "grown" in blocks and (options.get("zero") or degree["model"] > 1):
        return "a constraint needs the whole variable"
    if options.get("zero") == 3 and "dense_l2" in blocks:
        return "a regularizer needs the whole variable"
    even = options["global_batch"] % (options["accumulation"] * degree["data"] * degree["expert"]) == 0
    if (degree["pipe"] > 1 or degree["expert"] > 1) and not even:
        return "micro-batches of different size"
    if degree["pipe"] > 1 and (model["inputs"] == "both" or model["head"] == "dict"):
        return "a pipeline takes one tensor and gives one"
    if degree["pipe"] > 1 and set(blocks) & STATES:
        return "state in stages is not looked at yet"
    if degree["expert"] > 1 and (case["data"]["weights"] != "none" or case["data"].get("padded")):
        return "balance losses with weights"
    if options.get("compression") in ("int8", "topk", "powersgd") and changes_its_unit(case):
        return "errors that are carried on"
    return ""


def features(case: Mapping[str, Any]) -> list[str]:
    options, model = case["options"], case["model"]
    return (
        [f"mesh:{options.get('mesh') or 'data'}", f"zero:{options.get('zero', 0)}"]
        + [
            f"mesh.{name}"
            for name in ("pipe_schedule", "offload", "all_reduce", "sequence_parallel")
            if name in options
        ]
        + (["model:transformer"] if "builtin" in model else [])
        + ([f"around:{model['around']}"] if "around" in model else [])
    )
