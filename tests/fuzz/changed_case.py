"""A case of tfdist.train in a worker process that is resumed with another global batch, or another compression.

The oracle computes the effect of another batch. It cannot compute what a compression loses. There, the run that was
resumed from a snapshot is compared, bit for bit, with a run whose state was passed on in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.fuzz import resume_space, snapshots, stored_data, train_case

OF_COMPRESSION = "/compression_"  # in the keys of the state that a compression carries over


def run(case: dict[str, Any], runtime: Any) -> dict[str, Any]:
    """See train_case.run."""
    place = snapshots.place_of(case, runtime)
    later = {**resume_space.after(case), "changed": case["changed"]}
    later["options"]["allow_config_change"] = case["changed"]["allowed"]
    [before] = train_case.parts(case, runtime, {"save": place})
    [found] = train_case.parts(later, runtime, {"load": place})
    problems = []
    if "compression" in case["changed"]:
        [handed] = _handed_on(case, later, runtime)
        if unlike := snapshots.unlike(handed["state"], found["state"]):
            problems.append(
                f"resumed with another compression, {len(unlike)} variables are not bit for bit those of a run whose"
                f" state was handed on: {', '.join(unlike[:4])}"
            )
    return {"parts": [{**found, "arrays": {**before["arrays"], **found["arrays"]}, "problems": problems}]}


def _handed_on(case: Mapping[str, Any], later: Mapping[str, Any], runtime: Any) -> list[dict[str, Any]]:
    """Runs the same without a snapshot: the state is passed on in memory."""
    config, job, state = train_case.compose(case, runtime)
    job.step(job.iterators(0), case["calls"][0])
    arrays = state.to_host()
    stored_data.forget(config, runtime)
    config, job, state = train_case.compose(later, runtime)
    snapshots.revert(job, state, {key: array for key, array in arrays.items() if OF_COMPRESSION not in key})
    iterators = job.iterators(case["calls"][0] * case["options"]["global_batch"])
    for count in case["calls"][1:]:
        job.step(iterators, count)
    stored_data.forget(config, runtime)
    return [{"state": state.to_host()}]
