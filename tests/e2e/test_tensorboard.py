"""TensorBoard itself on a run folder, read through a real browser: scalars, hyper-parameters, the profile."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from tests.e2e.browser import needs_browser, open_page
from tests.e2e.job import CLUSTERS, ENVIRONMENT, records, train

pytestmark = [pytest.mark.slow, needs_browser]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensorboard") / "run"
    done = train([*CLUSTERS, "--steps=40", "--log_every=5", "--eval_every=20", "--steps_per_loop=1", "--profile_steps=31:33", "--trackers=tensorboard", "--progress=none", f"--run_dir={folder}"])
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(run_dir):
    """TensorBoard's own server, on a port that it chooses."""
    server = subprocess.Popen([sys.executable, "-m", "tensorboard.main", f"--logdir={run_dir / 'tensorboard'}", "--port=0", "--host=127.0.0.1"],
                              env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    try:
        for line in server.stdout:
            lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
                yield found.group()
                break
        else:
            pytest.fail("".join(lines))
    finally:
        server.kill()
        server.wait()


def test_scalars(address, run_dir, tmp_path):
    with open_page() as page:
        page.goto(f"{address}#timeseries")
        for tag in ("train/loss", "eval/loss"):
            page.get_by_text(tag).first.wait_for()
        page.screenshot(path=tmp_path / "scalars.png")


def test_hyper_parameters(address, run_dir, tmp_path):
    with open_page() as page:
        page.goto(f"{address}#hparams")
        page.get_by_text("learning_rate").first.wait_for()
        page.screenshot(path=tmp_path / "hparams.png")


@pytest.mark.skipif(importlib.util.find_spec("tensorboard_plugin_profile") is None, reason="the package tensorboard-plugin-profile is not installed")
def test_the_profile(address, run_dir, tmp_path):
    with open_page() as page:
        page.goto(f"{address}#profile")
        page.screenshot(path=tmp_path / "profile.png")
    assert records(run_dir, kind="trace")
