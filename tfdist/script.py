"""python -m tfdist.script SCRIPT [ARGS]: runs a Python script of yours so that errors of tfdist end with their exit
codes.

What `python -m tfdist.launch --workers=2 -- script.py ARGS` starts on every worker. Without it an error would end the
script with a traceback and code 1, and a supervisor could not tell a lost peer from a mistake.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tfdist.control import exit_codes, token
from tfdist.control.exit_codes import ConfigError


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("--help", "-h"):
        print(__doc__)
        return 0
    script = Path(argv[0])
    if not script.is_file():
        raise ConfigError(f"{script} is not there: name a Python file that calls tfdist.fit.")
    token.read(os.environ)  # before the script, and what it starts, can see it there
    sys.argv = argv
    sys.path[0] = str(script.resolve().parent)  # as `python script.py` has it
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    exit_codes.run_command(main, sys.argv[1:])
