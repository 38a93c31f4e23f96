"""What tfdist must refuse, and with which message; and what else it may refuse.

A case that must be refused has no right result: any number would be silent damage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.fuzz import data_order, fit_space, models, resume_space, space


class Refusal(NamedTuple):
    """The class of an error, and a regular expression for its message."""

    error: str
    sentence: str

    def is_said(self, error: str, sentence: str) -> bool:
        return error == self.error and re.search(self.sentence, sentence) is not None


# What tfdist may refuse to do. Any other refusal is a failure.
ALLOWED = (
    Refusal("ConfigError", r"leaves some of \d+ replicas x \d+ micro-batches empty"),
    Refusal("ConfigError", r"--mesh has model=\d+, whose micro-batches after the first must be of one size"),
    Refusal("ConfigError", r"layer \w*spectral\w* sets its weight \S+ in the forward pass"),
    Refusal("ConfigError", r"--mesh has pipe=, whose stages pass on one tensor"),
    Refusal("ConfigError", r"--mesh has pipe=\d+, over which the state of --optimizer=adafactor cannot be spread"),
    Refusal("ConfigError", r"Losses that layers add, and regularizers, do not work with weighted samples"),
    Refusal("ConfigError", r"--jit_compile cannot compile synchronized BatchNormalization over several replicas"),
    Refusal("ConfigError", r"^XLA compiles the forward pass, which draws by tf.random"),
    Refusal("ConfigError", r"--strategy=parameter_server cannot combine losses that layers add and weighted samples"),
)
OTHER_SAMPLES = Refusal("DataError", r"have different samples, or a different order, in \S*train")
OTHER_BATCHES = Refusal("DataError", r"have different batches")
NO_MEAN_OR_SUM = Refusal("ConfigError", r"neither a mean nor a sum over the rows")
MIXED_ROWS = Refusal("ConfigError", r"returns for a row depends on the other rows of its batch")
MIXED_OBJECTIVE = Refusal("ConfigError", r"^--objective=\S+: its result for a sample depends on the other samples")
KEPT = Refusal(
    "ConfigError", r"^What the call of layer \S+ keeps as its attribute 'kept' may hold the rows of one worker"
)
EAGER_POSITIONS = Refusal("ConfigError", r"looks up rows of \S+ whatever the batch is")
OWN_CALL = Refusal("ConfigError", r"^--(recompute|mesh)[^:]*: Withheld \w+ has its own call")
CUT_CHANNELS = Refusal(
    "ConfigError", r"cuts layers of \S+ by their names, but then it computes something else in training"
)
SHARED = Refusal(
    "ConfigError", r"^--mesh\S*, but layer shared sets its weight shared/calls in the forward pass, which stages"
)
UNLIKE = Refusal("ConfigError", r"^Rank \d+ trains something else than rank 0; they differ first in layer")
ALL_SKIPPED = Refusal("DivergedError", r"in each of the last \d+ steps up to step \d+, so all of them were skipped")
ANOTHER_CONFIGURATION = Refusal("CheckpointError", r"belongs to another configuration \(--(global_batch|compression): ")
NO_MULTIPLE = Refusal("CheckpointError", r"has consumed \d+ samples, not a multiple of --global_batch=")
NOT_CARRIED = Refusal("CheckpointError", r"--compression carries errors .*: there are none in the checkpoint, and some")
TOO_OFTEN = Refusal("DivergedError", r"became NaN or infinite before step \d+, after \d+ rollbacks")
DRAWS = Refusal(
    "ConfigError", r"^--deterministic guarantees that resumed runs repeat, but the step draws by tf\.random"
)
DRIFT = Refusal("DivergedError", r"^The weights of (rank|replica) .* differ from")


def allowed(case: Mapping[str, Any], error: str, sentence: str) -> bool:
    expected = (*ALLOWED, NO_MEAN_OR_SUM) if set(models.NO_SUMS) & set(space.flat_blocks(case)) else ALLOWED
    if case["model"].get("embedding") == "embedding_batch_mask":  # need not be said if no layer passes the mask on
        expected = (*expected, MIXED_ROWS)
    if "nan" in case["data"] and case["runtime"].startswith("parameter_server"):  # these cases run the whole loop
        expected = (*expected, ALL_SKIPPED)
    return any(each.is_said(error, sentence) for each in expected)


def demanded(case: Mapping[str, Any]) -> Refusal | None:
    """Returns the refusal that a case must get; None if it must be computed."""
    blocks, data = space.flat_blocks(case), case["data"]
    if case["runtime"] == "fit:1":
        return None
    if "unlike" in case["model"] and space.RUNTIMES[case["runtime"]][1] > 1:
        return UNLIKE
    if case["kind"] == "fit":
        if models.MIXING & set(blocks):
            return MIXED_ROWS
        if case["model"].get("class") == fit_space.KEPT:
            return KEPT
        if "positions" in blocks and case["compile"].get("run_eagerly"):
            return EAGER_POSITIONS
        # A difference in the first batch does no harm: all workers then take the chief's batches.
        return OTHER_BATCHES if "differs_at" in data else None
    if "differs" in data:
        return OTHER_SAMPLES
    runtimes = {case["runtime"], case.get("moved", case["runtime"])}
    copies = max(space.replicas_of(runtime, case["options"]) for runtime in runtimes)
    workers = max(space.RUNTIMES[runtime][1] for runtime in runtimes)
    if models.MIXING & set(blocks) and max(copies, workers, case["options"]["accumulation"]) > 1:
        return MIXED_ROWS
    if case["options"].get("objective") == space.HARDEST:
        return MIXED_OBJECTIVE
    if case["model"].get("around") == models.MIXES_CHANNELS:
        return CUT_CHANNELS
    if "withheld" in case["model"] and (case["options"].get("recompute") or "pipe=" in case["options"].get("mesh", "")):
        return OWN_CALL
    if "shared" in case["model"]:
        return SHARED
    if "running_mean" in blocks and copies > 1:
        return DRIFT
    if "rolled" in case and "draws" in blocks:  # such runs are deterministic
        return DRAWS
    if "rolled" in case and data_order.path_of(case).is_ended:
        return TOO_OFTEN
    return _of_what_changed(case) if "changed" in case else None


def _of_what_changed(case: Mapping[str, Any]) -> Refusal | None:
    changed, options = case["changed"], case["options"]
    if not changed["allowed"]:
        return ANOTHER_CONFIGURATION
    if changed.get("compression", "none") in resume_space.LOSSY:
        return NOT_CARRIED
    consumed = case["calls"][0] * options["global_batch"]
    return NO_MULTIPLE if consumed % changed.get("batch", consumed) else None


def breaks_off(case: Mapping[str, Any]) -> bool:
    """Whether the workers cannot continue together after the refusal, which comes in the middle of a step."""
    return demanded(case) is OTHER_BATCHES
