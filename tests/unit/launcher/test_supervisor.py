"""When a job is started again, and when not; with small scripts in place of workers."""

import io
import sys
from pathlib import Path

import pytest

from tfdist.control import backup_count
from tfdist.control.exit_codes import ExitCode
from tfdist.launcher.local_job import LocalJob
from tfdist.launcher.supervisor import RestartPolicy, Supervisor, newest_saved_step
from tfdist.launcher.worker_count import WorkerCount


def policy(**options):
    return RestartPolicy(**{"max_restarts": 2, "random": lambda: 1.0, **options})


@pytest.mark.parametrize(
    "code",
    [
        ExitCode.CONFIG,
        ExitCode.CLUSTER,
        ExitCode.DATA,
        ExitCode.DIVERGED,
        ExitCode.CHECKPOINT,
        ExitCode.UNSUPPORTED,
        ExitCode.INTERRUPTED,
    ],
)
def test_what_would_fail_again_is_not_retried(code):
    assert policy().after(code, 10) is None


def test_the_wait_doubles_up_to_a_limit_and_jitters_downwards():
    made = policy(max_restarts=10, longest_wait=5)
    assert [made.after(ExitCode.PEER_LOST, -1) for _ in range(5)] == [1, 2, 4, 5, 5]
    assert policy(random=lambda: 0.0).after(ExitCode.PEER_LOST, -1) == 0.5
    assert policy(max_restarts=5000, failures=4000).after(ExitCode.PEER_LOST, -1) == 60, "no float holds 2^4000"


def test_progress_forgives_and_standstill_does_not():
    made = policy()
    codes = [(6, 10), (6, 10), (6, 20), (6, 20), (6, 20)]
    assert [made.after(*each) is None for each in codes] == [False, False, False, False, True]


def test_preemption_is_no_failure():
    made = policy(max_restarts=1)
    assert [made.after(ExitCode.PREEMPTED, -1) for _ in range(3)] == [0, 0, 0]
    assert policy(max_restarts=0).after(ExitCode.PREEMPTED, -1) is None


def test_codes_of_others_are_retried():
    assert policy().after(77, 1) is not None


WORKER = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[0]).parent
starts = len(list(folder.glob("start-*")))
(folder / f"start-{starts}").touch()
"""


def supervise(tmp_path, code, evaluator=None, **options):
    script = tmp_path / "worker.py"
    script.write_text(WORKER + code)
    command, logs = [sys.executable, str(script)], tmp_path / "logs"
    made = Supervisor(
        lambda workers: LocalJob(command, workers, logs, evaluator=evaluator, output=io.StringIO()),
        policy(first_wait=0.01, **options),
        lambda: newest_saved_step(tmp_path, backup_folder=""),
        WorkerCount(1, 1),
    )
    return made, made.run(), len(list(tmp_path.glob("start-*")))


def test_a_job_that_recovers(tmp_path):
    made, result, starts = supervise(tmp_path, "sys.exit(0 if starts == 2 else 6)")
    assert (result.code, made.restarts, starts) == (0, 2, 3)


def test_a_finished_training_is_not_started_again_since_its_evaluator_has_failed(tmp_path):
    _, result, starts = supervise(tmp_path, "sys.exit(0)", evaluator=[sys.executable, "-c", "import sys; sys.exit(5)"])
    assert (result.code, starts) == (5, 1) and "evaluator ended with exit code 5" in result.cause


def test_a_crash_loop_ends_with_its_cause_and_step(tmp_path):
    code = (
        "(folder / 'checkpoints' / 'step-00000040').mkdir(parents=True, exist_ok=True)\nprint('tfdist: error: the disk"
        " is on fire')\nsys.exit(1)"
    )
    _, result, starts = supervise(tmp_path, code)
    assert result.code == ExitCode.CRASH_LOOP and starts == 3
    assert "3 times after step 40" in result.cause and "the disk is on fire" in result.cause


COUNTING = """
sys.path.insert(0, {root!r})
import os
from tfdist.control import backup_count
os.environ[backup_count.VARIABLE] = str(folder / "backups")
if starts < 4:
    backup_count.count_one()
sys.exit(6)
"""


def test_backups_of_a_script_are_progress(tmp_path):
    """Four starts that write one each, and then two that write none."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER + COUNTING.format(root=str(Path(__file__).parents[3])))
    file = tmp_path / "backups"
    file.write_text("9")  # of an earlier job
    backup_count.begin(file)
    made = Supervisor(
        lambda workers: LocalJob([sys.executable, str(script)], workers, tmp_path / "logs", output=io.StringIO()),
        policy(first_wait=0.01),
        lambda: backup_count.read(file),
        WorkerCount(1, 1),
        counted="backup",
    )
    result = made.run()
    assert result.code == ExitCode.CRASH_LOOP and "3 times after backup 4" in result.cause
    assert len(list(tmp_path.glob("start-*"))) == 6


def test_a_backup_is_counted_only_where_a_launcher_asks(tmp_path):
    file = tmp_path / "backups"
    backup_count.count_one({})
    backup_count.count_one({backup_count.VARIABLE: str(tmp_path / "missing" / "backups")})
    assert backup_count.read(file) == -1
    for _ in range(2):
        backup_count.count_one({backup_count.VARIABLE: str(file)})
    assert backup_count.read(file) == 2
    file.write_text("two")
    assert backup_count.read(file) == -1


def test_a_mistake_keeps_its_own_code(tmp_path):
    _, result, starts = supervise(tmp_path, "sys.exit(4)")
    assert (result.code, starts) == (4, 1)


def test_no_restarts_by_default(tmp_path):
    _, result, starts = supervise(tmp_path, "sys.exit(6)", max_restarts=0)
    assert (result.code, starts) == (6, 1)


def test_a_stop_while_a_job_is_made_reaches_that_job(tmp_path):
    def make(workers):
        made.stop()  # as from a signal handler, which has no job to tell
        return LocalJob([sys.executable, "-c", "raise SystemExit(6)"], workers, tmp_path, output=io.StringIO())

    made = Supervisor(make, policy(first_wait=0.01), lambda: -1, WorkerCount(1, 1))
    assert made.run().code == ExitCode.PREEMPTED
    assert made.restarts == 0 and not made.job.workers  # none was started


def test_a_start_that_fails_is_a_failure_like_others(tmp_path):
    """An OOM kill is often followed by a fork that finds no memory: the launcher ended."""
    commands = iter([["/no/such/program"], ["/no/such/program"], [sys.executable, "-c", ""]])

    def make(workers):
        return LocalJob(next(commands), workers, tmp_path, output=io.StringIO())

    made = Supervisor(make, policy(first_wait=0.01), lambda: -1, WorkerCount(1, 1))
    assert (made.run().code, made.restarts) == (0, 2)
    commands = iter([["/no/such/program"]])
    result = Supervisor(make, policy(max_restarts=0), lambda: -1, WorkerCount(1, 1)).run()
    assert result.code == ExitCode.STARTUP and result.cause.startswith("worker 0 cannot be started")


def test_newest_snapshot(tmp_path):
    assert newest_saved_step(tmp_path, backup_folder="") == -1
    for name in ("step-00000010", "step-00000009", ".writing-step-00000099-x", "checkpoint"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_saved_step(tmp_path, backup_folder="") == 10
    (tmp_path / "backup" / "step-00000012").mkdir(parents=True)
    assert newest_saved_step(tmp_path, str(tmp_path / "backup")) == 12
