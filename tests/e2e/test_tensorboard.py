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
    done = train(
        [
            *CLUSTERS,
            "--steps=40",
            "--log_every=5",
            "--eval_every=20",
            "--steps_per_loop=1",
            "--profile_steps=31:33",
            "--trackers=tensorboard",
            "--progress=none",
            f"--run_dir={folder}",
        ]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(run_dir):
    """TensorBoard's own server on the run folder, on a port that it chooses."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", f"--logdir={run_dir}", "--port=0", "--host=127.0.0.1"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output = []
        for line in server.stdout:
            output.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
                yield found.group()
                return
        pytest.fail("".join(output))
    finally:
        server.kill()
        server.wait()


def shown(value: float) -> str:
    """As the cards of TensorBoard show a number."""
    return f"{value:.4g}"


def test_scalars(address, run_dir, tmp_path):
    """Each loss is a card, whose table has the last value and its step."""
    with open_page() as page:
        page.goto(f"{address}#timeseries")
        for kind in ("eval", "train"):
            page.get_by_role("combobox", name="Filter tags (regex)").fill(f"^{kind}/loss$")
            card = page.locator("card-view", has_text=re.compile(f"{kind}\\s*/loss")).first
            card.get_by_text(
                shown(records(run_dir, kind=kind)[-1]["values"][f"{kind}/loss"]), exact=True
            ).first.wait_for()
            assert "40" in card.inner_text().split()
            page.screenshot(path=tmp_path / f"{kind}.png")


def test_hyper_parameters(address, run_dir, tmp_path):
    """The run is a trial with its flags."""
    with open_page() as page:
        page.goto(f"{address}#hparams")
        page.get_by_text(records(run_dir)[0]["run_id"], exact=True).first.wait_for()
        for flag in ("global_batch", "learning_rate", "model"):
            page.get_by_text(flag, exact=True).first.wait_for(state="attached")
        page.screenshot(path=tmp_path / "hparams.png")


@pytest.mark.thorough
@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard_plugin_profile") is None,
    reason="the package tensorboard-plugin-profile is not installed",
)
def test_the_profile(address, run_dir, tmp_path):
    """The profile plugin lists the trace, and its trace viewer finds both steps by name."""
    (trace,) = (run_dir / "tensorboard" / "plugins" / "profile").iterdir()
    with open_page() as page:
        page.goto(f"{address}#profile")
        plugin = page.frame_locator("iframe").first
        plugin.get_by_text(trace.name).first.wait_for()
        plugin.get_by_text("Overview Page").first.click()
        plugin.get_by_role("option", name="Trace Viewer").first.click()
        viewer = plugin.frame_locator("iframe").first
        viewer.get_by_text("/host:CPU").locator("visible=true").first.wait_for()
        search = viewer.get_by_placeholder("Find Events")
        search.fill("train")
        search.press("Enter")
        viewer.get_by_text(re.compile(r"^\d of 2$")).first.wait_for()
        page.screenshot(path=tmp_path / "trace.png")
