"""What starts warm (tests/warm_start) cannot be told from what starts as always."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.e2e.job import ENVIRONMENT
from tfdist.control.processes import spawn

pytestmark = pytest.mark.slow

LOOK = """
import atexit, json, os, random, signal, subprocess, sys
if __name__ == "__main__":
    from tests.e2e.job import children
    subprocess.run([sys.executable, __file__, "inner"]) if sys.argv[1:] == ["outer", "x y"] else None
    here = {
        "argv": sys.argv, "path": [sys.path[0], os.environ["PYTHONPATH"].split(":")[0] in sys.path],
        "folder": os.getcwd(), "variable": os.environ.get("VARIABLE"), "parent": os.getppid(), "own": os.getpid(),
        "session": os.getsid(0) == os.getpid(), "threads": len(os.listdir("/proc/self/task")),
        "signals": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals() if n < 32},
        "main": sys.modules["__main__"].__name__, "warm": "tensorflow" in sys.modules,
        "shown": [open("/proc/self/cmdline").read(), "VARIABLE=a" in open("/proc/self/environ").read().split("\\0")],
        "standard": [os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in range(3)],
        "buffered": [sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.line_buffering],
        "errors": [sys.stdin.encoding, sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors],
        "children": len(children(os.getpid())) if sys.argv[1:] == ["outer", "x y"] else 0,
    }
    print(json.dumps(here))
    atexit.register(print, "the end")
    sys.exit(7)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "look.py"
    path.write_text(LOOK)
    return path


def looked(script, *arguments, **options):
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**ENVIRONMENT, "VARIABLE": "a", "PYTHONUNBUFFERED": "1"},
        cwd=script.parent,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        **options,
    )
    assert done.returncode == 7 and done.stdout.endswith("the end\n"), done
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_it_finds_what_it_would_find(script, request):
    warm = looked(script, "outer", "x y", start_new_session=True)
    request.getfixturevalue("real_start")
    real = looked(script, "outer", "x y", start_new_session=True)
    assert [found.pop("warm") for found in (*warm, *real)] == [True, True, False, False]
    for found in (warm, real):
        inner, outer = found
        assert "inner" in inner["argv"][1] and inner["parent"] == outer["own"] and outer["parent"] == os.getpid()
        for one in found:
            one["shown"][0] = one["shown"][0].rstrip("\0")
            del one["own"], one["parent"]
    for one, other in zip(warm, real, strict=True):
        differences = {key: (one[key], other[key]) for key in other if one[key] != other[key]}
        assert not differences


# By default, though whoever runs the tests may ignore it.
INTERRUPTED = (
    "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); os.kill(os.getpid(), signal.SIGINT)"
)


def test_it_ends_as_it_would_end(tmp_path):
    ends = {
        "raise KeyError('x')": 1,
        "import sys; sys.exit('said')": 1,
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
        INTERRUPTED: -signal.SIGINT,
        "import threading; threading.Timer(0.1, print, ['thread']).start()": 0,
    }
    for number, (text, code) in enumerate(ends.items()):
        path = tmp_path / f"end-{number}.py"
        path.write_text(text)
        done = subprocess.run([sys.executable, path], env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == code, (text, done)
        assert ("KeyError: 'x'" in done.stderr) == (number == 0) and "warm_start" not in done.stderr, done
        assert ("said" in done.stderr) == (number == 1) and ("thread" in done.stdout) == (number == 4), done


def test_what_cannot_be_done_is_told():
    def fail():
        raise ValueError

    with pytest.raises(FileNotFoundError):
        subprocess.run([sys.executable, "x.py"], cwd="/no/such/folder")
    with pytest.raises(subprocess.SubprocessError, match="preexec_fn"):
        subprocess.run([sys.executable, "x.py"], preexec_fn=fail)


def test_it_ends_with_its_parent(tmp_path):
    """By `spawn` of a process that is killed: the kernel ends the child."""
    child, parent = tmp_path / "child.py", tmp_path / "parent.py"
    child.write_text("import time\nprint('here', flush=True)\ntime.sleep(60)")
    parent.write_text(
        "import os, sys, time\nfrom tfdist.control.processes import spawn\n"
        f"made = spawn([sys.executable, {str(child)!r}], os.environ, None)\n"
        "print(made.stdout.readline(), made.pid, flush=True)\ntime.sleep(60)"
    )
    process = spawn([sys.executable, str(parent)], ENVIRONMENT, {min(os.sched_getaffinity(0))})
    pid = int(process.stdout.readline().split()[-1])
    assert len(os.sched_getaffinity(process.pid)) == len(os.sched_getaffinity(pid)) == 1
    listed = subprocess.Popen(["tail", f"--pid={pid}", "-f", "/dev/null"])  # ends with it
    process.kill()
    process.wait()
    assert listed.wait(timeout=20) == 0
