"""The launcher, with small scripts in place of workers."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tfdist import flags, launch, train
from tfdist.config import Config
from tfdist.control import backup_count, machine_shares, signals, terminal
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError, ExitCode, StartupError
from tfdist.control.machine_shares import divide_cores, divide_gpus, visible_gpus
from tfdist.control.terminal import LineReader
from tfdist.launcher import job as job_module
from tfdist.launcher.launch_options import parse_launch_options
from tfdist.launcher.local_job import LocalJob, PortReservation
from tfdist.launcher.supervisor import RestartPolicy, Supervisor
from tfdist.launcher.worker_count import WorkerCount
from tfdist.launcher.workers import JobResult

PREAMBLE = (
    "import json, os, signal, subprocess, sys, time\nrank = json.loads(os.environ['TF_CONFIG'])['task']['index'] if"
    " 'TF_CONFIG' in os.environ else 0\n"
)
# Worker 1 goes on when the launcher has seen worker 0 end.
AFTER_WORKER_0 = """
note = os.path.join(os.path.dirname(sys.argv[0]), "pid")
if rank:
    while not os.path.exists(note) or os.path.exists(f"/proc/{open(note).read()}"): time.sleep(0.02)
else:
    open(note + ".new", "w").write(str(os.getpid()))
    os.rename(note + ".new", note)
"""
# Variables of a Slurm step, a pod, mpirun and mpiexec, each of several processes.
AROUND = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NODELIST": "gpu[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "TFDIST_WORKERS": "2",
    "TFDIST_ADDRESS": "pod-{index}:2222",
    "JOB_COMPLETION_INDEX": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
SLEEP = "print('ready', flush=True)\ntime.sleep(60)\n"


@pytest.fixture(autouse=True)
def causes_are_known_soon(monkeypatch):
    """How long a job waits for other workers once one has failed by itself."""
    monkeypatch.setattr(job_module, "_CAUSE_KNOWN_SECONDS", 0.2)


def job(tmp_path, code, workers=2, **options):
    script = tmp_path / "worker.py"
    script.write_text(PREAMBLE + code)
    output = options.pop("output", None) or io.StringIO()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "TF_NUM_", "CUDA_"))
    }
    return (
        LocalJob(
            [sys.executable, str(script)],
            workers,
            tmp_path / "logs",
            output=output,
            **{"grace": 2.0, "environment": environment, **options},
        ),
        output,
    )


def run(made):
    made.start()
    return made.wait()


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- output ------------------------------------------------------------------------------------------------------------


def test_what_tensorflow_says_at_every_start_is_in_the_log_alone(tmp_path):
    noise = [
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        (
            "I0000 00:00:1795359106.545568    9321 cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU"
            " will not be used."
        ),
        (
            "E0000 00:00:1795359108.157280    9321 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error:"
            " Failed call to cuInit: UNKNOWN ERROR (303)"
        ),
    ]
    made, output = job(tmp_path, f"print(*{noise}, 'step 1', sep='\\n')\n", workers=1)
    assert run(made).code == 0 and output.getvalue() == "[worker 0] step 1\n"
    assert all(line in (tmp_path / "logs" / "worker-0.log").read_text() for line in noise)


def test_output_is_prefixed_and_logged(tmp_path):
    made, output = job(
        tmp_path,
        "print('hello from', rank); print('x' * 100_000, flush=True); sys.stdout.buffer.write(b'\\xff bytes \\x1b[2J');"
        " sys.stdout.flush()",
    )
    result = run(made)
    assert (result.code, result.cause, result.exit_codes) == (0, "", {"worker 0": 0, "worker 1": 0})
    lines = output.getvalue().splitlines()
    for rank in (0, 1):
        assert f"[worker {rank}] hello from {rank}" in lines
        assert (
            f"[worker {rank}] \N{REPLACEMENT CHARACTER} bytes \N{REPLACEMENT CHARACTER}[2J" in lines
        )  # without a line end, not valid UTF-8, a control sequence
        assert sum(len(line) - len("[worker 0] ") for line in lines if line.startswith(f"[worker {rank}] x")) == 100_000
        log = (tmp_path / "logs" / f"worker-{rank}.log").read_bytes()
        assert b"hello from" in log and b"\xff bytes \x1b[2J" in log and b"x" * 100_000 in log


def test_each_start_appends_a_header_to_the_logs(tmp_path):
    for _ in range(2):
        made, _ = job(tmp_path, "print('hello')", workers=1)
        run(made)
    headers = [
        line for line in (tmp_path / "logs" / "worker-0.log").read_text().splitlines() if line.startswith("=====")
    ]
    assert len(headers) == 2 and time.strftime("%Y-") in headers[0] and "worker.py" in headers[0]


def test_hidden_ranks_are_still_logged_and_their_last_lines_told_on_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(job_module, "_CAUSE_KNOWN_SECONDS", 20.0)  # rank 0 may start later than rank 1 ends
    made, output = job(tmp_path, "print('hello')\nsys.exit(4 if rank else 0)", show={0})
    result = run(made)
    assert "[worker 1]" not in output.getvalue() and "[worker 0] hello" in output.getvalue()
    assert "hello" in (tmp_path / "logs" / "worker-1.log").read_text()
    assert result.last_lines == ("hello",)


def test_colours_on_a_terminal_only(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    made, _ = job(tmp_path, "print('hello')", output=Terminal())
    run(made)
    lines = made.output.getvalue().splitlines()
    assert sorted(lines) == ["\x1b[33m[worker 1] \x1b[0mhello", "\x1b[36m[worker 0] \x1b[0mhello"]


def test_a_terminal_that_is_gone_does_not_stop_the_job(tmp_path):
    class Gone(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    made, _ = job(tmp_path, "print('hello', flush=True)\nprint('again')", output=Gone())
    assert run(made).code == 0
    assert "again" in (tmp_path / "logs" / "worker-0.log").read_text()


def test_lines():
    reader = LineReader()
    assert reader.feed("one\ntwo \N{EURO SIGN}".encode()[:-1]) == ["one"]
    assert reader.feed("\N{EURO SIGN}".encode()[-1:] + b"\r") == []
    assert reader.feed(b"\nthree\r\n\n") == ["two \N{EURO SIGN}", "three", ""]
    assert reader.feed(b"a\x00b\x1b[31mred\x1b[0m\x1b[1A\ttab\nend") == [
        "a\N{REPLACEMENT CHARACTER}b\x1b[31mred\x1b[0m\N{REPLACEMENT CHARACTER}[1A\ttab"
    ]
    assert reader.feed(b"", final=True) == ["end"]
    assert reader.feed(b"", final=True) == []


def test_of_a_progress_bar_the_last_state_is_shown_and_now_and_then_one_between():
    clock = [0.0]
    reader = LineReader(now=lambda: clock[0])
    shown = []
    for percent in range(100):
        clock[0] += 0.5
        shown += reader.feed(f"\r{percent} %".encode())
    assert 3 <= len(shown) <= 5 and all(line.endswith(" %") for line in shown)
    assert reader.feed(b"\r100 %\nnext\n") == ["100 %", "next"]
    assert [line for _ in range(10_000) for line in reader.feed(b"\r 50 %")] == []  # however long it goes on


def test_an_endless_line_is_shown_in_pieces():
    reader = LineReader()
    shown = [line for _ in range(10) for line in reader.feed(b"x" * 50_000)]
    assert sum(map(len, shown)) > 450_000
    shown += reader.feed(b"", final=True)
    assert "".join(shown) == "x" * 500_000 and max(map(len, shown)) <= terminal._LONGEST_LINE


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, exit_code, words",
    [
        (
            "print('tfdist: error: no such data. (exit code 4, DATA)') if rank else time.sleep(60)\nsys.exit(4)",
            4,
            ["worker 1 ended with exit code 4 (DATA: ", ": no such data."],
        ),
        ("if rank: raise KeyError('lost')\ntime.sleep(60)", 1, ["worker 1", "INTERNAL", "KeyError: 'lost'"]),
        ("sys.exit(77) if rank else time.sleep(60)", 77, ["worker 1 ended with exit code 77"]),
        (  # a warning is no cause, nor is the line of the source that Python shows with it
            "if rank:\n    print('no such table')\n    print('/a/b.py:3: UserWarning: late\\n  self._warning()\\n')\n"
            "    sys.exit(9)\ntime.sleep(60)",
            9,
            ["worker 1 ended with exit code 9 ", "): no such table"],
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)",
            ExitCode.PEER_LOST,
            ["worker 1 was killed by signal 9 (SIGKILL)"],
        ),
        (
            "os.kill(os.getpid(), 40) if rank else time.sleep(60)",
            ExitCode.PEER_LOST,
            ["worker 1 was killed by signal 40"],
        ),
        # Worker 0 notices the death of worker 1 first: it is not the cause.
        ("time.sleep(0.5 * rank)\nsys.exit(3 if rank else 6)", 3, ["worker 1", "the script's own, or CLUSTER"]),
        (
            "time.sleep(0.5 * rank)\nos.kill(os.getpid(), signal.SIGSEGV if rank else signal.SIGABRT)",
            6,
            ["worker 1", "SIGSEGV"],
        ),
        (AFTER_WORKER_0 + "sys.exit(6)", 6, ["worker 0"]),
        (  # worker 0 ends first, with the code of worker 1, which is the cause
            AFTER_WORKER_0
            + "end = '' if rank else ', passed on'\nprint(f'tfdist: error: no such data. (exit code 4, DATA{end})')\n"
            + "sys.exit(4)",
            4,
            ["worker 1 ended with exit code 4 (DATA: ", "no such data."],
        ),
        (
            "print('tfdist: error: worker 9 failed: no data. (exit code 4, DATA, passed on)')\nsys.exit(4)",
            4,
            ["ended with exit code 4 (DATA: ", "worker 9 failed: no data."],
        ),
    ],
)
def test_the_first_failure_stops_all_and_is_named(tmp_path, code, exit_code, words):
    made, _ = job(tmp_path, code)
    result = run(made)
    assert result.code == exit_code
    assert all(word in result.cause for word in words), result.cause
    assert "(exit code 4" not in result.cause


def test_a_worker_that_ignores_sigterm_is_killed(tmp_path):
    made, _ = job(
        tmp_path,
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(os.path.join({str(tmp_path)!r}, f'ready-{{rank}}'),"
        f" 'w')\nwhile rank and not os.path.exists({str(tmp_path / 'ready-0')!r}): time.sleep(0.02)\nif rank:"
        " sys.exit(4)\ntime.sleep(60)",
        grace=0.3,
    )
    result = run(made)
    assert result.code == 4 and result.exit_codes["worker 0"] == -signal.SIGKILL


def test_workers_that_saved_on_request_are_not_disturbed(tmp_path, monkeypatch):
    """One preempted worker: all save and end with 42, some later than others. A second SIGTERM would cut them short."""
    monkeypatch.setattr(job_module, "_CAUSE_UNKNOWN_SECONDS", 0.2)
    made, _ = job(
        tmp_path,
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(9))\nprint('ready', flush=True)\nif not rank:"
        " time.sleep(0.8)\nsys.exit(42)",
        grace=20.0,
    )
    result = run(made)
    assert result.code == ExitCode.PREEMPTED and result.exit_codes == {"worker 0": 42, "worker 1": 42}


def test_poll_does_not_wait_and_stop_ends_all(tmp_path):
    made, output = job(tmp_path, SLEEP)
    made.start()
    assert made.poll() is None
    until(lambda: output.getvalue().count("ready") == 2)
    result = made.stop()
    assert (
        result.exit_codes == {"worker 0": -signal.SIGTERM, "worker 1": -signal.SIGTERM}
        and result.code == ExitCode.PREEMPTED  # it was asked to: no failure
        and result.cause == "the job was asked to stop before worker 0 and worker 1 could save"
    )
    assert made.poll() == result


@pytest.mark.parametrize("other, code", [("sys.exit(6)", 6), ("sys.exit(3)", 3)])
def test_a_worker_that_failed_by_itself_counts_whatever_is_asked_for_then(tmp_path, other, code):
    made, output = job(tmp_path, f"print('ready', flush=True)\nif rank: {other}\ntime.sleep(60)")
    made.start()
    until(lambda: made.poll() is None and made.workers[1].code)
    assert made.stop().code == code


def test_what_a_worker_leaves_behind_is_ended(tmp_path):
    """Such a process would also hold the output open."""
    made, output = job(tmp_path, "print('child', subprocess.Popen(['sleep', '60']).pid)")
    assert run(made).code == 0
    children = [int(line.split()[-1]) for line in output.getvalue().splitlines()]
    assert len(children) == 2
    until(lambda: not any(alive(pid) for pid in children))


def test_a_command_that_does_not_exist(tmp_path):
    made = LocalJob(["/no/such/program"], 2, tmp_path / "logs")
    with pytest.raises(StartupError, match="worker 0 cannot be started .*/no/such/program"):
        made.start()


def test_a_log_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "logs").write_text("a file")
    made, _ = job(tmp_path, SLEEP)
    with pytest.raises(ConfigError, match="--run_dir"):
        made.start()


def test_a_log_on_a_full_disk_stops_no_start(tmp_path, monkeypatch):
    monkeypatch.setattr(job_module, "appended_to", lambda path: os.open("/dev/full", os.O_WRONLY))
    made, output = job(tmp_path, "print('hello')", workers=1)
    assert run(made).code == 0 and output.getvalue() == "[worker 0] hello\n"


def test_a_failed_start_leaves_nobody_behind(tmp_path):
    made, _ = job(tmp_path, SLEEP, workers=3)
    (tmp_path / "logs" / "worker-2.log").mkdir(parents=True)
    with pytest.raises(ConfigError, match="worker-2.log"):
        made.start()
    assert len(made.workers) == 2
    until(lambda: not any(alive(worker.process.pid) for worker in made.workers))


def test_stopped_while_starting(tmp_path):
    made, _ = job(tmp_path, SLEEP)
    made.request_stop()
    assert run(made).code == ExitCode.PREEMPTED and not made.workers


@pytest.mark.slow
def test_many_workers(tmp_path):
    made, output = job(tmp_path, "print('\\n'.join(f'{rank} {line}' for line in range(50)))", workers=8)
    assert run(made).code == 0
    lines = output.getvalue().splitlines()
    for rank in range(8):
        assert [line for line in lines if line.startswith(f"[worker {rank}] ")] == [
            f"[worker {rank}] {rank} {line}" for line in range(50)
        ]


# -- the evaluator -----------------------------------------------------------------------------------------------------


def evaluator(tmp_path, code):
    script = tmp_path / "evaluator.py"
    script.write_text(PREAMBLE + code)
    return [sys.executable, str(script)]


def test_the_evaluator_runs_beside_the_workers(tmp_path):
    made, output = job(
        tmp_path,
        "print('hello')",
        workers=1,
        show=set(),
        evaluator=evaluator(tmp_path, "print(os.environ['TF_CONFIG'])"),
    )
    assert run(made).exit_codes == {"worker 0": 0, "evaluator": 0}
    assert json.loads(output.getvalue().removeprefix("[evaluator] "))["task"] == {"type": "evaluator", "index": 0}
    assert '"evaluator"' in (tmp_path / "logs" / "evaluator.log").read_text()


def test_the_workers_share_a_token_of_which_the_evaluator_and_no_command_line_knows(tmp_path):
    made, output = job(
        tmp_path,
        "print(os.environ['TFDIST_JOB_TOKEN'], repr(open('/proc/self/cmdline').read()))",
        workers=2,
        evaluator=evaluator(tmp_path, "print(os.environ.get('TFDIST_JOB_TOKEN', 'none'))"),
    )
    assert set(run(made).exit_codes.values()) == {0}
    lines = dict(line[1:].split("] ") for line in output.getvalue().splitlines())
    first, second = (lines[f"worker {rank}"].split()[0] for rank in range(2))
    assert first == second and len(first) == 64 and lines["evaluator"] == "none" and output.getvalue().count(first) == 2


@pytest.mark.parametrize(
    "workers, batch", [(2, []), (1, ["--global_batch=32", "--micro_batch=16", "--accumulation=0"])]
)
def test_the_evaluator_gets_the_command_of_the_workers(workers, batch, tmp_path, monkeypatch):
    """All their flags, and nothing from flags.txt: that may be of an earlier attempt."""
    monkeypatch.setattr(launch, "run", lambda supervisor, logs: supervisor.make_job(workers))
    train = ["--source=digits", "--model=mlp", "--micro_batch=16", "--epochs=3", f"--run_dir={tmp_path}"]
    options = parse_launch_options(["--workers=2", "--min_workers=1", "--evaluator"], "", "")
    made = launch.launch_here(train, options, flags.parse(train).config)
    assert made.evaluator == made.command == [sys.executable, "-m", "tfdist.train", *train, *batch]


def test_an_evaluator_that_fails_is_told_and_stops_nobody(tmp_path):
    done = tmp_path / "logs" / "evaluator.log"
    made, output = job(
        tmp_path,
        f"import os\nwhile not os.path.exists({str(done)!r}) or 'boom' not in open({str(done)!r}).read():"
        " time.sleep(0.05)\nprint('trained')",
        evaluator=evaluator(tmp_path, "print('boom')\nsys.exit(8)"),
    )
    result = run(made)
    assert result.exit_codes == {"worker 0": 0, "worker 1": 0, "evaluator": 8} and result.code == 8
    assert "evaluator ended with exit code 8" in result.cause and "training continues" in output.getvalue()


def test_an_evaluator_that_is_stopped_with_the_job_is_no_failure(tmp_path):
    made, output = job(
        tmp_path,
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + SLEEP,
        evaluator=evaluator(tmp_path, SLEEP),
    )
    made.start()
    until(lambda: output.getvalue().count("ready") == 3)
    result = made.stop()
    assert (result.code, result.cause, result.exit_codes["evaluator"]) == (0, "", -signal.SIGTERM)


def test_the_evaluator_ends_with_workers_that_fail(tmp_path):
    made, _ = job(tmp_path, "sys.exit(42)", evaluator=evaluator(tmp_path, SLEEP), grace=100.0)
    result = run(made)
    assert result.code == 42 and result.exit_codes["evaluator"] == -signal.SIGTERM


# -- who gets what -----------------------------------------------------------------------------------------------------


def test_environment_of_the_workers(tmp_path):
    made, output = job(
        tmp_path,
        "print(json.dumps([os.environ['TF_CONFIG'], os.environ['OMP_NUM_THREADS'],"
        " os.environ['TF_NUM_INTRAOP_THREADS'],os.environ['TF_NUM_INTEROP_THREADS'], sorted(os.sched_getaffinity(0)),"
        " os.environ['TF_GRPC_REUSE_PORT']]))",
    )
    run(made)
    found = sorted(json.loads(line.partition("] ")[2]) for line in output.getvalue().splitlines())
    specs = [json.loads(text)["cluster"]["worker"] for text, *_ in found]
    assert specs[0] == specs[1] and len(set(specs[0])) == 2
    assert all(reuse == "true" for *_, reuse in found)
    cores = len(os.sched_getaffinity(0))
    assert all(worker[1:4] == [str(max(1, cores // 2))] * 3 for worker in found)
    if cores >= 2:
        assert not set(found[0][4]) & set(found[1][4])


def test_threads_that_the_user_set_stay_and_pinning_can_be_off(tmp_path):
    code = "print(os.environ.get('OMP_NUM_THREADS'), len(os.sched_getaffinity(0)))"
    for options, expected in [
        ({"environment": {**os.environ, "OMP_NUM_THREADS": "7"}}, f"7 {max(1, len(os.sched_getaffinity(0)) // 2)}"),
        ({"pin": False}, f"None {len(os.sched_getaffinity(0))}"),
    ]:
        made, output = job(tmp_path, code, **options)
        run(made)
        assert output.getvalue().splitlines()[0].endswith(expected)


def test_the_only_worker_is_alone_whatever_the_launcher_was_started_in(tmp_path):
    """Not a task of the Slurm step, pod or mpirun around the launcher, nor of a cluster of somebody else."""
    made, output = job(
        tmp_path,
        "from tfdist.control.resolvers import cluster_to_join\n"
        "cluster = cluster_to_join(os.environ)\n"
        "print(cluster.rank, cluster.size, cluster.started_by, [peer.partition(':')[0] for peer in cluster.peers])",
        workers=1,
        environment={**os.environ, **AROUND, "PYTHONPATH": os.getcwd(), "TF_CONFIG": "of somebody else"},
    )
    run(made)
    assert output.getvalue() == "[worker 0] 0 1  ['127.0.0.1']\n"


def test_an_early_sigusr1_ends_no_worker(tmp_path):
    asked = tmp_path / "asked"
    wait = f"while not os.path.exists({str(asked)!r}): time.sleep(0.02)\n"
    made, output = job(tmp_path, f"print('ready', flush=True)\n{wait}")
    made.start()
    until(lambda: output.getvalue().count("ready") == 2)
    made.forward(signal.SIGUSR1)
    asked.touch()
    assert made.wait().code == 0


WITH_HELPER = """
signal.signal(signal.SIGUSR1, lambda *_: print("asked", flush=True))
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), os._exit(1 if helper.poll() else 42)))
helper = subprocess.Popen(["sleep", "60"])
print("ready", helper.pid, flush=True)
while True: time.sleep(60)
"""


def test_a_program_that_a_worker_has_started_gets_no_signals_but_is_not_left_behind(tmp_path):
    """It read the data: a request to save ended it, and then the run."""
    made, output = job(tmp_path, WITH_HELPER, workers=1)
    made.start()
    until(lambda: "ready" in output.getvalue())
    helper = int(output.getvalue().split()[-1])
    made.forward(signal.SIGUSR1)
    until(lambda: "asked" in output.getvalue())
    assert made.stop().exit_codes == {"worker 0": 42}
    until(lambda: not alive(helper))


@pytest.mark.parametrize("cores, workers, sizes", [(8, 2, [4, 4]), (7, 2, [3, 3]), (4, 4, [1] * 4), (2, 5, [1] * 5)])
def test_cores_are_divided_evenly(monkeypatch, cores, workers, sizes):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(100, 100 + cores)))
    parts = divide_cores(workers)
    assert [len(part) for part in parts] == sizes and set().union(*parts) <= set(range(100, 100 + cores))
    assert cores < workers or len(set().union(*parts)) == sum(sizes)


def test_hardware_threads_of_a_core_stay_together(monkeypatch):
    """Eight CPUs of four cores, numbered as Linux does: 0 and 4 are the same core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine_shares, "_topology", lambda cpu, name: cpu % 4 if name == "core_id" else 0)
    assert divide_cores(2) == [{0, 4, 1, 5}, {2, 6, 3, 7}]


def test_gpus_are_divided():
    def given(*arguments):
        return [part.get("CUDA_VISIBLE_DEVICES") for part in divide_gpus(*arguments)[0]]

    assert given(["0", "1", "2", "3"], 2) == ["0,1", "2,3", "-1"]
    assert given(["0", "1", "2", "3"], 3) == ["0", "1", "2", "3"]  # the evaluator takes what is left over
    assert given(["4", "5", "6", "7"], 2, 1) == ["4", "5", "6"]
    assert given(["0"], 2) == given([], 2) == [None] * 3
    with pytest.raises(ConfigError, match="--gpus_per_worker=3 with --workers=2 needs 6 GPUs, but 4"):
        divide_gpus(["0", "1", "2", "3"], 2, 3)


def test_visible_gpus(tmp_path, monkeypatch):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 5"}) == ["3", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,-1,1"}) == ["0"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == []
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA A100 (UUID: GPU-11-aa)'\necho '  MIG 1g.5gb Device 0: (UUID: MIG-77)'\necho"
        " 'GPU 1: NVIDIA A100 (UUID: GPU-22-bb)'\n"
    )
    program.chmod(0o755)
    assert visible_gpus({}) == ["GPU-11-aa", "GPU-22-bb"]
    program.write_text("#!/bin/sh\necho 'GPU 1: NVIDIA A100 (UUID: GPU-22-bb)'\n")
    made, _ = job(tmp_path, "", environment={})
    assert [entry["CUDA_VISIBLE_DEVICES"] for entry in made._divide_gpus()[0]] == ["GPU-11-aa", "GPU-22-bb", "-1"]


def test_a_driver_that_does_not_answer_is_not_taken_for_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine_shares, "_DRIVER_SECONDS", 0.1)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    program.chmod(0o755)
    with pytest.raises(StartupError, match="The GPUs cannot be listed .*timed out.*CUDA_VISIBLE_DEVICES"):
        visible_gpus({})


def test_too_few_gpus_are_told(tmp_path):
    made, output = job(tmp_path, "pass", environment={**os.environ, "CUDA_VISIBLE_DEVICES": "0"})
    run(made)
    assert "2 workers share 1 GPU" in output.getvalue()


# -- ports -------------------------------------------------------------------------------------------------------------


RESERVE = (
    "import sys\nfrom tfdist.control.preflight import PortReservation\nkept ="
    " PortReservation(25)\nprint(*kept.addresses, flush=True)\nsys.stdin.read()"
)


def test_ports_are_unique_over_concurrent_reservations():
    """In threads and in other processes, all held until they have been compared."""
    others = [
        subprocess.Popen([sys.executable, "-c", RESERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    with ThreadPoolExecutor(50) as threads:
        reservations = list(threads.map(lambda _: PortReservation(4), range(50)))
    addresses = [address for reservation in reservations for address in reservation.addresses]
    for other in others:
        addresses += other.stdout.readline().split()
    assert len(set(addresses)) == 50 * 4 + 2 * 25
    for reservation in reservations:
        reservation.close()
    for other in others:
        other.communicate()


def test_reserved_ports_stay_ours():
    reservation = PortReservation(1)
    port = int(reservation.addresses[0].rpartition(":")[2])
    for reuse in (0, 1):
        with socket.socket() as intruder, pytest.raises(OSError):
            intruder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            intruder.bind(("", port))
    with socket.create_server(("", port), reuse_port=True):  # a worker's
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    reservation.close()


# -- the command -------------------------------------------------------------------------------------------------------

LAUNCHER = """
import signal
import sys
from pathlib import Path
from tfdist import launch
from tfdist.launcher.worker_count import WorkerCount
from tfdist.launcher.local_job import LocalJob
from tfdist.launcher.supervisor import RestartPolicy, Supervisor
logs = Path(sys.argv[2])
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored if the tests themselves run under nohup
def job(workers):
    return LocalJob([sys.executable, sys.argv[1]], workers, logs, grace=float(sys.argv[3]))
sys.exit(launch.run(Supervisor(job, RestartPolicy(3), lambda: -1, WorkerCount(2, 2)), logs))
"""


class Launched:
    """A launcher with two workers that have run `code` up to its end."""

    def __init__(self, tmp_path, code, grace=20.0):
        script = tmp_path / "worker.py"
        script.write_text(
            PREAMBLE + code + f"\nopen(os.path.join({str(tmp_path)!r}, f'pid-{{os.getpid()}}'), 'w')\ntime.sleep(60)"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(script), str(tmp_path / "logs"), str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        self.pids = [int(path.name[4:]) for path in tmp_path.glob("pid-*")]

    def ends(self):
        output, _ = self.process.communicate(timeout=30)
        until(lambda: not any(alive(pid) for pid in self.pids))
        return self.process.returncode, output


def test_a_killed_launcher_leaves_no_orphans(tmp_path):
    launched = Launched(tmp_path, "")
    launched.process.kill()
    assert launched.ends()[0] == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_the_workers_save_and_their_exit_code_is_passed_on(tmp_path, number):
    launched = Launched(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))")
    os.killpg(launched.process.pid, number)  # as a terminal does: to the whole group
    code, output = launched.ends()
    assert code == 42 and "PREEMPTED" in output and "worker-0.log" not in output and "logs are in" in output


def test_workers_that_do_not_end_are_killed_after_the_grace_period(tmp_path):
    launched = Launched(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)", grace=0.3)
    launched.process.terminate()
    code, output = launched.ends()
    assert code == ExitCode.PEER_LOST and "did not end when asked to" in output


def test_ctrl_c_twice_ends_at_once(tmp_path):
    launched = Launched(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    launched.process.send_signal(signal.SIGINT)
    assert "a second signal ends them" in launched.process.stdout.readline()
    launched.process.send_signal(signal.SIGINT)
    assert launched.ends()[0] == ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    "first, again, code_of_the_job, code",
    [
        ("SIGTERM", "SIGTERM", ExitCode.PREEMPTED, ExitCode.PREEMPTED),
        ("SIGTERM", "SIGTERM", ExitCode.PEER_LOST, ExitCode.PEER_LOST),
        ("SIGINT", "SIGTERM", ExitCode.DATA, ExitCode.DATA),
        ("SIGTERM", "SIGINT", ExitCode.PREEMPTED, ExitCode.INTERRUPTED),
    ],
)
def test_only_the_keyboard_hides_the_code_of_a_job_that_ends_at_once(first, again, code_of_the_job, code, monkeypatch):
    monkeypatch.setattr(signals, "_SAME_REQUEST_SECONDS", 0.0)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    asked = []

    def run():
        for name in (first, again):
            signal.raise_signal(getattr(signal, name))
        return JobResult(code_of_the_job, "", {})

    job = SimpleNamespace(request_stop=lambda: asked.append("stop"), kill=lambda: asked.append("kill"))
    try:
        assert launch.run(SimpleNamespace(run=run, stop=lambda: None, job=job), Path()) == code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert asked == ["stop", "kill"]


@pytest.mark.parametrize("first, again", [("SIGHUP", "SIGHUP"), ("SIGHUP", "SIGTERM"), ("SIGTERM", "SIGTERM")])
def test_a_request_that_comes_twice_lets_the_workers_save(tmp_path, first, again):
    """A shell passes SIGHUP on beside the terminal's; some engines signal a process and its group."""
    launched = Launched(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(42)))")
    for name in (first, again):
        launched.process.send_signal(getattr(signal, name))
        time.sleep(0.1)
    assert launched.ends()[0] == 42


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_requests_to_save_and_to_trace_are_passed_on(tmp_path, name):
    launched = Launched(tmp_path, f"signal.signal(signal.{name}, lambda *_: print('done', flush=True))")
    launched.process.send_signal(getattr(signal, name))
    assert sorted(launched.process.stdout.readline() for _ in range(2)) == ["[worker 0] done\n", "[worker 1] done\n"]
    launched.process.kill()
    launched.ends()


def test_workers_cannot_wait_for_the_terminals_input(tmp_path):
    launched = Launched(
        tmp_path, "assert sys.stdin.read() == ''"
    )  # would not get further if the launcher's input were its own
    launched.process.kill()
    launched.ends()


def test_the_last_lines_of_a_hidden_worker_are_shown(tmp_path, capsys):
    made, _ = job(tmp_path, "print('why')\nsys.exit(4 if rank else 0)", show={0})
    kept = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
    }
    try:
        assert (
            launch.run(
                Supervisor(lambda workers: made, RestartPolicy(0), lambda: -1, WorkerCount(2, 2)), tmp_path / "logs"
            )
            == 4
        )
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    error = capsys.readouterr().err
    assert "  why\n" in error and "worker 1 ended with exit code 4" in error and str(tmp_path / "logs") in error


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--worker=2", "--", "--steps=1"], ["--worker"]),
        (["--workers=2", "--steps=1"], ["--steps", "before `--`"]),
        (["--workers=0", "--"], ["--workers=0", "at least 1"]),
        (["--workers=x", "--"], ["--workers"]),
        (["--workers=2", "--gpus_per_worker=-1", "--"], ["--gpus_per_worker=-1"]),
        (["--workers=2", "--grace=nan", "--"], ["--grace=nan"]),
        (["--workers=2", "--grace=1e30", "--"], ["--grace=1e+30", "at most 100000000"]),
        (["--workers=2", "--max_restarts=-1", "--"], ["--max_restarts=-1", "at least 0"]),
        (["--workers=2", "--", "--stesp=1"], ["--stesp"]),
        (["--workers=2", "--show_ranks=a", "--"], ["--show_ranks=a", "0 to 1"]),
        (["--workers=2", "--show_ranks=2", "--"], ["--show_ranks=2", "0 to 1"]),
    ],
)
def test_usage(argv, words):
    with pytest.raises(ConfigError) as error:
        launch.main(argv)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_wrong_usage_ends_with_2_and_one_sentence():
    ended = subprocess.run([sys.executable, "-m", "tfdist.launch", "--workers=0"], capture_output=True, text=True)
    assert ended.returncode == ExitCode.CONFIG and len(ended.stderr.splitlines()) == 1 and "--workers=0" in ended.stderr


def test_help_imports_no_tensorflow():
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tfdist.launch", "--help"], capture_output=True, text=True
    )
    assert ended.returncode == 0 and "--gpus_per_worker" in ended.stdout
    assert (
        "tfdist.launcher.local_job" in ended.stderr and "tensorflow" not in ended.stderr and "numpy" not in ended.stderr
    )


# -- parameter servers
# ---------------------------------------------------------------------------------------------------

ROLES = "role = json.loads(os.environ['TF_CONFIG'])['task']['type']\n"
CHIEF_WAITS = (
    ROLES
    + "mark = sys.argv[0] + '.again'\nif role == 'chief':\n    while not os.path.exists(mark): time.sleep(0.02)\n   "
    " print('done', flush=True); sys.exit(0)\n"
)


def test_a_worker_of_parameter_servers_comes_back_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tfdist.launcher.worker_restarts._WAIT_SECONDS", 0.1)
    code = (
        CHIEF_WAITS
        + """
if role == 'worker' and rank == 1:
    if os.path.exists(sys.argv[0] + '.died'):
        open(mark, 'w').close()
        sys.exit(0)
    open(sys.argv[0] + '.died', 'w').close()
    os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists(mark): time.sleep(0.02)
sys.exit(6 if role == 'ps' else 0)
"""
    )
    made, output = job(tmp_path, code, servers=2)
    result = run(made)
    assert result.code == 0, output.getvalue()  # the chief ended well; what became of the others does not matter
    assert "worker 1 was killed by signal 9 (SIGKILL); it is restarted" in output.getvalue()
    assert list(result.exit_codes) == ["chief", "worker 0", "worker 1", "ps 0", "ps 1"]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "chief.log",
        "ps-0.log",
        "ps-1.log",
        "worker-0.log",
        "worker-1.log",
    ]


def test_no_worker_comes_back_to_a_job_that_is_asked_to_stop(tmp_path):
    made, _ = job(tmp_path, "", workers=1, servers=1)
    run(made)
    made.request_stop()
    before = list(made.workers)
    made._restart_worker(before[1])
    assert made.workers == before


def test_a_worker_that_cannot_be_started_again_is_tried_again(tmp_path, monkeypatch):
    """Neither the chief nor the other workers end for it."""
    monkeypatch.setattr("tfdist.launcher.worker_restarts._WAIT_SECONDS", 0.01)
    made, output = job(tmp_path, "", workers=1, servers=1)
    made.workers = [
        SimpleNamespace(name=name, rank=rank, slot=rank, code=code, ended_at=0.0)
        for rank, (name, code) in enumerate([("chief", None), ("worker 0", -9), ("ps 0", None)])
    ]
    monkeypatch.setattr("tfdist.launcher.local_job.describe", lambda worker: "worker 0 was killed")

    def spawn(*_):
        raise StartupError("worker 0 cannot be started (no memory).")

    monkeypatch.setattr(made, "_spawn", spawn)
    monkeypatch.setattr(made, "_notice_end", lambda worker: None)
    until(lambda: made.poll() is None and output.getvalue().count("worker 0 cannot be started") == 3)
    assert made._kill_at is None


def test_a_dead_parameter_server_stops_the_job(tmp_path):
    made, _ = job(
        tmp_path, CHIEF_WAITS + "if role == 'ps': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n", servers=1
    )
    result = run(made)
    assert result.code == ExitCode.PEER_LOST and result.cause == "ps 0 was killed by signal 9 (SIGKILL)"


@pytest.mark.slow
def test_a_worker_that_breaks_again_and_again_stops_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr("tfdist.launcher.worker_restarts._WAIT_SECONDS", 0.0)
    monkeypatch.setattr("tfdist.launcher.worker_restarts._MOST", 2)
    made, output = job(
        tmp_path, CHIEF_WAITS + "if role == 'worker': sys.exit(1)\ntime.sleep(60)\n", workers=1, servers=1
    )
    result = run(made)
    assert (
        result.code == 1
        and result.cause.startswith("worker 0 ended with exit code 1")
        and output.getvalue().count("it is restarted") == 2
    )
    made, output = job(
        tmp_path, CHIEF_WAITS + "if role == 'worker': sys.exit(2)\ntime.sleep(60)\n", workers=1, servers=1
    )
    assert run(made).code == ExitCode.CONFIG and "restarted" not in output.getvalue()


def test_gpus_go_to_the_workers_of_parameter_servers(tmp_path):
    made, _ = job(tmp_path, "", servers=2, environment={"CUDA_VISIBLE_DEVICES": "4,5"})
    gpus, _ = made._divide_gpus()
    assert [entry["CUDA_VISIBLE_DEVICES"] for entry in gpus] == ["-1", "4", "5", "-1", "-1", "-1"]


def test_gpus_of_workers_that_are_left_out_are_not_used(tmp_path):
    """GPU 4 is broken: whoever had it failed, however many workers there were."""
    made, _ = job(tmp_path, "", workers=2, left_out=[0], environment={"CUDA_VISIBLE_DEVICES": "4,5,6,7,8"})
    assert [entry["CUDA_VISIBLE_DEVICES"] for entry in made._divide_gpus()[0]] == ["5", "6", "7"]


def test_too_few_gpus_for_all_are_for_the_workers_that_are_left(tmp_path):
    made, _ = job(tmp_path, "", workers=2, left_out=[0], environment={"CUDA_VISIBLE_DEVICES": "5,6"})
    assert [entry["CUDA_VISIBLE_DEVICES"] for entry in made._divide_gpus()[0]] == ["5", "6", "-1"]


def test_the_next_job_does_without_the_worker_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, "CUDA_VISIBLE_DEVICES": "4,5"})
    monkeypatch.setattr(launch, "run", lambda supervisor, logs: supervisor)
    train = ["--steps=1", "--global_batch=8", f"--run_dir={tmp_path}"]
    supervisor = launch.main(["--workers=2", "--min_workers=1", "--max_restarts=5", "--", *train])
    for _ in range(2):
        supervisor.workers.failed(0, progress=False)
    made = supervisor.make_job(supervisor.workers.ask())
    assert [entry["CUDA_VISIBLE_DEVICES"] for entry in made._divide_gpus()[0]] == ["5", "-1"]


def test_what_does_not_go_with_parameter_servers_is_named(tmp_path):
    for flag in ("--min_workers=1", "--standby"):
        with pytest.raises(ConfigError, match=flag.partition("=")[0] + " is not available with --ps=1"):
            launch.main(["--workers=2", "--ps=1", flag, "--", "--steps=1", "--global_batch=8", f"--run_dir={tmp_path}"])


@pytest.mark.parametrize(
    "command, words",
    [
        (
            ["--elastic", "--", "--strategy=multi_worker", "--steps=1", "--global_batch=8"],
            "--strategy=multi_worker cannot: use --strategy=horovod",
        ),
        (
            ["--elastic", "--", "--strategy=horovod", "--deterministic", "--steps=1", "--global_batch=8"],
            "--deterministic cannot be guaranteed with --elastic",
        ),
        (["--elastic", "--ps=1", "--", "--steps=1"], "--elastic is not available with --ps=1"),
        (["--elastic", "--", "script.py"], "--elastic are for flags of tfdist.train"),
        (["--elastic", "--", "-m", "tfdist.doctor"], "drop them, or tfdist.doctor"),
        (["--", "-m"], "-m needs a module name"),
        (["--", "-m", "nowhere.to.be.found"], "-m nowhere.to.be.found: there is no such module"),
    ],
)
def test_what_cannot_be_launched(command, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        launch.main(["--workers=2", *command, *([] if {"script.py", "-m"} & {*command} else [f"--run_dir={tmp_path}"])])


def test_a_script_may_keep_its_backups_where_its_logs_are(tmp_path, monkeypatch):
    """In runs/NAME/backups, a folder that was taken for the file of the launcher's count."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "runs" / "mine" / "backups").mkdir(parents=True)
    monkeypatch.setattr(launch, "run", lambda supervisor, logs: (logs.mkdir(), supervisor)[1])
    supervisor = launch.main(["--workers=1", "--", "mine.py"])
    assert supervisor.newest_step() == -1
    backup_count.count_one(os.environ)
    assert supervisor.newest_step() == 1
    monkeypatch.chdir(tmp_path / "runs" / "mine")
    Path("mine.py").write_text("")
    Path("runs").write_text("not a folder")
    with pytest.raises(ConfigError, match="runs/mine/logs/.backup-count cannot be removed .Not a directory.: "):
        launch.main(["--workers=1", "--", "mine.py"])


@pytest.mark.parametrize(
    ("mesh", "batch"), [("pipe=2", 32), ("model=4", 16), ("", 64), (None, 64)], ids=["pipe", "model", "data", "no mesh"]
)
def test_fewer_workers_keep_the_batch_of_all(mesh, batch):
    """Of four, each of which is a replica only where the mesh makes it one. --dry_run counts so, too."""
    strategy = {"strategy": "multi_worker"} if mesh is None else {"strategy": "mesh", "mesh": mesh}
    config = Config().replace(**strategy, micro_batch=8, accumulation=2, steps=1)
    options = SimpleNamespace(workers=4, gpus_per_worker=1, on="here")
    assert launch.same_batch(config, options) == [f"--global_batch={batch}", "--micro_batch=8", "--accumulation=0"]
    four = Cluster.of_workers([f"localhost:{port}" for port in range(1, 5)], 0)
    assert f"global batch {batch} = " in train.dry_run(config, four)
