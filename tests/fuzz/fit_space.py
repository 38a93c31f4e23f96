"""What can be drawn for tfdist.fit: Keras' own arguments."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from tests.fuzz import models

CLASSES = (
    "GradientPenalty",
    "Adversarial",
    "TwoUpdates",
    "TwoCalls",
    "WeightsInTheLoss",
    "OwnOutput",
    "Noisy",
    "NoisyElsewhere",
    "Relabelled",
    "InnerModel",
)
KEPT, TWO_OPTIMIZERS = "KeptInTheLoss", "TwoOptimizers"  # drawn in place of one of these
LOOPS = ("own", "on_batch", "gan", "gan_penalty")
BACKUP_EPOCHS = 3
# Sometimes drawn in place of another optimizer -> its learning rate.
RARE_OPTIMIZERS = {
    "adadelta": 1.0,
    "adafactor": 0.01,
    "adagrad": 0.1,
    "adamax": 0.01,
    "ftrl": 0.1,
    "lamb": 0.01,
    "lion": 0.01,
    "muon": 0.01,
    "nadam": 0.01,
    "nesterov": 0.1,
    "rmsprop": 0.01,
}
# The same for losses and metrics, by the head of the model.
RARE_LOSSES = {
    "classes": ["annealed_entropy", "focal"],
    "tokens": ["annealed_entropy"],
    "values": ["annealed", "log_cosh"],
}
RARE_METRICS = {"classes": ["auc", "spread"], "tokens": ["spread"], "values": ["spread", "cosine"]}
OF_PROBABILITIES = "entropy_of_probabilities"
# Blocks that add losses in the type they compute in.
ADDING = {*models.SUMS_AND_MEANS, *models.NO_SUMS}


def draw(chance: random.Random, model: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Draws the parts of a case other than model and data, and changes these two to suit."""

    def maybe(probability: float, value: Any) -> Any:
        return value if chance.random() < probability else None

    if model["inputs"] == "both" and chance.random() < 0.4:
        model["inputs"] = "averaged"
    data["source"] = chance.choice(["arrays", "arrays", "dataset", "pages", "generator"])
    data.pop("mixed", None)
    if model["inputs"] in ("rows", "grid") and model["head"] in ("classes", "values") and chance.random() < 0.5:
        model["class"] = chance.choices(CLASSES, [2 if name.startswith("Noisy") else 1 for name in CLASSES])[0]
    optimizer = chance.choices(["sgd", "momentum", "adam", "adamw"], [5, 3, 2, 1])[0]
    losses = {
        "classes": ["entropy", "entropy", "entropy_sum", "ignore_class", "masked_mean"],
        "tokens": ["entropy", "entropy", "ignore_class", "masked_mean"],
        "values": ["mse", "huber", "cosine", "dice", "tversky"],
        "dict": ["mse"],
    }[model["head"]]
    metrics = {
        "classes": ["accuracy", "top_k", "largest", "iou"],
        "tokens": ["accuracy", "largest"],
        "values": ["mae", "r2", "rmse", "largest"],
        "dict": ["mae"],
    }[model["head"]]
    compiled = {
        "optimizer": optimizer,
        "learning_rate": 0.1 if optimizer in ("sgd", "momentum") else 0.01,
        "loss": chance.choice(losses),
        "metrics": chance.sample(metrics, chance.randint(0, min(2, len(metrics)))),
        "weighted_metrics": maybe(0.2, True),
        "steps_per_execution": maybe(0.2, 2),
        "jit_compile": maybe(0.05, True),
        "precision": maybe(0.1, chance.choice(["bfloat16", "float16"])),
        "gradient_accumulation_steps": maybe(0.15, 2),
        "weight_decay": maybe(0.2, 0.1),
        **chance.choice([{}, {}, {"clipnorm": 0.1}, {"global_clipnorm": 0.3}, {"clipvalue": 0.02}]),
        **chance.choice([{}, {}, {}, {"use_ema": True, "ema_momentum": 0.7}]),
    }
    batch = chance.randint(3, 12)
    steps = maybe(0.25, 3) if data["source"] in ("arrays", "dataset", "pages") else 3
    fit = {
        "batch_size": batch,
        "epochs": chance.choice([1, 2]),
        "steps_per_epoch": steps,
        "initial_epoch": maybe(0.1, 1),
        "shuffle": maybe(0.4, True),
        "validation": chance.choice([None, "data", "split" if data["source"] == "arrays" else "data"]),
        "validation_freq": maybe(0.1, 2),
        "class_weight": maybe(0.2, True) if model["head"] == "classes" else None,
        "callbacks": maybe(0.3, [chance.choice(["early_stopping", "plateau", "scheduler", "swap_ema"])]),
        "evaluate": maybe(0.4, True),
        "large": maybe(0.3, True),
    }
    if data["source"] == "arrays" and model["head"] != "dict" and "class" not in model and chance.random() < 0.25:
        return _loop(chance, model, compiled, fit)
    if chance.random() < 0.1:
        fit |= {"epochs": BACKUP_EPOCHS, "initial_epoch": None, "backup": chance.choice([1, 2])}
    elif chance.random() < 0.1:
        data["differs"] = chance.choice(
            ["order", "input", "target", *(["weight"] if data["weights"] != "none" else [])]
        )
        if data["differs"] != "order" and chance.random() < 0.3:
            data["differs_at"] = batch
    compiled["run_eagerly"] = maybe(0.1, True)
    return {"compile": _given(compiled), "fit": _given(fit)}


def _loop(
    chance: random.Random, model: dict[str, Any], compiled: dict[str, Any], fit: dict[str, Any]
) -> dict[str, Any]:
    """Draws a custom training loop, with the parts of compile and fit that apply to it."""
    kept = ("optimizer", "learning_rate", "loss", "weight_decay", "clipnorm", "global_clipnorm", "clipvalue")
    loop = chance.choice(LOOPS if model["head"] == "values" else LOOPS[:2])
    if loop == "on_batch":
        compiled = {name: value for name, value in compiled.items() if name != "steps_per_execution"}
        fit = {name: fit[name] for name in ("batch_size", "epochs", "class_weight")}
        return {"compile": _given(compiled), "fit": _given(fit), "loop": loop}
    compiled["run_eagerly"] = True if chance.random() < 0.2 else None
    kept = (*kept, "run_eagerly")
    return {
        "compile": {**_given({name: compiled.get(name) for name in kept}), "metrics": []},
        "fit": {"batch_size": fit["batch_size"], "epochs": fit["epochs"]},
        "loop": loop,
    }


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sorted(options.items()) if value is not None}


def may_count_rates(case: Mapping[str, Any]) -> bool:
    """Whether the learning rate may be a schedule, which no callback can set."""
    return not {"plateau", "scheduler"} & set(case["fit"].get("callbacks", ())) and "loop" not in case


def with_rare(case: dict[str, Any], chance: random.Random) -> None:
    """Replaces common optimizers, losses and metrics by rarely used ones."""
    compiled, head = case["compile"], case["model"]["head"]
    kinds = list(RARE_OPTIMIZERS) if "loop" not in case else ["rmsprop", "nesterov"]
    if chance.random() < 0.25:
        compiled["optimizer"] = chance.choice(kinds)
        compiled["learning_rate"] = RARE_OPTIMIZERS[compiled["optimizer"]]
    if head == "dict" and chance.random() < 0.5:
        compiled["loss_weights"] = True
    if head in RARE_LOSSES and "class" not in case["model"] and "loop" not in case:
        if chance.random() < 0.2:
            compiled["loss"] = chance.choice(RARE_LOSSES[head])
        if compiled["metrics"] and chance.random() < 0.3:
            compiled["metrics"] = [chance.choice(RARE_METRICS[head]), *compiled["metrics"][1:]]
        own = random.Random(case["seed"])  # the rest of the case is the same without it
        if head == "classes" and own.random() < 0.2:
            case["model"]["probabilities"], compiled["loss"] = True, OF_PROBABILITIES


def with_plain_attribute(case: dict[str, Any], chance: random.Random) -> None:
    """Replaces the loss by one that reads a plain attribute, which a callback changes: in steps that run eagerly."""
    if case["model"]["head"] != "values" or "class" in case["model"] or "loop" in case:
        return
    if chance.random() < (0.3 if "backup" in case["fit"] else 0.03):
        for name in ("jit_compile", "steps_per_execution"):
            case["compile"].pop(name, None)
        case["compile"] |= {"loss": "tempered", "run_eagerly": True}
        case["fit"]["callbacks"] = [*case["fit"].get("callbacks", ()), "temper"]


def with_kept_tensors(case: dict[str, Any], chance: random.Random) -> None:
    """Sometimes replaces the train_step by one that reads what a layer keeps, and adds such a layer."""
    if "class" in case["model"] and chance.random() < 0.15:
        case["model"]["class"] = KEPT
        blocks = case["model"]["blocks"]
        blocks.append("kept_loss" if isinstance(blocks[0], str) else ["kept_loss"])


def backed_up(case: Mapping[str, Any], chance: random.Random) -> dict[str, Any]:
    """Returns the case, sometimes as a plain fit that is killed. The result may be one that `conflicts` rules out."""
    fit = case["fit"]
    if chance.random() >= 0.3 or "backup" in fit or "loop" in case or "differs" in case["data"]:
        return dict(case)
    found = {name: value for name, value in case.items() if name not in ("again", "gpu")}
    found["fit"] = {name: value for name, value in fit.items() if name not in ("initial_epoch", "large")}
    found["fit"] |= {
        "epochs": BACKUP_EPOCHS,
        "plain_backup": {
            "save_freq": chance.choice(["epoch", 1, 2, 3, 5]),
            "double": chance.random() < 0.3,
            "kills": [chance.randrange(10**4) for _ in range(chance.choice([1, 1, 2]))],
            "kills_first": chance.random() < 0.5,
            "place": chance.choice(["first", "last"]),
        },
    }
    own = random.Random(case["seed"])  # the rest of the case is the same without it
    if "class" in case["model"] and own.random() < 0.4:
        found["model"] = {**case["model"], "class": TWO_OPTIMIZERS}
    if "callbacks" not in fit and "counting_rate" not in case["compile"] and chance.random() < 0.6:
        found["fit"]["callbacks"] = [chance.choice(["early_stopping", "plateau", "scheduler", "ledger"])]
    return found


def conflicts(case: Mapping[str, Any], blocks: list[str]) -> str:
    """Why a case cannot be compared with Keras, or is not valid; "" if it can."""
    compiled, fit, data = case["compile"], case["fit"], case["data"]
    if "nan" in data or set(blocks) & {"float16", "bfloat16", "float64", "running_mean"}:
        return "not here"
    if case["model"].get("class") == "NoisyElsewhere" and {"backup", "plain_backup"} & set(fit):
        return "a backup holds what belongs to the model"
    if "plain_backup" in fit and (case["runtime"] != "fit:1" or {"again", "gpu", "loop"} & set(case)):
        return "a plain fit has one worker"
    if models.MIXING & set(blocks) and data.get("negative"):
        return "the rows that are tried may all be NaN, which tells nothing"
    if models.MIXING & set(blocks) and "differs" in data:
        return "which refusal comes first is not looked at"
    if case["model"].get("class") == KEPT and ("differs" in data or set(models.NO_SUMS) & set(blocks)):
        return "which refusal comes first is not looked at"
    if "differs" in data and (why := _differing_conflicts(case)):
        return why
    if case["model"].get("class") == TWO_OPTIMIZERS and {"precision", "gradient_accumulation_steps"} & set(compiled):
        return "the second optimizer neither scales its loss nor accumulates"
    if case["model"].get("class") == "OwnOutput" and (case["model"]["inputs"], case["model"]["head"]) != (
        "rows",
        "classes",
    ):
        return "outputs are no inputs"
    if case.get("loop") == "own" and data["weights"].startswith("token"):
        return "weights of tokens"
    if "class_weight" in fit and data["weights"] != "none":
        return "Keras takes one of both"
    if "class_weight" in fit and data["source"] == "generator":
        return "Keras takes no class weights beside a generator"
    if data["weights"] != "none" and data["weights"].startswith("token") != (case["model"]["head"] == "tokens"):
        return "Keras wants a weight for each loss"
    if ("probabilities" in case["model"]) != (compiled["loss"] == OF_PROBABILITIES):
        return "other losses take logits"
    if "largest" in compiled["metrics"] and (
        "weighted_metrics" in compiled or case["model"].get("embedding") in models.MASKS
    ):
        return "one number for a batch has no weights"
    if "precision" in compiled and compiled["loss"] in ("dice", "tversky"):
        return "a quotient whose denominator passes 0, where targets are no probabilities"
    if "precision" in compiled and set(blocks) & ADDING:
        return "Keras cannot add up losses of several types"
    if case["model"]["head"] == "dict" and data["weights"] != "none":
        return "Keras wants weights for each output"
    if "swap_ema" in fit.get("callbacks", ()) and not compiled.get("use_ema"):
        return "nothing to swap"
    if fit.get("initial_epoch", 0) >= fit["epochs"]:
        return "nothing to train"
    if (
        "gradient_accumulation_steps" in compiled
        and {"clipnorm", "use_ema"} & set(compiled)
        and case["compile"]["optimizer"] == "adam"
    ):
        return "Keras' accumulation is enough beside one of them"
    if data["source"] == "dataset" and fit.get("shuffle") and "steps_per_epoch" in fit:
        return "iterators of one shuffled dataset share a generator of seeds"
    if compiled.get("jit_compile") and "batch_norm" in blocks:
        return "slow to compile"
    if compiled.get("run_eagerly") and ({"jit_compile", "steps_per_execution"} & set(compiled)):
        return "Keras takes one of both"
    if compiled.get("run_eagerly") and case["model"]["head"] == "dict":
        return "Keras 3.15 counts the first batch twice in the shown losses of several outputs"
    if "steps_per_execution" in compiled and ("steps_per_epoch" in fit or data["source"] == "generator"):
        return "how Keras rounds is not looked at"
    if case["model"].get("class") == "Relabelled":
        if case["model"]["head"] != "classes" or set(compiled["metrics"]) - {"accuracy"}:
            return "other metrics know which labels they take"
    elif "class" in case["model"] and compiled["metrics"]:
        return "train_steps that update no metrics"
    if (
        "steps_per_epoch" in fit
        and data["source"] in ("arrays", "pages")
        and data["size"] < fit["batch_size"] * 3 * (fit["epochs"] + 1) * 1.5
    ):
        return "Keras runs out of data"
    return ""


def _differing_conflicts(case: Mapping[str, Any]) -> str:
    fit, data = case["fit"], case["data"]
    if case["runtime"] == "fit:1":
        return "there is one worker"
    if fit.get("shuffle"):
        return "the first batch may be the same"
    rows = int(data["size"] * 0.7) if fit.get("validation") == "split" else data["size"]
    if data.get("differs_at", 0) >= rows or set(models.NO_SUMS) & set(case["model"]["blocks"]):
        return "nothing differs that is read"
    return ""


def features(case: Mapping[str, Any]) -> list[str]:
    compiled, fit = case["compile"], case["fit"]
    found = [
        f"fit.loss:{compiled['loss']}",
        f"optimizer:{compiled['optimizer']}",
        f"precision:{compiled.get('precision', 'float32')}",
    ] + [f"fit.metric:{name}" for name in compiled["metrics"]]
    found += [
        f"fit.option:{name}"
        for name in compiled
        if name not in ("optimizer", "learning_rate", "loss", "metrics", "precision", "ema_momentum")
    ]
    found += [f"fit.{name}" for name in fit if name not in ("batch_size", "epochs", "callbacks", "validation")] + [
        f"fit.callback:{name}" for name in fit.get("callbacks", ())
    ]
    found += [f"fit.validation:{fit['validation']}"] if "validation" in fit else []
    found += [f"loop:{case['loop']}"] if "loop" in case else []
    if "plain_backup" in fit:
        plain = fit["plain_backup"]
        every = "epoch" if plain["save_freq"] == "epoch" else "batches"
        found += [f"plain_backup:{every}", f"plain_backup:{plain['place']}"]
    return found + ([f"train_step:{case['model']['class']}"] if "class" in case["model"] else [])
