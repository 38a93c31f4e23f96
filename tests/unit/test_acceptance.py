"""The acceptance of GPUs: stages that fail, hang or die, and what the page says of them."""

import json
import sys

import pytest

from scripts.acceptance import page, parity, run
from scripts.acceptance.stages import Stage, stages


def stage(out, name, code, seconds=30.0):
    return Stage(name, f"{name} is shown", (sys.executable, "-c", code), seconds, out / name / "found.json")


@pytest.mark.slow
def test_every_stage_has_its_verdict_and_the_others_go_on(tmp_path):
    found = tmp_path / "good" / "found.json"
    rows = [{"step": "<cnn>", "difference": 0.5, "limit": 1.0, "bar": 0.5}, {"step": "b", "limit": 1.0, "bar": 2.0}]
    chosen = [
        stage(tmp_path, "good", f"open({str(found)!r}, 'w').write({json.dumps(rows)!r}); print('all is <well>')"),
        stage(tmp_path, "bad", "print('three differ'); raise SystemExit(1)"),
        stage(tmp_path, "dies", "import os; print('then', flush=True); os.kill(os.getpid(), 11)"),
        stage(tmp_path, "hangs", "import time; print('a word', flush=True); time.sleep(600)", 2.0),
        stage(tmp_path, "absent", "print('no such GPU'); raise SystemExit(77)"),
        stage(tmp_path, "silent", ""),
    ]
    assert run.run_all(chosen, tmp_path, rehearse=True) == 1
    report = json.loads((tmp_path / "acceptance.json").read_text())
    states = {each["name"]: each["state"] for each in report["stages"]}
    assert states == {
        "good": "passed",
        "bad": "failed",
        "dies": "failed",
        "hangs": "failed",
        "absent": "left out",
        "silent": "passed",
    }
    words = {each["name"]: each["words"] for each in report["stages"]}
    assert words["bad"] == "three differ" and "It hung: ended after 2 s. Its last output: a word" in words["hangs"]
    text = (tmp_path / "acceptance.html").read_text()
    assert "all is &lt;well&gt;" in text and "<cnn>" not in text and "&lt;cnn&gt;" in text and "Rehearsal" in text
    assert text.count('fill="#cf222e"') == 1 and text.count('fill="#0969da"') == 1  # the bar above its limit is red

    assert run.run_all([stage(tmp_path, "bad", "print('mended')")], tmp_path, rehearse=False) == 1  # dies, hangs
    report = json.loads((tmp_path / "acceptance.json").read_text())
    assert {each["name"]: each["state"] for each in report["stages"]} == {**states, "bad": "passed"}


def test_stages_keep_their_order_whichever_are_repeated(tmp_path):
    for names in (["speed", "parity"], ["doctor"], ["parity"]):
        run.run_all([stage(tmp_path, name, "print('well')") for name in names], tmp_path, rehearse=True)
    report = json.loads((tmp_path / "acceptance.json").read_text())
    assert [each["name"] for each in report["stages"]] == ["doctor", "parity", "speed"]


def test_the_page_of_nothing_but_omissions():
    result = {
        "name": "a",
        "shows": "b",
        "state": "left out",
        "words": "why",
        "seconds": 0.0,
        "rows": [],
        "output": ["x"],
    }
    text = page.html_of({"machine": {"date": "today"}, "stages": [result]})
    assert "GPU acceptance" in text and page.COLORS["left out"] in text and "<pre>x</pre>" in text


def test_stages_have_names_of_their_own_and_fit_into_half_an_hour(tmp_path):
    chosen = stages(tmp_path, False, {})
    assert len({each.name for each in chosen}) == len(chosen) and not any(
        "--rehearse" in each.command for each in chosen
    )
    rehearsed = stages(tmp_path, True, {})
    assert all("--rehearse" in each.command for each in rehearsed if each.name != "doctor")


def test_a_step_that_differs_by_more_than_rounding_is_found():
    import numpy as np

    rng = np.random.default_rng(0)
    exact = rng.normal(size=1000)
    cpu = {"mlp float32": exact, "mlp bfloat16": exact * (1 + 4e-3), "mlp float16": exact * (1 + 5e-4)}
    cpu |= {f"{name} loss": np.float64(1) for name in cpu}
    alike = parity.compared(cpu, cpu, ["mlp"])
    assert len(alike) == 3 and all(row["bar"] == 0 < row["limit"] for row in alike)
    other = {**cpu, "mlp float32": exact * (1 + 2e-3)}
    (wrong,) = [row for row in parity.compared(cpu, other, ["mlp"]) if row["bar"] > row["limit"]]
    assert wrong["step"] == "mlp float32" and wrong["limit"] == pytest.approx(1.5e-3)
