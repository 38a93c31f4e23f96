"""One process of a group: takes cases from the fuzzer and returns their results, until the connection ends.

python -m tests.fuzz.worker PORT KIND        with TF_CONFIG for more than one worker
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from multiprocessing.connection import Client
from typing import Any

KEY = b"tfdist-fuzz"
COLLECT_EVERY = 15  # sets of data between garbage collections; Python's own would often run in the middle of tracing


def answer(case: dict[str, Any], runtimes) -> dict[str, Any]:
    """Runs a case. Returns {"parts": a dict {"arrays", ...} for each of its data}, {"refused": error class, "sentence"}
    or {"failed": the error}.
    """
    from tests.fuzz import fit_case, gpu_form, keras_settings, servers_case, train_case
    from tfdist.control.exit_codes import TfdistError

    try:
        runtime = runtimes.get(case)
        with keras_settings.optimized(case.get("optimized", False)), gpu_form.kernels(case):
            if case["kind"] == "fit":
                return fit_case.on_workers(case, runtime)
            if case["runtime"].startswith("parameter_server"):
                return servers_case.run(case, runtime, runtimes.cluster)
            return train_case.run(case, runtime)
    except TfdistError as error:
        return {"refused": type(error).__name__, "sentence": str(error)}
    except Exception as error:
        return {"failed": _in_short(error)}


def _in_short(error: Exception) -> str:
    """Returns the error and the last lines in tfdist or the fuzzer that led to it."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/tfdist/" in frame.filename or "/fuzz/" in frame.filename
    ]
    return f"{type(error).__name__}: {str(error)[:1000]}\n" + "\n".join(
        f"    {frame.filename}:{frame.lineno} in {frame.name}" for frame in own[-4:]
    )


def main(port: int, kind: str) -> None:
    from tests.fuzz import given, gpu_form

    if gpu_form.is_real():
        gpu_form.prepare()
    from tests.fuzz.runtimes import PATIENCE, Runtimes, prepare_devices
    from tfdist.control.resolvers import resolve_cluster

    cluster = resolve_cluster(os.environ)
    if cluster.rank < 0 or cluster.role != "chief" and "ps" in cluster.spec:
        from tfdist.config import Config
        from tfdist.runtime import parameter_server

        sys.exit(
            parameter_server.serve(
                Config().replace(strategy="parameter_server", steps=1, **PATIENCE), cluster, lambda: True
            )
        )
    if kind == "local":
        prepare_devices()
    given.rank = max(cluster.rank, 0)
    runtimes = Runtimes(cluster)
    from tests.fuzz import fit_case, servers_case, train_case  # noqa: F401 - imported before gc.freeze()
    from tfdist import build  # noqa: F401

    gc.collect()
    gc.freeze()
    gc.disable()
    with Client(("127.0.0.1", port), authkey=KEY) as connection:
        connection.send(cluster.rank)
        number = 0
        while True:
            try:
                case = connection.recv()
            except EOFError:
                break
            if case is None:
                break
            begun = time.process_time()
            found = answer(case, runtimes)
            number += len(found.get("parts", [1]))
            if number >= COLLECT_EVERY:
                gc.collect()
                number = 0
            connection.send({**found, "cpu": time.process_time() - begun})
    os._exit(0)  # a normal shutdown of the runtimes waits for peers that may be gone


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
