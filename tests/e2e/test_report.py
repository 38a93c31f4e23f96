"""Goodput and the report of real runs, one of them killed twice, and the page in a real browser."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from tests.e2e.browser import BROWSER, needs_browser
from tests.e2e.job import CLUSTERS, ENVIRONMENT, records, run, start
from tfdist.telemetry.goodput import account
from tfdist.telemetry.plot_style import PART_COLORS, RUN_COLORS

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

FLAGS = [
    *CLUSTERS,
    "--steps=60",
    "--log_every=5",
    "--steps_per_loop=1",
    "--save_every=10",
    "--eval_every=20",
    "--progress=none",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """ "whole": undisturbed, one worker.

    "killed": two workers; rank 1 is killed at step 27 (rank 0 says so), rank 0 at step 48 (nobody does).
    """
    found = {name: tmp_path_factory.mktemp("report") / name for name in ("whole", "killed")}
    run(1, [*FLAGS, f"--run_dir={found['whole']}"])
    process = start(
        2,
        [*FLAGS, "--seed=3", f"--run_dir={found['killed']}"],
        ("--max_restarts=3",),
        {"TFDIST_FAULTS": "1:27:kill,0:48:kill"},
    )
    try:
        output, _ = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0 and output.count("restart number") == 2, output
    return found


def seconds(record: dict) -> float:
    return datetime.fromisoformat(record["time"]).timestamp()


def test_goodput_of_a_run_that_was_killed_twice(folders):
    log = records(folders["killed"])
    goodput = account(log)
    attempts = [[record for record in log if record["attempt"] == attempt] for attempt in range(3)]
    assert [attempt[0]["kind"] for attempt in attempts] == ["start"] * 3 and attempts[2][-1]["kind"] == "end"
    begin = seconds(log[0]) - log[0]["values"]["startup_s"]
    assert goodput.wall_s == pytest.approx(seconds(log[-1]) - begin, abs=0.01)
    assert sum(goodput.parts.values()) == pytest.approx(goodput.wall_s, abs=1e-6) and goodput.parts["other"] < 1
    # Restarts: from the last event to the first new step, which lies n steps before the first train event.
    expected = 0.0
    for before, attempt in zip(attempts, attempts[1:], strict=False):
        told = [record for record in attempt if record["kind"] == "train"]
        pace = statistics.median(1 / record["values"]["perf/steps_per_s"] for record in told[1:])
        pauses = sum(value for name, value in told[0]["values"].items() if name.startswith("pause/"))
        last = before[-1]
        if last["kind"] == "error":  # the error came after the death: what no step explains is part of the restart
            train = [record for record in before if record["kind"] == "train"]
            paces = [1 / record["values"]["perf/steps_per_s"] for record in train[1:]]
            last = [record for record in before if record["kind"] != "error"][-1]
            expected -= (before[-1]["step"] - last["step"]) * statistics.median(paces)
        expected += seconds(told[0]) - pauses - (told[0]["step"] - attempt[0]["step"]) * pace - seconds(last)
    assert goodput.parts["restart"] == pytest.approx(expected, abs=0.5)
    assert [restart.to_step for restart in goodput.restarts] == [attempts[1][0]["step"], attempts[2][0]["step"]]
    assert ("PeerLostError" in goodput.restarts[0].reason) == (
        attempts[0][-1]["kind"] == "error"
    )  # TensorFlow may abort rank 0 first
    assert goodput.restarts[1].reason == "no final event: it was killed"
    assert (
        goodput.lost_steps
        == sum(
            max(0, before[-1]["step"] - attempt[0]["step"])
            for before, attempt in zip(attempts, attempts[1:], strict=False)
        )
        > 0
    )
    assert (goodput.state, goodput.unsaved_steps) == ("finished", 0)
    assert sum(span.last_step - span.first_step for span in goodput.spans if span.part == "train") == 60


def test_goodput_agrees_with_the_clock_of_an_undisturbed_run(folders):
    """The run's own clock counts the same seconds in another way."""
    parts, summary = (
        account(records(folders["whole"])).parts,
        json.loads((folders["whole"] / "summary.json").read_text()),
    )
    assert parts["train"] + parts["trace"] == pytest.approx(summary["train_s"], abs=0.5)
    assert parts["evaluation"] == pytest.approx(summary["pauses_s"]["evaluation"], abs=0.5)
    (begun,) = records(folders["whole"], kind="start")
    assert parts["lost"] == parts["restart"] == 0 and parts["other"] < 0.5
    assert parts["startup"] >= begun["values"]["startup_s"] > 0.1


@pytest.fixture(scope="module")
def page(folders) -> Path:
    found = folders["whole"].parent / "page.html"
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.report", *map(str, folders.values()), f"--out={found}", "--text"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout.count("  goodput  ") == 2 and f"wrote {found}" in done.stdout, (
        done.stdout + done.stderr
    )
    return found


def test_page_of_two_runs(page):
    text = page.read_text()
    for caption in (
        "Loss",
        "Throughput",
        "Learning rate",
        "Gradient norm",
        "Step times",
        "Stragglers: killed",
        "Checkpoints: killed",
    ):
        assert f"<figcaption>{caption}</figcaption>" in text
    assert text.count("--seed") == 2 and "no final event: it was killed" in text


@needs_browser
def test_the_page_in_a_browser(page, tmp_path):
    """What the browser has read is the whole page, and what it has drawn has the colours of the parts and of both
    runs.
    """
    from PIL import Image

    picture = tmp_path / "page.png"
    browser = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--force-color-profile=srgb",
        "--window-size=1240,4000",
    ]
    read = subprocess.run([*browser, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120).stdout
    assert read.count("<figure") == page.read_text().count("<figure") > 8 and read.rstrip().endswith("</html>")
    subprocess.run([*browser, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=120, check=True)
    drawn = {color for _, color in Image.open(picture).convert("RGB").getcolors(maxcolors=1 << 24)}
    wanted = [PART_COLORS[part] for part in ("train", "lost", "restart", "startup")] + [RUN_COLORS[0], RUN_COLORS[1]]
    assert {tuple(bytes.fromhex(color[1:])) for color in wanted} <= drawn
