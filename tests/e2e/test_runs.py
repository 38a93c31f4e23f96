"""Whole runs, started as a user starts them: learning, repeating, resuming, evaluating, ending."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.job import CLUSTERS, ENVIRONMENT, TRAINED, children, records, run, snapshot, start, train, wait_for

pytestmark = pytest.mark.slow

STEPS = 120
# What makes resuming hard: dropout, moving averages, a schedule, accumulation, shuffling over epochs, evaluations and
# measured steps at other places than without a stop.
HARD = [
    *CLUSTERS,
    "--trackers=none",
    f"--steps={STEPS}",
    "--deterministic",
    "--optimizer=adamw",
    "--ema=0.9",
    "--schedule=cosine",
    "--warmup_steps=5",
    "--accumulation=2",
    "--weight_decay=0.1",
]


def assert_same_end(one: Path, other: Path, step: int, atol: float = 0.0) -> None:
    a, b = snapshot(one, step), snapshot(other, step)
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_allclose(a[key].astype("float64"), b[key].astype("float64"), rtol=0, atol=atol, err_msg=key)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(2, [*HARD, f"--run_dir={folder}"])
    return folder


def test_two_workers_learn_the_digits_and_leave_everything_behind(tmp_path):
    output = run(2, ["--flagfile=flags/digits_cnn.flags", "--epochs=16", f"--run_dir={tmp_path}"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["eval/accuracy"] >= 0.97 and summary["eval/samples"] == summary["data/eval_samples"]
    assert "[worker 0] step 50/" in output and "eval/accuracy" in output
    for name in (
        "flags.txt",
        "curves.png",
        "logs/rank-0.jsonl",
        "logs/rank-1.jsonl",
        "logs/worker-1.log",
        "export/model.keras",
        "export/saved_model/saved_model.pb",
    ):
        assert (tmp_path / name).stat().st_size > 0, name
    # The export loads where there is no tfdist, and scores the same.
    code = f"""
import sys; sys.modules["tfdist"] = None
import keras, numpy as np, tensorflow as tf
x = np.random.default_rng(0).uniform(size=(3, 8, 8, 1)).astype("float32")
one = keras.models.load_model({str(tmp_path / "export/model.keras")!r})(x)
loaded = tf.saved_model.load({str(tmp_path / "export/saved_model")!r})
other = loaded.serve(x)
np.testing.assert_allclose(one, other, atol=1e-5)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**ENVIRONMENT, "PYTHONPATH": ""}, cwd=tmp_path)
    evaluated = subprocess.run(
        [sys.executable, "-m", "tfdist.evaluate", f"--run_dir={tmp_path}"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert json.loads(evaluated.partition(": ")[2])["loss"] == pytest.approx(summary["eval/loss"], abs=1e-6)


@pytest.mark.thorough
def test_a_repeated_run_is_bitwise_equal(undisturbed, tmp_path):
    """From the flag file that the first run has written."""
    run(2, [f"--flagfile={undisturbed / 'flags.txt'}", f"--run_dir={tmp_path}"])
    assert_same_end(undisturbed, tmp_path, STEPS)


def test_a_stopped_and_resumed_run_is_bitwise_equal(undisturbed, tmp_path):
    """Stopped twice: by a smaller target, and by SIGTERM to one worker only."""
    flags = [*HARD, f"--decay_steps={STEPS}", f"--run_dir={tmp_path}"]
    run(2, [*flags, "--steps=31"])
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "pace").write_text("0.15")  # else a busy machine may send the signal after the last step
    process = start(2, [*flags, "--steps_per_loop=1", "--log_every=1"], environment={"TFDIST_FAULTS": "armed"})
    wait_for(lambda: any(record["step"] >= 40 for record in records(tmp_path, rank=1)))
    os.kill(children(process.pid)[-1], signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 42, output
    steps = sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").glob("step-*"))
    assert 40 <= steps[-1] < STEPS
    assert f"step {steps[0]}, {steps[0] * 24:,} samples consumed" in output
    output = run(2, flags)
    assert f"resumed from {tmp_path}/checkpoints/step-{steps[-1]:08d}" in output
    assert_same_end(undisturbed, tmp_path, STEPS)
    attempts = {record["attempt"] for record in records(tmp_path)}
    assert attempts == {0, 1, 2} and len({record["run_id"] for record in records(tmp_path)}) == 1


@pytest.mark.thorough
def test_other_worker_counts_go_on_where_others_stopped(tmp_path):
    """1 -> 3 -> 2 workers: the same global batches, so the same weights up to rounding (no dropout: its masks depend on
    the rank).
    """
    flags = [*TRAINED, "--model_args=widths=(16,)", "--optimizer=momentum", "--deterministic"]
    run(1, [*flags, "--steps=45", f"--run_dir={tmp_path / 'one'}"])
    for workers, steps in ((1, 15), (3, 30), (2, 45)):
        output = run(workers, [*flags, f"--steps={steps}", f"--run_dir={tmp_path / 'many'}"])
    assert "written by 3 workers, now 2" in output
    assert_same_end(tmp_path / "one", tmp_path / "many", 45, atol=1e-6)


def test_float16_overflow_on_one_worker_is_skipped_by_all(tmp_path):
    """Sample 70 is in step 2 (of 24 samples each), in the part of the second rank."""
    flags = [
        *TRAINED,
        "--source=tests.e2e.sources:with_overflow",
        "--noshuffle",
        "--precision=float16",
        "--loss_scale_initial=1024",
        "--steps=20",
        "--log_every=1",
    ]
    run(2, [*flags, f"--run_dir={tmp_path}"])
    for rank in range(2):
        skipped = {
            record["step"]: (record["values"]["train/skipped_steps"], record["values"]["train/loss_scale"])
            for record in records(tmp_path, rank, "train")
        }
        assert skipped[2] == (0, 1024) and skipped[3] == (1, 512) and skipped[20] == (0, 512), skipped
    assert all(np.isfinite(array).all() for key, array in snapshot(tmp_path, 20).items() if key.startswith("model/"))


def test_not_a_number_ends_with_its_own_code(tmp_path):
    flags = [
        *TRAINED,
        "--source=tests.e2e.sources:with_nan",
        "--noshuffle",
        "--steps=20",
        "--log_every=1",
        f"--run_dir={tmp_path}",
    ]
    output = run(2, flags, code=8)
    assert "became NaN or infinite" in output and "Traceback" not in output
    output = run(2, [*flags, "--on_nan=skip"])
    assert [record["step"] for record in records(tmp_path, 0, "train") if record["values"]["train/skipped_steps"]] == [
        3
    ]
    output = run(
        1,
        [
            *TRAINED,
            "--source=tests.e2e.sources:all_nan",
            "--steps=20",
            "--log_every=10",
            "--on_nan=skip",
            f"--run_dir={tmp_path / 'all'}",
        ],
        code=8,
    )
    assert (
        "All of the last 10 steps were skipped" in output
        and "nothing was learned" in output
        and "Traceback" not in output
    )


def test_an_evaluator_follows_the_snapshots(tmp_path):
    run(
        2,
        [*CLUSTERS, "--epochs=2.4", "--save_every=20", "--eval_every=20", f"--run_dir={tmp_path}"],
        launch_flags=("--evaluator",),
    )
    followed = {
        record["step"]: record["values"]["eval/loss"]
        for record in map(json.loads, (tmp_path / "logs" / "evaluator.jsonl").read_text().splitlines())
    }
    trained = {record["step"]: record["values"]["eval/loss"] for record in records(tmp_path, 0, "eval")}
    assert 60 in followed
    for step, loss in followed.items():
        assert loss == pytest.approx(trained[step], abs=1e-6)


def test_a_job_saves_on_request_and_a_killed_worker_is_named(tmp_path):
    """SIGUSR1 to the launcher: all save and go on. SIGKILL to a worker: nothing is left running."""
    flags = [*TRAINED, "--steps=100000", "--steps_per_loop=1", "--log_every=1", "--progress=none"]
    process = start(2, [*flags, f"--run_dir={tmp_path}"])
    logged = [tmp_path / "logs" / f"rank-{rank}.jsonl" for rank in range(2)]
    wait_for(lambda: all(log.exists() for log in logged) and all(records(tmp_path, rank, "train") for rank in range(2)))
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: list((tmp_path / "checkpoints").glob("step-*")))
    at = max(record["step"] for record in records(tmp_path, 1))
    wait_for(lambda: max(record["step"] for record in records(tmp_path, 1)) > at)
    pids = children(process.pid)
    os.kill(pids[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 6 and "worker 1 was killed by signal 9 (SIGKILL)" in output, output
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.thorough
def test_a_supervised_job_goes_on_after_a_kill(undisturbed, tmp_path):
    """SIGKILL, restart from the newest snapshot, and the same end, bit for bit."""
    flags = [*HARD, "--save_every=20", "--steps_per_loop=1", "--log_every=1", f"--run_dir={tmp_path}"]
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "pace").write_text("0.1")  # else a busy machine may kill it after the last step
    process = start(2, flags, ("--max_restarts=2",), {"TFDIST_FAULTS": "armed"})
    wait_for(lambda: (tmp_path / "checkpoints" / "step-00000060").exists())
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    (tmp_path / "faults" / "pace").unlink()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "was killed by signal 9 (SIGKILL); restart number 1 in" in output, output
    assert_same_end(undisturbed, tmp_path, STEPS)
    steps = [record["step"] for record in records(tmp_path, 0, "train") if record["attempt"] == 1]
    assert steps == list(range(steps[0], STEPS + 1))


@pytest.mark.parametrize("communication", [pytest.param("socket", marks=pytest.mark.thorough), "ring"])
def test_a_stopped_worker_is_noticed(communication, tmp_path):
    """It keeps its connections open: only the heartbeat tells."""
    process = start(
        2,
        [
            *TRAINED,
            "--steps=100000",
            "--progress=none",
            "--heartbeat_timeout=3",
            f"--communication={communication}",
            f"--run_dir={tmp_path}",
        ],
        ("--grace=1",),
    )
    wait_for(
        lambda: all(
            (tmp_path / "logs" / f"rank-{rank}.jsonl").exists() and records(tmp_path, rank, "train")
            for rank in range(2)
        )
    )
    pids = children(process.pid)
    os.kill(pids[1], signal.SIGSTOP)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 6 and "worker 0 ended with exit code 6" in output, output
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_workers_with_different_flags_refuse_each_other(tmp_path):
    from tfdist.launcher.local_job import PortReservation

    ports = PortReservation(2)
    processes = []
    for rank in range(2):
        config = json.dumps({"cluster": {"worker": ports.addresses}, "task": {"type": "worker", "index": rank}})
        processes.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tfdist.train",
                    *TRAINED,
                    "--steps=10",
                    f"--seed={rank}",
                    f"--run_dir={tmp_path}",
                ],
                env={**ENVIRONMENT, "TF_CONFIG": config, "TF_GRPC_REUSE_PORT": "true"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    ports.close()
    assert [process.returncode for process in processes] == [2, 2], outputs
    assert all("Rank 1 has configuration" in output and "the same flags" in output for output in outputs)


def test_a_damaged_snapshot_is_passed_over(tmp_path):
    flags = [*TRAINED, f"--run_dir={tmp_path}", "--save_every=10"]
    assert train([*flags, "--steps=20"]).returncode == 0
    data = next((tmp_path / "checkpoints" / "step-00000020").glob("*.data-*"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    result = train([*flags, "--steps=30"])
    assert (
        result.returncode == 0
        and f"skipped a snapshot: {data}" in result.stdout
        and "step-00000010: step 10" in result.stdout
    )


@pytest.mark.thorough
def test_the_transformer_learns_text(tmp_path):
    run(
        2,
        [
            "--source=text",
            "--source_args=max_bytes=3000000",
            "--sequence_length=64",
            "--model=transformer",
            "--model_args=size=tiny",
            "--objective=next_token",
            "--global_batch=32",
            "--steps=250",
            "--learning_rate=3e-3",
            "--warmup_steps=20",
            "--schedule=cosine",
            "--eval_samples=256",
            "--log_every=50",
            "--save_minutes=0",
            f"--run_dir={tmp_path}",
        ],
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    entropy = summary["data/eval_unigram_entropy_nats"]
    print(f"evaluation loss {summary['eval/loss']:.3f} nats per byte, byte-unigram entropy {entropy:.3f}")
    assert summary["eval/loss"] < entropy - 0.6
