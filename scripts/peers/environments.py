"""The virtual environments of the engines: created once, kept, and updated when their recipe changes.

Keras 3, Horovod and tfdist share one environment, since tfdist's environment needs all three. tf-keras and Orbit have
their own environments on top of it, so that all these engines have the very same TensorFlow.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_PUT_ON_TOP = """
import pathlib, sys, sysconfig
base = next(pathlib.Path(sys.argv[1]).glob("lib/python*/site-packages"))
pathlib.Path(sysconfig.get_path("purelib"), "base.pth").write_text(f"{base}\\n")
"""


@dataclass(frozen=True)
class Recipe:
    """`alone`: packages to install without their dependencies. `base`: the environment beneath this one."""

    packages: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    horovod: bool = False
    base: str = ""


def recipes(torch: str) -> dict[str, Recipe]:
    """Returns the recipes by name. `torch`: the requirement that pip gets for PyTorch."""
    return {
        "tfdist": Recipe(("-r", "requirements.txt"), horovod=True),
        "torch": Recipe((torch, "numpy")),
        "tf-keras": Recipe(("tf-keras~=2.21.0",), base="tfdist"),
        # Orbit is part of the Model Garden, which requires many packages that Orbit does not need; it imports tf-keras.
        "orbit": Recipe(("tf-keras~=2.21.0",), alone=("tf-models-official~=2.20.0",), base="tfdist"),
    }


def make(name: str, recipe: Recipe, folder: Path) -> str:
    """Creates the environment FOLDER/NAME if it is missing or outdated, with pip as it is configured.

    Returns the reason if this fails, or "".
    """
    venv = folder / name
    stamp, wanted = venv / ".made-by-bench_peers", repr(recipe)
    if "requirements.txt" in wanted:
        wanted += (REPOSITORY / "requirements.txt").read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return ""
    log = folder / f"{name}.log"
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Creating the environment {venv} (log: {log}) ...", file=sys.stderr, flush=True)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    commands = [[sys.executable, "-m", "venv", str(venv)]]
    if recipe.base:
        commands.append([str(venv / "bin" / "python"), "-c", _PUT_ON_TOP, str(folder / recipe.base)])
    if recipe.packages:
        commands.append([*pip, *recipe.packages])
    if recipe.alone:
        commands.append([*pip, "--no-deps", *recipe.alone])
    if recipe.horovod:
        commands.append(["bash", str(REPOSITORY / "scripts" / "install_horovod.sh")])
    environment = {**os.environ, "HOROVOD_PYTHON": str(venv / "bin" / "python")}
    with open(log, "w", encoding="utf-8") as output:
        for command in commands:
            if subprocess.run(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            ).returncode:
                last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
                return (
                    f"its environment could not be created ({' '.join(command[:4])} ... failed: {last[0][:200]}); see"
                    f" {log}"
                )
    stamp.write_text(wanted)
    return ""
