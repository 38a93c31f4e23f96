"""Faults on purpose happen where and when they should, once."""

import signal
import subprocess
import sys

import pytest

from tfdist.control.exit_codes import ConfigError
from tfdist.control.faults import Faults


def test_each_happens_once_at_the_first_chance(tmp_path):
    faults = Faults.parse("0:5:error,1:7:error, 0:9:error", 0, tmp_path)
    faults.at("step", 4)
    faults.at("save", 6)
    with pytest.raises(RuntimeError):
        faults.at("step", 6)
    faults.at("step", 7)
    again = Faults.parse("0:5:error,0:9:error", 0, tmp_path)  # after a restart
    again.at("step", 8)
    with pytest.raises(RuntimeError):
        again.at("step", 9)


def test_a_full_disk_lets_two_writes_fail(tmp_path):
    faults = Faults.parse("0:5:disk_full", 0, tmp_path)
    faults.at("save", 4)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            faults.at("save", 6)
    faults.at("save", 6)


@pytest.mark.parametrize("text", ["1:2", "a:2:kill", "1:2:explode", "1:-2:kill"])
def test_what_is_not_understood_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match="TFDIST_FAULTS"):
        Faults.parse(text, 1, tmp_path)


@pytest.mark.parametrize("place, kind", [("step", "kill"), ("save", "kill_save"), ("restore", "kill_restore")])
def test_kill(place, kind, tmp_path):
    code = f"""
from pathlib import Path
from tfdist.control.faults import Faults
faults = Faults.parse("2:3:{kind}", 2, Path({str(tmp_path)!r}))
for other in {{"step", "save", "restore"}} - {{{place!r}}}: faults.at(other, 3)
print("alive", flush=True)
faults.at({place!r}, 3)
print("still alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL and done.stdout == "alive\n" and f"{kind} at step 3" in done.stderr
