"""Several GPUs and one process: a script that calls `tfdist.init()` first is started again, once for each GPU.

Keras' loop runs once in a process and on one device, so each GPU needs a process of its own. As in Lightning's DDP
(https://lightning.ai/docs/pytorch/stable/accelerators/gpu_intermediate.html), the script need not handle this: this
process becomes the launcher of as many workers as there are GPUs.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from tfdist.compat import tensorflow_cluster
from tfdist.control import lease
from tfdist.control.machine_shares import visible_gpus
from tfdist.control.terminal import say

CHOICES = ("all", "one")


def use_all(choice: str) -> None:
    """Does not return if this process can become the launcher of one worker for each GPU.

    Called by a process that is alone. Args: choice, one of CHOICES.
    """
    if choice == "one" or os.environ.get("TF_CONFIG") or os.environ.get(lease.JOB_VARIABLE):
        return
    count = _count(os.environ)  # a driver may take long to answer
    if count < 2:
        return
    argv = started_again(sys.modules["__main__"], sys.argv)
    if argv and not tensorflow_cluster.has_computed():
        say(f"{count} GPUs were found: this script is restarted with a worker for each; local_gpus='one' uses one.")
        _become_launcher(count, argv)
    early = "call tfdist.init() at the top of the script, or " if argv else ""
    script = Path(argv[0]).name if argv else "script.py"
    say(f"{count} GPUs were found and one is used: {early}start it with `tfdist launch --workers={count} -- {script}`.")


def started_again(main: object, argv: list[str]) -> list[str]:
    """The script and its arguments; [] if the process was not started by `python script.py`, as in a notebook or under
    pytest.

    Args: main, the module __main__; argv, as in sys.
    """
    is_script = getattr(main, "__spec__", None) is None and hasattr(main, "__file__")
    return argv if is_script and argv and argv[0].endswith(".py") and Path(argv[0]).is_file() else []


def _count(environment: Mapping[str, str]) -> int:
    """The number of GPUs that may be used; 0 where there is no driver, whatever CUDA_VISIBLE_DEVICES says."""
    return len(visible_gpus(environment)) if shutil.which("nvidia-smi") else 0


def _become_launcher(workers: int, argv: list[str]) -> NoReturn:
    here = str(Path(__file__).resolve().parents[2])  # tfdist was imported from here, perhaps by the script's own path
    path = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), here]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "tfdist.launch", f"--workers={workers}", "--", *argv])
