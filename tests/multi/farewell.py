"""One worker of tests/multi/test_farewell.py: all ranks are done, but rank LATE is slow to leave.

python -m tests.multi.farewell LATE SECONDS [train flags]
"""

from __future__ import annotations

import os
import sys
import time

from tfdist.control import exit_codes
from tfdist.control.exit_codes import ExitCode


def main(argv: list[str]) -> int:
    from tfdist import build
    from tfdist.control.resolvers import resolve_cluster
    from tfdist.flags import parse

    late, seconds, *flags = argv
    runtime = build.start_runtime(parse(flags).config, resolve_cluster(os.environ))
    runtime.barrier()
    if runtime.rank == int(late):
        time.sleep(float(seconds))
    begun = time.monotonic()
    runtime.close()
    print(f"rank {runtime.rank} left after {time.monotonic() - begun:.1f} s", flush=True)
    return ExitCode.OK


if __name__ == "__main__":
    exit_codes.run_command(main, sys.argv[1:])
