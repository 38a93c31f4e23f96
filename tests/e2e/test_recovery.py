"""Jobs in which something goes wrong: who is named, what is lost (nothing), where the run ends."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.job import (
    CLUSTERS,
    ENVIRONMENT,
    IDENTIFIED,
    TRAINED,
    batches,
    records,
    run,
    snapshot,
    start,
    train,
    wait_for,
    workers_training,
)

pytestmark = pytest.mark.slow


def with_faults(
    text: str, workers: int, flags: list[str], launch_flags: tuple[str, ...] = (), timeout: float = 240
) -> tuple[int, str]:
    """(exit code, output) of a job with faults on purpose."""
    process = start(workers, flags, launch_flags, {"TFDIST_FAULTS": text})
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def logs(run_dir: Path, workers: int) -> list[str]:
    return [(run_dir / "logs" / f"worker-{rank}.log").read_text() for rank in range(workers)]


def test_a_worker_stuck_in_python_is_named_by_all(tmp_path):
    code, output = with_faults(
        "1:20:stuck",
        3,
        [
            *TRAINED,
            "--steps=100000",
            "--steps_per_loop=5",
            "--step_timeout=4",
            "--progress=none",
            f"--run_dir={tmp_path}",
        ],
    )
    assert code == 7, output
    for log in logs(tmp_path, 3):
        assert (
            'Section "step" took' in log
            and "the others are waiting for worker 1 (rank 1," in log
            and "faults.py" in log
        ), log
    assert "worker 1 (rank 1," in output.splitlines()[-2]  # the launcher's last word but one
    assert "Python stacks" in logs(tmp_path, 3)[1] and "Python stacks" not in logs(tmp_path, 3)[0]


@pytest.mark.thorough
def test_a_stopped_worker_is_named_with_its_section(tmp_path):
    code, output = with_faults(
        "1:20:stop",
        3,
        [
            *TRAINED,
            "--steps=100000",
            "--steps_per_loop=5",
            "--heartbeat_timeout=3",
            "--progress=none",
            f"--run_dir={tmp_path}",
        ],
    )
    assert code == 6, output
    for rank in (0, 2):
        assert "worker 1 (rank 1," in (log := logs(tmp_path, 3)[rank]) and 'in section "' in log, (
            log
        )  # the last that it told


def test_the_first_error_reaches_every_log(tmp_path):
    code, output = with_faults(
        "2:20:error", 3, [*TRAINED, "--steps=100000", "--progress=none", f"--run_dir={tmp_path}"]
    )
    assert code == 1 and "an injected error" in output.splitlines()[-2], output
    assert all("an injected error" in log for log in logs(tmp_path, 3))
    assert [record["kind"] for record in records(tmp_path, 0)][-1] == "error"


def test_more_and_fewer_workers_see_the_same_batches(tmp_path):
    """3 -> 1 -> 2 workers in one job, as --discover tells, with at most 8 samples per worker at a time."""
    room, steps = tmp_path / "room", 40
    flags = [*IDENTIFIED, f"--steps={steps}", "--log_every=1", "--deterministic"]
    run(1, [*flags, f"--run_dir={tmp_path / 'one'}"])
    room.write_text("3")
    many = tmp_path / "many"
    (many / "faults").mkdir(parents=True)
    # A step, so that there is time for two changes: `--discover` is asked every 5 s.
    (many / "faults" / "pace").write_text("0.9")
    process = start(
        3, [*flags, f"--run_dir={many}"], ("--min_workers=1", f"--discover=cat {room}"), {"TFDIST_FAULTS": "armed"}
    )
    for workers, then in ((3, "1"), (1, "2"), (2, "2")):
        wait_for(lambda workers=workers: workers_training(many) == workers)
        room.write_text(then)
    (many / "faults" / "pace").unlink()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert [record["values"]["workers"] for record in records(many, kind="start")] == [3, 1, 2], output
    assert "from 3 to 1 workers" in output and "written by 1 worker, now 2" in output
    assert (
        "6 per micro-batch x 2 accumulation x 2 replicas" in output
    )  # never more at a time than the 3 workers asked for would take
    assert batches(many) == batches(tmp_path / "one")
    ends = [snapshot(folder, steps) for folder in (tmp_path / "one", many)]
    for key, array in ends[0].items():
        np.testing.assert_allclose(
            array.astype("float64"), ends[1][key].astype("float64"), rtol=0, atol=2e-6, err_msg=key
        )


@pytest.mark.thorough
def test_a_worker_that_cannot_be_brought_back_is_left_out(tmp_path):
    """Rank 2 breaks twice before there is any snapshot; the job goes on with two."""
    flags = [*IDENTIFIED, "--steps=60", "--log_every=1", "--progress=none", f"--run_dir={tmp_path}"]
    code, output = with_faults(
        "2:5:kill,2:6:kill", 3, [*flags, "--steps_per_loop=1"], ("--min_workers=2", "--max_restarts=5")
    )
    assert code == 0 and "with 2 workers" in output, output
    assert [record["values"]["workers"] for record in records(tmp_path, kind="start")] == [3, 3, 2]
    assert sorted(batches(tmp_path)) == list(range(1, 61))


def test_backup_is_preferred_when_it_is_newer_and_deleted_at_the_end(tmp_path):
    backup = tmp_path / "backup"
    flags = [
        *TRAINED,
        "--steps=30",
        "--save_every=10",
        f"--backup_dir={backup}",
        "--backup_every=7",
        "--steps_per_loop=1",
        "--deterministic",
    ]
    run(2, [*flags, f"--run_dir={tmp_path / 'whole'}"])
    code, output = with_faults("1:17:kill", 2, [*flags, f"--run_dir={tmp_path / 'broken'}"], ("--max_restarts=1",))
    assert code == 0 and f"resumed from {backup}/step-00000014" in output, output
    assert not list(backup.glob("step-*"))
    whole, broken = snapshot(tmp_path / "whole", 30), snapshot(tmp_path / "broken", 30)
    assert all(whole[key].tobytes() == broken[key].tobytes() for key in whole)


def test_rollback_goes_past_bad_samples(tmp_path):
    """Sample 70 is in step 3; --log_every makes calls of 5 steps."""
    flags = [
        *TRAINED,
        "--source=tests.e2e.sources:with_nan",
        "--noshuffle",
        "--steps=20",
        "--log_every=5",
        "--on_nan=rollback",
    ]
    output = run(2, [*flags, f"--run_dir={tmp_path}"])
    assert "rolled back to step 0 and skipped 120 samples, which are not trained on (rollback 1 of 3)" in output
    manifest = json.loads((tmp_path / "checkpoints" / "step-00000020" / "manifest.json").read_text())
    assert manifest["consumed"] == 20 * 24 + 120 and manifest["skipped_samples"] == 120
    assert all(np.isfinite(array).all() for key, array in snapshot(tmp_path, 20).items() if key.startswith("model/"))
    # The position comes back with the snapshot, whoever goes on with it.
    assert "600 samples consumed" in train([*flags, "--steps=24", f"--run_dir={tmp_path}"]).stdout
    everywhere = train(
        [
            *TRAINED,
            "--source=tests.e2e.sources:all_nan",
            "--steps=20",
            "--log_every=5",
            "--on_nan=rollback",
            "--max_rollbacks=2",
            f"--run_dir={tmp_path / 'all'}",
        ]
    )
    assert everywhere.returncode == 8 and "after 2 rollbacks" in everywhere.stderr


def test_a_rollback_leads_a_stopped_run_where_it_leads_an_undisturbed_one(tmp_path):
    """Sample 70 is in step 9, which is noticed at once; a stop at 7 leaves a snapshot that nobody goes back to."""
    flags = [*TRAINED, "--source=tests.e2e.sources:with_nan", "--noshuffle", "--global_batch=8", "--steps=20"]
    flags += ["--deterministic", "--on_nan=rollback", "--save_every=5", "--log_every=1"]
    assert "rolled back to step 5 and skipped 32 samples" in run(1, [*flags, f"--run_dir={tmp_path / 'whole'}"])
    code, output = with_faults("0:6:term", 1, [*flags, f"--run_dir={tmp_path / 'stopped'}"])
    assert code == 42, output
    output = run(1, [*flags, f"--run_dir={tmp_path / 'stopped'}"])
    assert "step-00000007: step 7" in output and "rolled back to step 5 and skipped 32 samples" in output, output
    whole, stopped = snapshot(tmp_path / "whole", 20), snapshot(tmp_path / "stopped", 20)
    assert all(whole[key].tobytes() == stopped[key].tobytes() for key in whole)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_training_ends_well_on_a_full_disk(tmp_path):
    disk = tmp_path / "checkpoints"
    disk.mkdir()
    flags = [
        *TRAINED,
        "--model_args=widths=(700,700)",
        "--optimizer=sgd",
        "--save_every=20",
        "--keep=9",
        f"--run_dir={tmp_path}",
    ]
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(disk)], check=True
    )  # a snapshot has 2 MB: two fit
    try:
        output = run(2, [*flags, "--steps=80"], code=9)
        assert "SNAPSHOT NOT WRITTEN (failure number 1), step 60" in output and "failure number 2" in output
        assert (
            "step 80/80" in output and "The last snapshot could not be written" in output and "Traceback" not in output
        )
        assert sorted(path.name for path in disk.glob("step-*")) == ["step-00000020", "step-00000040"]
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        output = train([*flags, "--steps=80"]).stdout
        assert "step-00000040: step 40" in output and (disk / "step-00000080").exists()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_what_cannot_be_saved_within_the_grace_period_is_said(tmp_path):
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tfdist.train",
            *TRAINED,
            "--steps=100000",
            "--grace_period=4",
            f"--run_dir={tmp_path}",
        ],
        env={**ENVIRONMENT, "TFDIST_FAULTS": "0:20:stuck"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: (tmp_path / "faults").exists())
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 7 and "Not saved within --grace_period=4 s" in output, output


def test_a_changed_schedule_is_refused_or_said(tmp_path):
    flags = [*TRAINED, f"--run_dir={tmp_path}"]
    assert train([*flags, "--steps=20"]).returncode == 0
    result = train([*flags, "--steps=30", "--learning_rate=0.5"])
    assert result.returncode == 9 and "--learning_rate: 0.01 there, 0.5 now" in result.stderr
    result = train([*flags, "--steps=30", "--learning_rate=0.5", "--allow_config_change"])
    assert result.returncode == 0 and "the learning rate jumps from 0.01 to 0.5" in result.stdout


def test_chaos_ends_where_the_undisturbed_run_ends(tmp_path):
    """Two faults of scripts/chaos.py, which this seed draws: the chief killed while saving, then a bit of the newest
    snapshot's data flipped and a worker killed.
    """
    drawn = ["--kills=2", "--seed=125581", "--workers=2", "--steps=100", "--train=--phase_every=0"]
    done = subprocess.run(
        [sys.executable, "scripts/chaos.py", *drawn, f"--keep={tmp_path}"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0 and "bitwise those of the undisturbed run" in done.stdout, done.stdout + done.stderr
    assert re.search(r"^2 faults, 3 attempts: ", done.stdout, re.MULTILINE), done.stdout
    for kind in ("kill_save", "corrupt"):
        assert re.search(rf"^  {kind} +1 times", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.thorough
def test_a_straggler_is_named(tmp_path):
    """Rank 1 reads slowly."""
    output = run(
        2,
        [
            *CLUSTERS,
            "--source=tests.e2e.sources:SlowOnRankOne",
            "--model_args=widths=(16,),num_outputs=4",
            "--steps=60",
            "--log_every=5",
            f"--run_dir={tmp_path}",
        ],
    )
    assert "rank 1 is a straggler" in output and "rank 0 is a straggler" not in output
    assert {record["values"]["perf/slowest_rank"] for record in records(tmp_path, kind="train")[2:]} == {1}


def test_a_notice_of_the_platform_saves_and_ends(tmp_path):
    """Through TensorFlow's own watcher, which asks a metadata server; here a real HTTP server with the same answers."""

    class Metadata(http.server.BaseHTTPRequestHandler):
        event = b"NONE"

        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(Metadata.event if self.path.endswith("/instance/maintenance-event") else b"")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tfdist.train",
            *TRAINED,
            "--steps=1000000",
            "--preemption_notice=gce",
            f"--run_dir={tmp_path}",
        ],
        env={**ENVIRONMENT, "GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: records(tmp_path, kind="train"))
    Metadata.event = b"TERMINATE_ON_HOST_MAINTENANCE"
    output, _ = process.communicate(timeout=60)
    server.shutdown()
    assert process.returncode == 42 and "about to be taken away" in output, output
    assert list((tmp_path / "checkpoints").glob("step-*"))


def test_a_second_job_on_the_same_folder_is_refused_and_the_first_goes_on(tmp_path):
    """Whether it is started by a launcher, which writes nothing to the first one's logs, or by hand."""
    flags = [*TRAINED, "--steps=100000", "--log_every=1", "--progress=none", f"--run_dir={tmp_path}"]
    first = start(2, flags, environment={"TFDIST_FAULTS": "0:5:slow"})
    try:
        wait_for(lambda: workers_training(tmp_path) == 2)
        log = (tmp_path / "logs" / "worker-0.log").read_bytes()
        second, alone = start(2, flags, ("--max_restarts=3",)), train(flags)
        output, _ = second.communicate(timeout=60)
        for code, said in ((second.returncode, output), (alone.returncode, alone.stderr)):
            assert (
                code == 2
                and f"--run_dir={tmp_path} is in use by another job (process " in said
                and "since 20" in said
                and "Traceback" not in said
            ), said
        later = (tmp_path / "logs" / "worker-0.log").read_bytes()
        assert first.poll() is None and later.startswith(log)
        assert b"tfdist: error" not in later and later.count(b"tfdist.train") == log.count(b"tfdist.train")
        killed = json.loads((tmp_path / "lease.json").read_text())["pid"]
        os.kill(int(killed), signal.SIGKILL)
        first.communicate(timeout=60)
        assert (tmp_path / "lease.json").exists()  # of the dead
        assert train([*flags, "--steps=5", "--resume=auto"]).returncode == 0
        assert not (tmp_path / "lease.json").exists()
    finally:
        first.kill()
