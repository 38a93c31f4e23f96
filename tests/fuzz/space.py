"""What can be drawn, and what can be combined.

A case is a dict that JSON can hold: {"kind", "seed", "runtime", "model", "data", "options", "calls"}. Most of its cost
is tracing its graph. So "again" lists other data, on which the same graph is run once more, each time from the initial
weights (tfdist.fit: from the weights that it has reached). A *feature* is a text such as "block:batch_norm" or
"option:ema"; coverage.py counts how often each was drawn with each runtime.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from tests.fuzz import fit_space, gpu_form, mesh_space, models, resume_space, stored_data
from tfdist.config import checks

# name of a runtime -> (kind of process group, workers, replicas)
RUNTIMES: dict[str, tuple[str, int, int]] = {
    "one_device": ("local", 1, 1),
    "mirrored:2": ("local", 1, 2),
    "mirrored:3": ("local", 1, 3),
    "sockets:2": ("sockets", 2, 2),
    "sockets:3": ("sockets", 3, 3),
    "sockets_tcp:3": ("sockets_tcp", 3, 3),  # as between hosts: no rank reads another's memory in place
    "sockets_hosts:3": ("sockets_hosts", 3, 3),  # two on one host, one on another (hosts.py)
    "multi_worker:2": ("tensorflow", 2, 2),
    "multi_worker:3": ("tensorflow", 3, 3),
    "mesh:2": ("tensorflow", 2, 2),
    "mesh:3": ("tensorflow", 3, 3),
    "mesh:4": ("tensorflow", 4, 4),
    "horovod:2": ("horovod", 2, 2),
    "horovod:3": ("horovod", 3, 3),
    "parameter_server:2": ("servers", 2, 2),
    "fit:1": ("local", 1, 1),
    "fit:2": ("sockets", 2, 2),
    "fit:3": ("sockets", 3, 3),
    "fit_ring:2": ("fit_ring", 2, 2),
}

# Runtimes that are a strategy with other flags.
FLAGS_OF = {
    "sockets_tcp": {"strategy": "sockets", "communication": "socket"},
    "sockets_hosts": {"strategy": "sockets"},
}

INSTEAD = {  # block -> another block, which is sometimes drawn in its place
    "attention": "attention_causal",
    "centered": "unit_columns",
    "counter": "long_counter",
    "dense_l2": "grown",
    "frozen": "idle",
    "shared": "in_function",
    "in_function": "holds_function",
    "residual": "twins",
    "twins": "column",
    "running_mean": "keeps",
    "louder": "draws",
    "draws": "resting",
    "resting": "scaled",
    "mean_loss": "sum_in_evaluation",
    "max_loss": "first_loss",
    "sum_loss": "rows_loss",
    "activity_loss": "kept_loss",
    "floored_loss": "hidden_loss",
}
OTHER_MASKS = models.MASKS[1:]  # sometimes drawn in place of the first mask
UNDRAWN = ("block", *INSTEAD.values())  # not drawn directly
MESH_ONLY = (*checks.MESH_ONLY, "pipe_schedule", "workers_per_host")
MASKED, HARDEST = "tests.fuzz.objectives:masked", "tests.fuzz.objectives:hardest"
AGAIN = 5  # sets of other data for a case's graph
MOVABLE = (
    "one_device",
    "mirrored:2",
    "sockets:2",
    "multi_worker:2",
    "multi_worker:3",
    "horovod:2",
)  # on which any run can be resumed


class Chance(random.Random):
    """random.Random with fewer calls for each draw, since hundreds of thousands of numbers are drawn."""

    def choice(self, seq: Any) -> Any:
        count = len(seq)
        bits = count.bit_length()
        while (number := self.getrandbits(bits)) >= count:
            pass
        return seq[number]

    def randint(self, a: int, b: int) -> int:
        return self.choice(range(a, b + 1))


def copy_of(value: Any) -> Any:
    """copy.deepcopy of what JSON can hold, which is all that a case consists of; several times as fast."""
    if isinstance(value, dict):
        return {name: copy_of(each) for name, each in value.items()}
    return [copy_of(each) for each in value] if isinstance(value, list) else value


def group_of(runtime: str) -> tuple[str, int]:
    """Returns (kind of process group, workers) of the group in which a runtime lives."""
    return RUNTIMES[runtime][:2]


def draw(seed: int, number: int, runtimes: Sequence[str], again: int = AGAIN) -> dict[str, Any]:
    """Draws case `number` of a seed, always the same. again: at most so many sets of other data for its graph."""
    chance = Chance(f"{seed}/{number}")
    runtime = runtimes[number % len(runtimes)]
    while True:
        case = _fit(chance, runtime) if runtime.startswith("fit") else _train(chance, runtime)
        if not conflicts(case):
            break
    case = _with_again(chance, case, again) | ({"optimized": True} if chance.random() < 0.15 else {})
    # Each of the following has its own generator, so that the rest of a case is the same without it.
    if "embedding" in case["model"] and random.Random(f"{seed}/{number}/negative").random() < 0.2:
        case["data"]["negative"] = True
    if _may_mask(case) and random.Random(f"{seed}/{number}/mask").random() < 0.4:
        case["options"] = _without(case["options"], "label_smoothing") | {"objective": MASKED}
        for each in (case["data"], *case.get("again", ())):
            each["weights"] = "none"
    if _may_be_unlike(case) and random.Random(f"{seed}/{number}/unlike").random() < 0.03:
        case["model"]["unlike"] = True
        case.pop("again", None)
    if _may_mix_in_objective(case) and random.Random(f"{seed}/{number}/hardest").random() < 0.04:
        case["options"] = _without(case["options"], "label_smoothing") | {"objective": HARDEST}
        case.pop("again", None)
    if case["model"].get("embedding") == "embedding_masked":
        # Rows of few numbers may all have the same mean: then nothing shows that a mask depends on other rows.
        alike = any({"padded", "negative", "constant"} & set(part["data"]) for part in parts(case))
        masks = ["embedding_masked", *OTHER_MASKS]
        weights = [0.4, 0.3, 0.0 if alike else 0.3]
        case["model"]["embedding"] = random.Random(f"{seed}/{number}/masks").choices(masks, weights)[0]
    normed = case["model"].get("inputs") == "steps" and "batch_norm" in flat_blocks(case)
    if normed and random.Random(f"{seed}/{number}/places normed").random() < 0.3:
        case["model"]["places_normed"] = True
    for name, other in INSTEAD.items():
        if name not in flat_blocks(case):  # a copy is most of what a draw costs
            continue
        changed = copy_of(case)
        _some_instead(changed["model"]["blocks"], name, other, random.Random(f"{seed}/{number}/{other}"))
        case = case if conflicts(changed) and not conflicts(case) else changed
    if case["kind"] == "fit":
        chance = random.Random(f"{seed}/{number}/keeps in fit")
        _some_instead(case["model"]["blocks"], "long_counter", "keeps", chance)
        if "positions" in flat_blocks(case) and random.Random(f"{seed}/{number}/by sizes").random() < 0.5:
            case["model"]["by_sizes"] = True
        chance = random.Random(f"{seed}/{number}/ledger")
        if random.Random(f"{seed}/{number}/counting rate").random() < 0.15 and fit_space.may_count_rates(case):
            case["compile"]["counting_rate"] = True
        elif chance.random() < (0.5 if "backup" in case["fit"] else 0.1) and fit_space.may_count_rates(case):
            case["fit"]["callbacks"] = [*case["fit"].get("callbacks", ()), "ledger"]
        rare = copy_of(case)
        fit_space.with_rare(rare, random.Random(f"{seed}/{number}/rare in fit"))
        case = case if any(conflicts(part) for part in parts(rare)) else rare
        attribute = copy_of(case)
        fit_space.with_plain_attribute(attribute, random.Random(f"{seed}/{number}/plain attribute"))
        case = case if any(conflicts(part) for part in parts(attribute)) else attribute
        fit_space.with_kept_tensors(kept := copy_of(case), random.Random(f"{seed}/{number}/kept tensors"))
        case = case if any(conflicts(part) for part in parts(kept)) else kept
        if runtime == "fit:1":
            backed_up = fit_space.backed_up(case, random.Random(f"{seed}/{number}/backed up"))
            case = case if conflicts(backed_up) else backed_up
    mesh_space.forms(case, flat_blocks(case), random.Random(f"{seed}/{number}/forms"))
    on_gpu = gpu_form.drawn(case, flat_blocks(case), random.Random(f"{seed}/{number}/gpu"))
    case = case if any(conflicts(part) for part in parts(on_gpu)) else on_gpu
    return _perhaps_changed(case, random.Random(f"{seed}/{number}/changed"))


def _perhaps_changed(case: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """See resume_space.py."""
    replicas = 1 if case["kind"] == "fit" else replicas_of(case["runtime"], case["options"])
    changed = resume_space.drawn(case, chance, replicas)
    return case if conflicts(changed) else changed


def _may_mask(case: Mapping[str, Any]) -> bool:
    """Whether an objective may weight the tokens itself; the data then have no weights."""
    model, differs = case["model"], case["data"].get("differs")
    if case["kind"] != "train" or case["options"].get("compression") in resume_space.LOSSY:
        return False
    return model["head"] == "tokens" and "builtin" not in model and differs != "weight"


def _may_be_unlike(case: Mapping[str, Any]) -> bool:
    """Whether the workers after the first may have another model, which must be refused."""
    is_alone = RUNTIMES[case["runtime"]][1] == 1 or case["runtime"].startswith("parameter_server")
    is_own = "builtin" not in case["model"] or "around" in case["model"]
    return is_own and not is_alone and not {"resumed", "moved"} & set(case) and "differs" not in case["data"]


def _may_mix_in_objective(case: Mapping[str, Any]) -> bool:
    """Whether the objective may be one that mixes samples, which must be refused, and before anything else is."""
    if case["kind"] != "train" or case["model"]["head"] != "classes" or not case["model"]["blocks"]:
        return False
    options, model = case["options"], case["model"]
    is_alone = options["accumulation"] == RUNTIMES[case["runtime"]][1] == RUNTIMES[case["runtime"]][2] == 1
    others = {*models.MIXING, *models.NO_SUMS, *models.SUMS_AND_MEANS, "dense_l2", "draws", "spectral"}
    return not (
        is_alone
        or options.get("objective")
        or "pipe=" in options.get("mesh", "")
        or {"withheld", "unlike"} & set(model)
        or {"resumed", "moved", *resume_space.KEYS} & set(case)
        or others & set(flat_blocks(case))
        or {"differs", "nan"} & set(case["data"])
    )


def _without(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {each: value for each, value in options.items() if each != name}


def _some_instead(blocks: list, name: str, other: str, chance: random.Random) -> None:
    for index, block in enumerate(blocks):
        if isinstance(block, list):
            _some_instead(block, name, other, chance)
        elif block == name and chance.random() < 0.5:
            blocks[index] = other


def strategy_flags(runtime: str) -> dict[str, str]:
    """Returns the flags with which tfdist makes a runtime."""
    kind = runtime.partition(":")[0]
    return FLAGS_OF.get(kind, {"strategy": kind})


def draw_stored(seed: int, number: int, runtimes: Sequence[str], again: int = AGAIN) -> dict[str, Any]:
    """Like `draw`, but every other case that is stopped and resumed keeps its snapshots, or the backup of its fit, in
    an object store ("stored"), and some cases have their data in one (stored_data.py). Both have their own generators,
    so that the rest of a case is the same without them.
    """
    case = draw(seed, number, runtimes, again)
    stored = {**case, "stored": True}
    case = stored if random.Random(f"{seed}/{number}/stored").random() < 0.5 and not conflicts(stored) else case
    chance = random.Random(f"{seed}/{number}/data_in_store")
    if chance.random() < 0.3:
        for how in chance.sample(stored_data.KINDS, len(stored_data.KINDS)):
            if not any(conflicts(part) for part in parts({**case, "data_in_store": how})):
                return {**case, "data_in_store": how}
    return case


def parts(case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the case once for each of its data. Only the first is evaluated: evaluation traces another graph."""
    alone = {name: value for name, value in case.items() if name != "again"}
    return [alone, *({**alone, "data": data, "evaluate": False} for data in case.get("again", ()))]


def elsewhere(job: Mapping[str, Any], runtimes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the same job on each other runtime that allows it; the oracle is the same."""
    if "moved" in job:
        return
    for runtime in runtimes:
        if runtime == job["runtime"] or runtime.startswith("fit") != (job["kind"] == "fit"):
            continue
        case = {**job, "runtime": runtime}
        if job["kind"] == "train":
            case["options"] = options = {name: value for name, value in job["options"].items() if name not in MESH_ONLY}
            if runtime.startswith("mesh") and mesh_space.can_shard(case) and "builtin" not in job["model"]:
                case["options"] = options = options | {
                    "zero": random.Random(f"{job['seed']}/{runtime}").choice([0, 1, 2, 3])
                }
            if options["global_batch"] < options["accumulation"] * replicas_of(runtime, options):
                continue
            if runtime.startswith("parameter_server"):
                if "resumed" in case:
                    continue
                case.pop("again", None)
        if not any(conflicts(part) for part in parts(case)):
            yield case


def _with_again(chance: random.Random, case: dict[str, Any], count: int) -> dict[str, Any]:
    if (
        "resumed" in case
        or "moved" in case
        or "differs" in case["data"]
        or "backup" in case.get("fit", {})
        or case["runtime"].startswith("parameter_server")
    ):
        return case
    again: list[dict[str, Any]] = []
    for number in range(1, 1 + (min(count, AGAIN) if case["kind"] == "fit" else count)):  # Keras' fit costs more
        for _ in range(20):
            data = draw_data(chance, case["model"]) | {"draw": number}
            if case["kind"] == "fit" or data["source"] == "dataset":
                data["source"] = case["data"]["source"]
                data.pop("mixed", None)
            # Whether there are weights at all is part of the graph.
            alike = (data["weights"] == "none", data["weights"].startswith("token")) == (
                case["data"]["weights"] == "none",
                case["data"]["weights"].startswith("token"),
            )
            if alike and not conflicts({**case, "data": data}):
                again.append(data)
                break
    return case | ({"again": again} if again else {})


def with_block(case: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Returns the case with one more block at the end of its model; None if the block is not allowed there."""
    model, blocks = case["model"], case["model"]["blocks"]
    if not blocks or name == "block" or models.shape_of(model["inputs"]) not in models.BLOCKS[name][0].split():
        return None
    longer = {**case, "model": {**model, "blocks": [*blocks, name if isinstance(blocks[0], str) else [name]]}}
    return None if any(conflicts(part) for part in parts(longer)) else longer


def _maybe(chance: random.Random, probability: float, value: Any, otherwise: Any = None) -> Any:
    return value if chance.random() < probability else otherwise


def _train(chance: random.Random, runtime: str) -> dict[str, Any]:
    workers = RUNTIMES[runtime][1]
    model = draw_model(chance)
    data = draw_data(chance, model)
    options = draw_options(chance, model)
    if runtime.startswith("mesh"):
        mesh_space.draw(chance, workers, model, data, options)
    least = options["accumulation"] * replicas_of(runtime, options)
    options["global_batch"] = chance.randint(least, max(least, 12))
    if data["source"] == "dataset":
        options["shuffle"] = False
    evaluate = {} if chance.random() < 0.4 else {"evaluate": False}
    case = evaluate | {
        "kind": "train",
        "seed": chance.randrange(10**6),
        "runtime": runtime,
        "model": model,
        "data": data,
        "options": {name: value for name, value in sorted(options.items()) if value is not None},
        "calls": chance.choice([[3], [1, 2], [2, 1], [1, 1, 1], [2]]),
    }
    again = chance.random()
    if len(case["calls"]) > 1 and not runtime.startswith("parameter_server"):
        case |= (
            {"resumed": True}
            if again < 0.15
            else {"moved": chance.choice([name for name in MOVABLE if name != runtime])}
            if again < 0.25
            else {}
        )
    if "resumed" in case and runtime.startswith("mesh"):
        mesh_space.compress(chance, model, options, case["options"])
    elif workers > 1 and again > 0.25 and not runtime.startswith("parameter_server") and chance.random() < 0.12:
        kinds = ["order"] + (["input", "target"] if data["source"] == "arrays" else [])
        data["differs"] = chance.choice(kinds + (["weight"] if len(kinds) > 1 and data["weights"] != "none" else []))
    return case


def replicas_of(runtime: str, options: Mapping[str, Any]) -> int:
    """Returns the number of copies of the model."""
    _, workers, replicas = RUNTIMES[runtime]
    return mesh_space.replicas(options, workers) if runtime.startswith("mesh") else replicas


def _fit(chance: random.Random, runtime: str) -> dict[str, Any]:
    model = draw_model(chance)
    model["blocks"] = [name for block in model["blocks"] for name in ([block] if isinstance(block, str) else block)]
    data = draw_data(chance, model)
    return {
        "kind": "fit",
        "seed": chance.randrange(10**6),
        "runtime": runtime,
        "model": model,
        "data": data,
        **fit_space.draw(chance, model, data),
    }


@cache
def _fitting(shape: str) -> tuple[list[str], list[float]]:
    """Returns (blocks that work on this shape, how often each is drawn)."""
    fitting = [name for name, (shapes, _) in models.BLOCKS.items() if shape in shapes.split() and name not in UNDRAWN]
    often, seldom = ("batch_norm", "mean_loss", "sum_loss", "activity_loss"), ("running_mean", "centered", "dropout")
    return fitting, [3 if name in often else 0.3 if name in (*seldom, *models.NO_SUMS) else 1 for name in fitting]


def draw_model(chance: random.Random) -> dict[str, Any]:
    inputs = chance.choice(["rows", "rows", "grid", "steps", "steps", "both"])
    shape = models.shape_of(inputs)
    fitting, weights = _fitting(shape)
    blocks: list = chance.choices(fitting, weights, k=chance.randint(1, 3))
    if shape != "grid" and chance.random() < 0.15:
        blocks = [[block] for block in blocks]
    head = chance.choice(
        ["classes", "classes", "values", "dict"]
        if shape != "steps"
        else ["classes", "values", "tokens", "tokens", "dict"]
    )
    model = {"inputs": inputs, "blocks": blocks, "head": head, **_maybe(chance, 0.15, {"withheld": True}, {})}
    if inputs in ("steps", "both"):
        # Only few rows of the large table are looked up; only these travel and are updated.
        names = [name for name in models.EMBEDDINGS if name not in OTHER_MASKS]
        model["embedding"] = chance.choices(names, [3 if name == "embedding_large" else 1 for name in names])[0]
    return model


def draw_data(chance: random.Random, model: Mapping[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "size": chance.randint(13, 40),
        "source": chance.choices(["arrays", "object", "dataset"], [4, 2, 1])[0],
        "weights": chance.choice(
            ["none", "none", "samples", "zeros", *(["tokens", "token_zeros"] if model["head"] == "tokens" else [])]
        ),
    }
    if model["inputs"] in ("rows", "grid", "both"):
        data |= _maybe(chance, 0.15, {"constant": True}, {}) | _maybe(
            chance, 0.1, {"offset": chance.choice([100, 1000])}, {}
        )
        data |= _maybe(chance, 0.1, {"nan": chance.randrange(100)}, {})
    if model["inputs"] in ("steps", "both"):
        data |= _maybe(chance, 0.5, {"padded": True}, {})
    if data["source"] == "object":
        data |= _maybe(chance, 0.3, {"mixed": True}, {})
    return data | _maybe(chance, 0.3, {"duplicates": True}, {})


def draw_options(chance: random.Random, model: Mapping[str, Any]) -> dict[str, Any]:
    optimizer = chance.choices(
        ["sgd", "momentum", "adam", "adamw", "lion", "lamb", "adafactor"], [6, 4, 3, 2, 0.5, 0.5, 0.5]
    )[0]
    return {
        "optimizer": optimizer,
        "learning_rate": chance.choice([0.3, 0.1]) if optimizer in ("sgd", "momentum") else 0.01,
        "accumulation": chance.choice([1, 1, 2, 3]),
        "clip_norm": _maybe(chance, 0.3, chance.choice([0.1, 0.5])),
        "ema": _maybe(chance, 0.2, 0.7),
        "weight_decay": _maybe(chance, 0.3, 0.1),
        "weight_decay_exclude": _maybe(chance, 0.2, chance.choice(["", "dense", "kernel", "table"])),
        "precision": chance.choices([None, "bfloat16", "float16"], [8, 1, 1])[0],
        "loss_scale_initial": 1024.0,
        "on_nan": _maybe(chance, 0.3, "skip"),
        "jit_compile": _maybe(chance, 0.05, True),
        "recompute": _maybe(chance, 0.7, "block") if isinstance(model["blocks"][0], list) else None,
        "schedule": _maybe(chance, 0.3, chance.choice(["linear", "cosine", "wsd"])),
        "warmup_steps": _maybe(chance, 0.2, 1),
        "label_smoothing": _maybe(chance, 0.2, 0.1) if model["head"] in ("classes", "tokens") else None,
        "shuffle": _maybe(chance, 0.3, False),
        "compression": _maybe(chance, 0.08, "bf16"),
        "objective": "tests.fuzz.objectives:both" if model["head"] == "dict" else None,
        "fused_batchnorm": _maybe(chance, 0.3, False) if "batch_norm" in str(model["blocks"]) else None,
    }


def flat_blocks(case: Mapping[str, Any]) -> list[str]:
    return [name for block in case["model"]["blocks"] for name in ([block] if isinstance(block, str) else block)]


def conflicts(case: Mapping[str, Any]) -> str:
    """Why a case cannot be compared, or is not allowed; "" if it can."""
    if "stored" in case and not {"resumed", *resume_space.KEYS} & set(case) and "backup" not in case.get("fit", {}):
        return "nothing goes on from what is stored"
    if "data_in_store" in case and (why := stored_data.conflicts(case)):
        return why
    if "gpu" in case and (why := gpu_form.conflicts(case, flat_blocks(case))):
        return why
    if "floored_loss" in flat_blocks(case) and case["model"]["inputs"] not in ("rows", "grid"):
        return "rows of whole numbers, which are tried as they are, may all lie on one side of the limit"
    if case["kind"] == "fit":
        return fit_space.conflicts(case, flat_blocks(case))
    options, data, blocks, runtime = case["options"], case["data"], flat_blocks(case), case["runtime"]
    several = RUNTIMES[runtime][1] > 1 or RUNTIMES[runtime][2] > 1
    if runtime.startswith("mesh") and (why := mesh_space.conflicts(case, blocks, RUNTIMES[runtime][1])):
        return why
    if runtime.startswith("parameter_server") and (why := _server_conflicts(case, blocks)):
        return why
    if "moved" in case and (why := _moved_conflicts(case, blocks)):
        return why
    if resume_space.KEYS & set(case) and (why := _changed_conflicts(case, blocks, several)):
        return why
    if options["optimizer"] in ("adam", "adamw", "lamb") and "bfloat16" in blocks:
        return "a decay that is 1"
    if options["optimizer"] == "lamb" and "float16" in blocks:
        return "its norms over- and underflow"
    if "nan" in data and options.get("on_nan") != "skip" and "rolled" not in case:
        return "a NaN ends the run"
    if "nan" in data and "running_mean" in blocks:
        return "state of its own turns NaN"
    if "running_mean" in blocks and {"offset", "duplicates", "constant"} & set(data):
        return "the rows of all replicas may look alike behind a tanh, and then nothing drifts"
    if options.get("jit_compile") and several and "batch_norm" in blocks:
        return "XLA cannot compile synchronised BatchNormalization"
    if options.get("jit_compile") and ("lstm" in blocks or "nan" in data):
        return "slow to compile"
    if options.get("compression") in ("int8", "topk", "powersgd") and not (
        runtime.startswith("mesh") and {"resumed", "changed"} & set(case)
    ):
        return "bit for bit only"
    if options.get("compression") in ("bf16", "fp16") and (
        not several or runtime.startswith("horovod") or options["optimizer"] not in ("sgd", "momentum")
    ):
        return "for several replicas only"
    if options.get("warmup_steps", 0) >= sum(case["calls"]) and options.get("schedule"):
        return "no step to decay"
    if data["size"] < options["global_batch"]:
        return "fewer samples than a batch"
    if set(models.NO_SUMS) & set(blocks) and options["accumulation"] > 1 and set(blocks) & models.STATES:
        return "the oracle takes the rows of all micro-batches at once"
    if models.MIXING & set(blocks) and ("differs" in data or set(blocks) & {*models.NO_SUMS, "spectral"}):
        return "which refusal comes first is not looked at"
    if "inner_metric" in blocks:
        return "state of a worker's rows"
    if options.get("recompute") and set(blocks) & {"draws", "keeps"}:
        return "what would be another one in the backward pass"
    goes_on = {"resumed", "moved", *resume_space.KEYS} & set(case)
    if "differs" in data and (RUNTIMES[runtime][1] == 1 or goes_on or "nan" in data):
        return "nothing to compare"
    if "differs" in data and data["source"] != "arrays" and data["differs"] != "order":
        return "some samples are compared"
    if "mixed" in data and data["source"] != "object":
        return "arrays have one type"
    if "dropout" in blocks and ("resumed" not in case or "moved" in case):
        return "each replica has masks of its own, and the oracle others"
    return ""


def _server_conflicts(case: Mapping[str, Any], blocks: list[str]) -> str:
    options = case["options"]
    if "differs" in case["data"]:
        return "the chief alone reads"
    if set(blocks) & {"batch_norm", "running_mean", "keeps", "grown", "spectral"}:
        return "statistics are of what one worker has"
    if "draws" in blocks:
        return "tf.random is refused"
    if case["data"]["weights"] != "none" and set(blocks) & {*models.SUMS_AND_MEANS, "dense_l2"}:
        return "cannot bring together losses that layers add and weighted samples"
    if (
        options.get("precision") == "float16"
        or options["optimizer"] == "adafactor"
        or options.get("jit_compile")
        or options.get("compression")
        or options.get("recompute")
    ):
        return "not with parameter servers"
    return "not found by number" if case["data"]["source"] != "arrays" else ""


def _changed_conflicts(case: Mapping[str, Any], blocks: list[str], several: bool) -> str:
    if "changed" in case:
        later = resume_space.after(case)
        least = case["options"]["accumulation"] * replicas_of(case["runtime"], case["options"])
        if later["options"]["global_batch"] < least:
            return "micro-batches without a sample"
        kind = later["options"]["compression"] if "compression" in case["changed"] else "none"
        if kind == "none":
            later["options"].pop("compression", None)
        if kind not in resume_space.LOSSY and (why := conflicts(later)):
            return why
    return resume_space.conflicts(case, blocks, several)


def _moved_conflicts(case: Mapping[str, Any], blocks: list[str]) -> str:
    there = {
        **case,
        "runtime": case["moved"],
        "options": {name: value for name, value in case["options"].items() if name not in MESH_ONLY},
    }
    del there["moved"]
    least = case["options"]["accumulation"] * RUNTIMES[case["moved"]][2]
    if (
        case["options"].get("compression")
        or case["options"]["global_batch"] < least
        or "batch_norm" in blocks
        and case["options"].get("jit_compile")
    ):
        return "not there"
    return conflicts(there)


def features(case: Mapping[str, Any]) -> list[str]:
    """Returns the features that were drawn, for the counts."""
    model = case["model"]
    found = [f"block:{name}" for name in flat_blocks(case)] + [f"inputs:{model['inputs']}", f"head:{model['head']}"]
    found += [f"embedding:{model['embedding']}"] if "embedding" in model else []
    found += [
        f"model:{name}"
        for name in ("withheld", "shared", "unlike", "frozen_first", "places_normed", "probabilities")
        if name in model
    ]
    found += [f"model:named_{what}" for what in model.get("named", ())]
    for data in (case["data"], *case.get("again", ())):
        found += [f"data:{name}" for name in data if name not in ("size", "source", "weights", "draw")] + [
            f"source:{data['source']}",
            f"weights:{data['weights']}",
        ]
    found += ["option:graph_optimized"] if case.get("optimized") else []
    found += ["option:stored"] if case.get("stored") else []
    found += ["option:gpu"] if case.get("gpu") else []
    found += stored_data.features(case)
    found += fit_space.features(case) if case["kind"] == "fit" else _train_features(case)
    return sorted(set(found))


def _train_features(case: Mapping[str, Any]) -> list[str]:
    options = case["options"]
    found = [f"optimizer:{options['optimizer']}", f"precision:{options.get('precision', 'float32')}"]
    found += [
        f"option:{name}"
        for name in options
        if name not in MESH_ONLY
        and name
        not in (
            "optimizer",
            "precision",
            "learning_rate",
            "global_batch",
            "accumulation",
            "loss_scale_initial",
            "objective",
            "shuffle",
        )
    ]
    found += [f"compression:{options['compression']}"] if "compression" in options else []
    found += ["option:own_mask"] if options.get("objective") == MASKED else []
    found += ["option:objective_that_mixes"] if options.get("objective") == HARDEST else []
    found += ["option:accumulation"] if options["accumulation"] > 1 else []
    found += ["option:unshuffled"] if options.get("shuffle") is False else []
    found += ["option:steps_per_loop"] if max(case["calls"]) > 1 else []
    found += ["oracle:evaluated"] if case.get("evaluate", True) else []
    found += resume_space.features(case)
    found += ["oracle:resumed"] if "resumed" in case else ["oracle:moved"] if "moved" in case else []
    found += mesh_space.features(case) if case["runtime"].startswith("mesh") else []
    return found + (
        ["batch:uneven"]
        if options["global_batch"] % (options["accumulation"] * replicas_of(case["runtime"], options))
        else []
    )
