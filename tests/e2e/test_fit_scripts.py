"""Keras scripts with `tfdist.fit`, as a user runs them: one process each, TF_CONFIG."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.job import ENVIRONMENT
from tfdist.control.preflight import PortReservation
from tfdist.control.tf_config import worker_environment

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "fit_scripts"


def run(script, workers, *arguments, succeeds=True):
    """The output of each worker."""
    codes, outputs = ended(script, range(workers), *arguments)
    assert (codes == [0] * workers) == succeeds, "\n".join([str(codes), *outputs])
    return outputs


def ended(script, awaited, *arguments):
    """(exit codes, outputs) of these workers, of all up to the last of them.

    Without the launcher, which would end a worker before it can say what it noticed.
    """
    workers = max(awaited) + 1
    ports = PortReservation(workers)
    processes = []
    for rank in range(workers):
        environment = {**ENVIRONMENT, **worker_environment(ports.addresses, rank, 0, ENVIRONMENT)}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *map(str, arguments)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [processes[rank].communicate(timeout=240)[0] for rank in awaited]
    finally:
        for process in processes:
            process.kill()
        ports.close()
    return [processes[rank].returncode for rank in awaited], outputs


def history(output):
    return re.search(r"^history: .*$", output, re.MULTILINE).group()


# One line of each tutorial is another, and tfdist is imported.
CHANGES = {
    "keras_tutorial": (
        "multi_worker_model.fit(multi_worker_dataset, ",
        "tfdist.fit(multi_worker_model, multi_worker_dataset, ",
    ),
    "custom_loop_tutorial": (
        "history = train()",
        "with tfdist.spread(multi_worker_model, optimizer): history = train()",
    ),
}


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", CHANGES)
def test_tutorials_with_one_line_changed(name, workers, tmp_path):
    text = (SCRIPTS / f"{name}.py").read_text()
    before, after = CHANGES[name]
    assert text.count(before) == 1
    changed = tmp_path / "script.py"
    changed.write_text(
        text.replace(before, after).replace("import tensorflow as tf\n", "import tensorflow as tf\nimport tfdist\n")
    )
    outputs = run(changed, workers)
    found = {history(output) for output in outputs}
    assert len(found) == 1, found
    assert json.loads(found.pop().removeprefix("history: "))["accuracy"][-1] > 0.7
    assert ("all use the chief's" in outputs[0]) == (name == "keras_tutorial")  # which shuffles without a seed


def test_killed_and_run_again(tmp_path):
    folders = {name: tmp_path / name for name in ("undisturbed", "disturbed")}
    for folder in folders.values():
        folder.mkdir()
    undisturbed = run(SCRIPTS / "killed.py", 2, folders["undisturbed"])
    victim = 1
    killed = run(SCRIPTS / "killed.py", 2, folders["disturbed"], victim, succeeds=False)
    assert "PeerLostError" in killed[0] and "lost contact with rank 1" in killed[0]
    assert [path.name for path in (folders["disturbed"] / "backup").iterdir()] == ["tfdist-backup"]
    again = run(SCRIPTS / "killed.py", 2, folders["disturbed"], victim)
    assert "resumed after epoch 4" in again[0] and "resumed" not in undisturbed[0]  # in the middle of a pass
    assert {history(output) for output in again} == {history(undisturbed[0])}
    assert (folders["disturbed"] / "log.csv").read_text() == (folders["undisturbed"] / "log.csv").read_text()
    assert not list((folders["disturbed"] / "backup").iterdir())


@pytest.mark.parametrize(
    ("how", "where", "words"),
    [
        ("kill", "reduce", r"[Ll]ost contact with .*rank 1"),
        pytest.param("stop", "reduce", r"rank 1 no longer answers", marks=pytest.mark.thorough),
        pytest.param("stick", "reduce", r"ranks? .*1.*, which is stuck", marks=pytest.mark.thorough),
        pytest.param("kill", "fit", r"[Ll]ost contact with .*rank 1", marks=pytest.mark.thorough),
        pytest.param("stop", "fit", r"rank 1 no longer answers", marks=pytest.mark.thorough),
        pytest.param("stick", "fit", r"rank 1 was silent for 4 s", marks=pytest.mark.thorough),
    ],
)
def test_a_lost_peer_ends_collectives_of_tensorflow(how, where, words):
    codes, outputs = ended(SCRIPTS / "lost_peer.py", [0, 2], how, where)
    assert 0 not in codes
    for output in outputs:
        assert "PeerLostError" in output, output
    assert any(re.search(words, output) for output in outputs), outputs


def test_refusals(tmp_path):
    outputs = run(SCRIPTS / "refusals.py", 2, tmp_path)
    for output in outputs:
        assert "once: [[820.0, 820.0, 820.0], [22140.0, 22140.0, 22140.0], 3]" in output
        assert "chief's: [22140.0, 22140.0]" in output
        for name in ("targets", "middle", "weights", "names", "arrays"):
            assert f"taken {name}: [22140.0]" in output
        assert "barrier: saved" in output
        assert re.search(
            r"other call: ConfigError: .*tfdist.evaluate\(batch_size=5\), rank 1 at call 9,"
            r" tfdist.predict\(batch_size=5\)",
            outputs[0],
        )
        assert "other epochs: ConfigError: tfdist.fit: Rank" in output
        assert "train_step: ConfigError: The train_step of Ignores never calls the model itself" in output
        assert "variables: ConfigError: The model and optimizer have 3 and 4 variables" in output
        unlike = "ConfigError: Rank 1 trains something else than rank 0; they differ first in"
        assert f"layers: {unlike} how many layers" in output
        assert f"lossy: {unlike} what compile(...) was given" in output
        for name in ("fit", "evaluate", "predict"):
            assert re.search(rf"curved, {name}: {unlike} layer 2, dense", output), name
        assert "not a model: ConfigError: tfdist.fit takes a keras.Model, not ndarray" in output
        for name in ("class weight", "callback", "frequency", "validation", "rows", "data"):
            assert f"mistaken {name}: ConfigError: " in output, name
        assert "unbuilt: (40, 1)" in output and "no rows: 1" in output
        assert "twice the rows: ConfigError: " in output
        assert "toggled: ConfigError: A layer's `trainable` was changed after the model had been compiled" in output
        for kind in ("frozen embedding", "take", "whole numbers"):
            assert f"missing rows, {kind}: [True, True, True]" in output, kind
        for name in ("order", "targets", "weights", "train_step's rows", "own rows", "evaluate", "predict"):
            assert re.search(
                rf"^{name}: DataError: Rank \d and rank \d have different batches", output, re.MULTILINE
            ), name
    assert "length: ConfigError: Rank 0 is at 'batches', rank 1 at" in outputs[0]
    # The five that are taken, and the dataset that each shuffles without a seed.
    assert outputs[0].count("all use the chief's") == 6
    assert (
        "chief only: ConfigError: tfdist.evaluate: Rank 1 has reached the end of its script, while rank 0 is at"
        " 'tfdist call': all workers" in outputs[0]
    )


@pytest.mark.parametrize("call", ["", "import tfdist\nassert tfdist.is_chief() in (True, False)\nraise SystemExit(0)"])
def test_a_script_that_never_joins_the_workers_is_told_so(call, tmp_path):
    (tmp_path / "script.py").write_text(f"print('trained')\n{call}\n")
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.launch", "--workers=2", "--", "script.py"],
        env=ENVIRONMENT,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0 and output.count("trained") == 2, output
    assert (
        len(re.findall(r"worker 0\] tfdist: script.py ended without calling tfdist.fit, .*the 2 workers", output)) == 1
    )
    assert output.count("ended without calling") == 1, output


def test_the_launcher_starts_scripts_and_keeps_their_exit_codes(tmp_path):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("import sys, tfdist\nprint('rank', tfdist.init().rank, sys.argv[1:])\n")
    bad.write_text("import tfdist\nif tfdist.init().rank == 1:\n    tfdist.fit(None)\n")
    outputs = {}
    alone = tmp_path / "alone.py"
    alone.write_text(
        "import tfdist, keras\ntfdist.init()\nif tfdist.is_chief():\n    tfdist.evaluate(keras.Sequential(), [1])\n"
    )
    for script, code in ((good, 0), (bad, 2), (alone, 2)):
        done = subprocess.run(
            [sys.executable, "-m", "tfdist.launch", "--workers=2", "--", str(script), "--mine"],
            env=ENVIRONMENT,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        outputs[script] = done.stdout + done.stderr
    assert "[worker 1] rank 1 ['--mine']" in outputs[good] and "takes a keras.Model" in outputs[bad]
    assert "all workers must make the same calls of tfdist" in outputs[alone]
