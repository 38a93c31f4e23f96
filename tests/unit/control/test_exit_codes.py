"""How commands end, and which versions they refuse."""

import contextlib
import os
import signal
import subprocess
import sys
from importlib import metadata

import pytest

from tfdist.control import exit_codes, versions
from tfdist.control.exit_codes import MEANING, ExitCode, TfdistError, UnsupportedError


def test_every_code_has_a_meaning_and_every_error_a_code():
    assert set(MEANING) == set(ExitCode)
    errors = [kind for kind in vars(exit_codes).values() if isinstance(kind, type) and issubclass(kind, TfdistError)]
    assert len(errors) > 8 and all(isinstance(kind.exit_code, ExitCode) for kind in errors)


@pytest.mark.parametrize(
    "body, code, words",
    [
        ("return 0", 0, []),
        ("return 42", 42, []),
        (
            "raise exit_codes.DataError('no files in x: check --data_dir.')",
            4,
            ["tfdist: error: no files in x: check --data_dir. (exit code 4, DATA)"],
        ),
        (
            "raise exit_codes.ConfigError('Exception encountered when calling Sequential.call().\\n\\n'"
            " 'x is wrong: mend it.\\n\\nArguments received by Sequential.call():\\n  args=(1,)')",
            2,
            ["tfdist: error: x is wrong: mend it. (exit code 2, CONFIG)"],
        ),
        (
            "raise exit_codes.PeerFailedError('worker 1 failed: no files.', exit_codes.ExitCode.DATA)",
            4,
            ["tfdist: error: worker 1 failed: no files. (exit code 4, DATA, passed on)"],
        ),
        ("raise KeyError('surprise')", 1, ["Traceback", "unexpected KeyError: 'surprise' (exit code 1, INTERNAL)"]),
        ("raise KeyboardInterrupt", 130, ["interrupted"]),
        ("raise SystemExit(0)", 0, []),
    ],
)
def test_endings(body, code, words):
    script = f"from tfdist.control import exit_codes\ndef main(argv):\n    {body}\nexit_codes.run_command(main, [])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == code and all(word in result.stderr for word in words), result.stderr
    assert ("Traceback" in result.stderr) == ("Traceback" in words)


def test_the_first_code_that_no_new_start_mends_is_noted(monkeypatch, tmp_path):
    ended = []
    monkeypatch.setattr(exit_codes.os, "_exit", ended.append)
    monkeypatch.setattr(exit_codes, "say_last_words", lambda text: None)
    monkeypatch.setattr(exit_codes, "_taken_file", "")
    note = tmp_path / "code"
    exit_codes.end_process("no file is named", ExitCode.DATA)
    monkeypatch.setenv(exit_codes.FINAL_CODE_VARIABLE, str(note))
    exit_codes.end_process("worker 1 is gone", ExitCode.PEER_LOST)
    assert exit_codes.FINAL_CODE_VARIABLE not in os.environ
    assert list(tmp_path.iterdir()) == []
    exit_codes.end_process("no files", ExitCode.DATA)
    assert note.read_text() == "4"
    exit_codes.end_process("in use", ExitCode.CONFIG)
    assert note.read_text() == "4" and ended == [4, 6, 4, 2]
    monkeypatch.setenv(exit_codes.FINAL_CODE_VARIABLE, str(tmp_path / "no" / "folder"))
    exit_codes.end_process("in use", ExitCode.CONFIG)


GOOD = {"tensorflow": "2.21.0", "keras": "3.15.1"}


def check(python=(3, 11), **changes):
    found = {**GOOD, **changes}

    def installed(name):
        if found.get(name) is None:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    versions.check(python, installed)


def test_versions():
    check()
    check((3, 13), tensorflow=None, **{"tensorflow-cpu": "2.21.3"})
    for python, changes, word in [
        ((3, 10), {}, "Python 3.10"),
        ((3, 14), {}, "Python 3.14"),
        ((3, 11), {"tensorflow": "2.20.0"}, "tensorflow 2.20.0"),
        ((3, 11), {"tensorflow": "2.210.0"}, "2.210.0"),
        ((3, 11), {"keras": "3.14.2"}, "keras 3.14.2"),
        ((3, 11), {"keras": None}, "keras is not installed"),
    ]:
        with pytest.raises(UnsupportedError, match=word):
            check(python, **changes)


@pytest.mark.parametrize(
    "given, expected",
    [
        (None, "--xla_gpu_enable_triton_gemm=false"),
        ("--xla_dump_to=/tmp/x", "--xla_dump_to=/tmp/x --xla_gpu_enable_triton_gemm=false"),
        ("--xla_gpu_enable_triton_gemm=true", "--xla_gpu_enable_triton_gemm=true"),
        ("flags.txt", "flags.txt"),  # a file of flags
    ],
)
def test_how_xla_multiplies_on_gpus_is_the_users_choice(given, expected, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if given:
        monkeypatch.setenv("XLA_FLAGS", given)
    versions.prefer_cublas()
    versions.prefer_cublas()  # a worker that starts another
    assert os.environ["XLA_FLAGS"] == expected


def test_an_error_within_a_users_tf_function_stays_as_it_is():
    import tensorflow as tf

    @tf.function
    def step():
        return refuse()

    def refuse():
        raise exit_codes.ConfigError("x is wrong: mend it.")

    with pytest.raises(exit_codes.ConfigError, match="^x is wrong: mend it.$"):
        step()


# What happens to a process whose output nobody takes any more: (script, what it ends with)
STARTS_IN_VAIN = """
import time
from tfdist.control import exit_codes
from tfdist.control.cluster import Cluster
from tfdist.control.startup_deadline import connecting
exit_codes._SAYING_SECONDS = 0.3
print("begun", flush=True)
with connecting(Cluster.of_workers(["127.0.0.1:1", "127.0.0.1:2"], 0), 0.3, None):
    time.sleep(20)
"""
IS_ASKED_TO_STOP = """
import os, signal, sys, time
from tfdist.control.signals import SignalRequests
requests = SignalRequests().install()
print("begun", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(42 if requests.stop else 1)
"""
GOES_ON_SAYING = """
import sys
from tfdist.control import exit_codes
def main(argv):
    print("begun", flush=True)
    sys.stdin.readline()
    print("a line", file=sys.stderr, flush=True)
    raise exit_codes.DataError("no files: check --data_dir.")
exit_codes.run_command(main, [])
"""
FAILS = """
import sys
from tfdist.control import exit_codes
exit_codes._SAYING_SECONDS = 0.3
def main(argv):
    print("begun", flush=True)
    sys.stdin.readline()
    sys.stdout.write("not flushed")
    raise {error}
exit_codes.run_command(main, [])
"""
LOSES_A_PEER = FAILS.format(error="exit_codes.PeerLostError('lost contact with worker 1.')")


@pytest.mark.parametrize(
    "script, code, reader",
    [
        pytest.param(STARTS_IN_VAIN, ExitCode.STARTUP, "has gone", id="starts in vain"),
        pytest.param(STARTS_IN_VAIN, ExitCode.STARTUP, "reads no more", id="starts in vain, full pipe"),
        pytest.param(IS_ASKED_TO_STOP, 42, "has gone", id="is asked to stop"),
        pytest.param(IS_ASKED_TO_STOP, 42, "reads no more", id="is asked to stop, full pipe"),
        pytest.param(GOES_ON_SAYING, ExitCode.DATA, "has gone", id="goes on saying"),
        pytest.param(LOSES_A_PEER, ExitCode.PEER_LOST, "reads no more", id="loses a peer, full pipe"),
        pytest.param(FAILS.format(error="OSError"), ExitCode.INTERNAL, "reads no more", id="fails, full pipe"),
        pytest.param(FAILS.format(error="KeyboardInterrupt"), 130, "reads no more", id="is interrupted, full pipe"),
    ],
)
def test_a_process_ends_as_it_must_though_nobody_reads_what_it_says(script, code, reader):
    ours, its = os.pipe()
    if reader == "reads no more":
        os.set_blocking(its, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(its, bytes(4096))
        os.set_blocking(its, True)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=its, text=True
    ) as process:
        os.close(its)
        assert process.stdout.readline() == "begun\n"
        if reader == "has gone":
            os.close(ours)
        process.stdin.write("\n")
        process.stdin.close()
        try:
            assert process.wait(15) == code
        finally:
            process.kill()
    if reader != "has gone":
        os.close(ours)


WITHOUT_STREAMS = """
import os, sys
from tfdist.control import exit_codes
def main(argv):
    made = os.open(argv[0], os.O_WRONLY | os.O_CREAT)
    os.write(made, b"a snapshot")
    for descriptor in (1, 2):
        os.write(descriptor, b"what a library says")
    print("a line", flush=True)
    print("an error", file=sys.stderr, flush=True)
    assert not sys.stdin.read()
    raise exit_codes.DataError("no files: check --data_dir.")
exit_codes.run_command(main, sys.argv[1:])
"""


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_end_up_in_a_file(tmp_path, closed):
    """Whose number a file gets that is opened later."""
    command = f'exec "$0" -c "$1" "$2" {closed}'
    given = ["sh", "-c", command, sys.executable, WITHOUT_STREAMS, str(tmp_path / "file")]
    found = subprocess.run(given, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == ExitCode.DATA, found.stderr
    assert (tmp_path / "file").read_bytes() == b"a snapshot"
    assert ("a line" in found.stdout) == (">&-" not in closed.replace("2>&-", ""))
    assert ("no files" in found.stderr) == ("2>&-" not in closed)


FAILS_WITH_A_HELPER = """
import multiprocessing, time
from tfdist.control import exit_codes
def main(argv):
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True).start()
    raise exit_codes.DataError("no files: check --data_dir.")
exit_codes.run_command(main, [])
"""


def test_helpers_that_python_would_end_do_not_outlive_a_process_that_fails():
    """A data source had started them. They went on, and whoever read the output waited for its end."""
    with subprocess.Popen(
        [sys.executable, "-c", FAILS_WITH_A_HELPER], stderr=subprocess.PIPE, process_group=0
    ) as process:
        try:
            assert b"no files" in process.communicate(timeout=20)[1] and process.returncode == ExitCode.DATA
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_a_thread_that_is_left_behind_is_named_and_holds_no_signal_up():
    """The code is decided: whoever ends such a process by SIGTERM is told that all is well."""
    body = (
        "import threading, time\n"
        "from tfdist.control import exit_codes\n"
        "exit_codes._HELD_SECONDS = 0.1\n"
        "def main(argv):\n"
        "    threading.Thread(target=time.sleep, args=(600,), name='left-behind').start()\n"
        "exit_codes.run_command(main, [])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", body], stderr=subprocess.PIPE, text=True)
    try:
        said = process.stderr.readline()
        assert "all work is done, but the process is waiting for left-behind: end these threads" in said
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.stderr.close()
