"""The fixed set of cases: what tfdist makes of drawn combinations is what plain Keras makes of them. scripts/fuzz.py
draws more.
"""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from tests.fuzz import compare, faults, fixed, models, refusals, space
from tests.fuzz import pool as pool_module
from tests.fuzz.coverage import Coverage, allowed_pairs, cases, pairs_of
from tests.fuzz.fleet import judge_all
from tests.fuzz.pool import Pool
from tests.fuzz.shrink import script, shrink
from tests.fuzz.verdict import Verdict, doubles, runs_of


def rounds_to_half(case):
    options = case.get("options", {})
    variables = {"float16", "bfloat16"} & set(space.flat_blocks(case))
    computes = options.get("precision", "float32") != "float32" or "precision" in case.get("compile", {})
    return bool(variables) or computes or "compression" in options


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_fixed_cases():
    chosen, pool = fixed.cases() + fixed.BETWEEN, Pool()
    assert not any(space.conflicts(case) for case in fixed.BETWEEN)
    try:
        pool.start({case["runtime"] for case in chosen})
        verdicts = list(judge_all(chosen, pool))
    finally:
        pool.close()
    wrong = [verdict for verdict in verdicts if verdict.bad]
    assert not wrong, "\n".join(
        f"{verdict.case['runtime']}: {'; '.join(verdict.problems)}\n  scripts/fuzz.py"
        f" --replay='{json.dumps(verdict.case)}'"
        for verdict in wrong
    )
    needlessly = [
        verdict.refused
        for verdict in verdicts
        if verdict.refused
        and not refusals.demanded(verdict.case)
        and not set(models.NO_SUMS) & set(space.flat_blocks(verdict.case))
    ]
    assert len(needlessly) <= 0.1 * len(verdicts)
    assert not [verdict.refused for verdict in verdicts if verdict.vacuous]
    # Half precision rounds as much as a fault may change; of the others most must be able to show a small difference.
    assert sum(verdict.rough > 1e-3 for verdict in verdicts if not rounds_to_half(verdict.case)) <= 0.2 * len(verdicts)


def test_the_fixed_cases_cover_what_all_that_are_drawn_for_them_cover():
    """With a third of the data, on as many graphs."""
    drawn, chosen = fixed.drawn(), fixed.cases()
    covered = [{pair for case in cases for pair in pairs_of(case)} for cases in (drawn, chosen)]
    assert covered[0] == covered[1] and len(covered[0]) > 300
    assert sum(len(space.parts(case)) for case in drawn) == 150
    assert len(drawn) == len(chosen) and sum(len(space.parts(case)) for case in chosen) <= 60


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_fault_changes_one_place(name):
    fault = faults.FAULTS[name]
    assert (faults.REPOSITORY / "tfdist" / fault.file).read_text().count(fault.text) == 1


def test_a_seed_draws_the_same_cases_again():
    assert [space.draw(3, number, list(space.RUNTIMES)) for number in range(50)] == [
        space.draw(3, number, list(space.RUNTIMES)) for number in range(50)
    ]


@pytest.mark.slow
def test_every_pair_that_can_be_drawn_comes_soon():
    runtimes = ("one_device", "mirrored:2", "fit:2")
    coverage = Coverage()
    for case in itertools.islice(cases(1, runtimes, coverage), 150):
        coverage.add(case)
    assert len(allowed_pairs(runtimes)) > 200
    assert not coverage.missing(runtimes)


def test_a_pair_is_counted_for_each_set_of_data_that_has_it():
    case = next(case for number in range(99) for case in [space.draw(8, number, ["fit:2"])] if "again" in case)
    for data in (case["data"], *case["again"]):
        data.pop("duplicates", None)
    case["again"][0]["duplicates"] = True
    coverage, count = Coverage(), 1 + len(case["again"])
    coverage.add(case)
    head, duplicates = (f"head:{case['model']['head']}", "fit:2"), ("data:duplicates", "fit:2")
    assert (coverage.pairs[head], coverage.graphs[head], coverage.runtimes["fit:2"]) == (count, 1, count)
    assert (coverage.pairs[duplicates], coverage.graphs[duplicates]) == (1, 1)


def test_groups_end_that_have_grown_or_are_idle_where_others_need_their_place(monkeypatch):
    memory = {("local", 1): 0, ("sockets", 2): 0, ("sockets", 3): 0}
    alive, started = [], []

    class Fake:
        def __init__(self, *key_and_environment):
            self.key = key = key_and_environment[:2]
            alive.append(key)
            started.append(key)

        def run(self, case):
            return [{"parts": []}]

        def memory(self):
            return memory[self.key]

        def close(self):
            alive.remove(self.key)

    monkeypatch.setattr(pool_module, "Group", Fake)
    pool = Pool(most=4)

    def run(runtime):
        pool.run({"kind": "train", "runtime": runtime, "model": {"blocks": []}, "data": {}, "options": {}})

    for runtime in ("one_device", "sockets:2", "one_device"):
        run(runtime)
    assert started == [("local", 1), ("sockets", 2)]
    run("sockets:3")  # five or six processes: the two that were used first go
    assert alive == [("local", 1), ("sockets", 3)]
    memory["local", 1] = int(2e9)
    run("mirrored:2")
    assert alive == [("sockets", 3)]


def test_a_failure_shrinks_to_its_cause():
    runtimes = list(space.RUNTIMES)
    case = next(
        case
        for number in range(500)
        for case in [space.draw(8, number, runtimes)]
        if case["kind"] == "train"
        and "clip_norm" in case["options"]
        and "batch_norm" in space.flat_blocks(case)
        and "builtin" not in case["model"]
    )

    def judge(tried):
        bad = "clip_norm" in tried["options"] and "batch_norm" in space.flat_blocks(tried)
        return Verdict(tried, ["model/0000 differs by 1"] if bad else [])

    small = shrink(judge(case), judge).case
    assert space.flat_blocks(small) == ["batch_norm"]
    assert set(small["options"]) <= {
        "clip_norm",
        "global_batch",
        "learning_rate",
        "optimizer",
        "accumulation",
        "mesh",
        "objective",
    }
    compile(script(small), "found.py", "exec")


def test_what_rounding_explains_is_no_difference_and_more_is():
    double = {"model/0000": np.array([1.0, 2.0])}
    single = {"model/0000": np.array([1.0 + 1e-7, 2.0])}
    assert not compare.differences({"model/0000": np.array([1.0, 2.0 + 1e-6])}, single, double)
    assert compare.differences({"model/0000": np.array([1.0, 2.0 + 1e-4])}, single, double)
    assert compare.differences({"model/0000": np.array([1.0, np.nan])}, single, double)


def test_one_number_that_rounding_decides_hides_no_fault_in_the_others():
    double = {"model/0000": np.array([0.0, 1.0])}
    runs = [{"model/0000": np.array([noise, 1.0])} for noise in (0.01, -0.01, 0.003)]
    first = compare.granted(double, double)
    assert compare.differences({"model/0000": np.array([-0.01, 1.0])}, double, double, first)
    bounds = compare.granted_by(runs, double, first)
    assert not compare.differences({"model/0000": np.array([-0.02, 1.0])}, double, double, bounds)
    assert compare.differences({"model/0000": np.array([0.0, 1.1])}, double, double, bounds)
    assert compare.differences({"model/0000": np.array([np.nan, 1.0])}, double, double, bounds)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["one_device", "fit:2"])
def test_the_oracle_leaves_keras_as_it_was(runtime):
    import keras

    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        case = next(
            case
            for number in range(100)
            for case in [space.draw(9, number, [runtime])]
            if len(space.flat_blocks(case)) == 1
        )
        doubles(case)
        runs_of("single", case, 0, space.parts(case)[0])
        assert keras.config.floatx() == "float32"
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
    finally:
        keras.config.set_dtype_policy("float32")
