"""python -m tfdist.comm: measures how fast the workers exchange data, and fits latency and bandwidth to it.

On a cluster it is started like a training, once per worker, with TF_CONFIG (or what else tells the cluster) and the same
flags. With --workers it starts that many workers on this machine, one job for every number and every runtime:

  python -m tfdist.comm --workers=2,4 --runtimes=multi_worker,mesh

It prints times, algorithm and bus bandwidth as NVIDIA's nccl-tests define them, the fitted line a + S / b of each
collective with its error on sizes that were not used in the fit, and what ring, tree and halving-doubling would need of
the link. --out gets RUNTIME-N.csv and RUNTIME-N.png.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tfdist import flags
from tfdist.config import Config, option
from tfdist.control import exit_codes, versions
from tfdist.control.cluster import resolve_cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.control.launcher import LocalJob
from tfdist.control.preflight import Preflight

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_OWN_JOB_FLAGS = ("--workers", "--runtimes")


@dataclass(frozen=True)
class CommOptions:
    """What is measured."""

    workers: str = option("", "Start this many workers on this machine; several numbers, such as 2,4, one after the other. Empty: be one worker of the cluster.")
    runtimes: str = option("", "With --workers: runtimes to measure, one after the other. Empty: --strategy.")
    collectives: str = option("all", f"Which: all, or some of {', '.join(COLLECTIVES)}. What a runtime does not have is left out.")
    smallest: int = option(1024, "Smallest size, bytes.", least=4)
    largest: int = option(16 * 2**20, "Largest size, bytes.", least=4)
    factor: float = option(2.0, "From one size to the next.", least=1.1)
    repeats: int = option(9, "Measurements of each size, of which the median counts.", least=1)
    out: str = option("comm", "Folder for CSV files and pictures.")


def main(argv: list[str]) -> int:
    config, options = flags.parse([arg for arg in argv if arg != "--"], usage=__doc__, command=CommOptions)
    names = _names(options)
    if options.smallest > options.largest:
        raise ConfigError(f"--smallest={options.smallest} is above --largest={options.largest}: swap them.")
    out = Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out={out} cannot be made ({error.strerror}): choose a folder that can be written.") from None
    if options.workers:
        return start_jobs(argv, config, options, out)
    versions.check()
    versions.quiet()
    measure_as_worker(config, options, names, out)
    return 0


def _names(options: CommOptions) -> list[str]:
    names = list(COLLECTIVES) if options.collectives == "all" else options.collectives.split(",")
    for name in names:
        if name not in COLLECTIVES:
            raise ConfigError(f"--collectives={options.collectives}: {name!r} is not one of {', '.join(COLLECTIVES)}.")
    return names


def sizes(options: CommOptions) -> list[int]:
    """Bytes, from the smallest to the largest, each `factor` times the one before."""
    found, size = [], float(options.smallest)
    while size <= options.largest * (1 + 1e-9):
        found.append(round(size))
        size *= options.factor
    return found


def measure_as_worker(config: Config, options: CommOptions, names: list[str], out: Path) -> None:
    """Measures as one worker of the cluster; the chief shows what came out."""
    cluster = resolve_cluster(os.environ)
    if cluster.size < 2:
        raise ConfigError("tfdist.comm needs several workers, but there is no TF_CONFIG that lists any: add --workers=2 to start them on this machine.")
    with Preflight(cluster, config.cluster.startup_timeout):
        from tfdist import build
        from tfdist.communication import present
        from tfdist.communication.measure import measure
    runtime = build.start_runtime(config, cluster)
    found = measure(runtime, names, sizes(options), options.repeats)
    if runtime.rank == 0:
        stem = out / f"{runtime.name}-{runtime.size}"
        print(present.table(runtime.name, found), flush=True)
        present.write_csv(stem.with_suffix(".csv"), runtime.name, found)
        problem = present.draw(stem.with_suffix(".png"), runtime.name, found)
        print(f"\n{problem or f'{stem}.csv, {stem}.png'}", flush=True)
    runtime.barrier()
    runtime.close()


def start_jobs(argv: list[str], config: Config, options: CommOptions, out: Path) -> int:
    """One local job after the other; returns the first exit code that is not 0."""
    counts = options.workers.split(",")
    if not all(count.isdecimal() and int(count) > 1 for count in counts):
        raise ConfigError(f"--workers={options.workers} must be numbers from 2, such as 2,4.")
    rest = [arg for arg in argv if arg != "--" and arg.partition("=")[0] not in _OWN_JOB_FLAGS]
    for runtime in (options.runtimes or config.strategy.strategy).split(","):
        for count in map(int, counts):
            job = LocalJob([sys.executable, "-m", "tfdist.comm", *rest, f"--strategy={runtime}"], count, out / "logs", show={0})
            job.start()
            result = job.wait()
            if result.code:
                print(*result.last_lines, f"tfdist: {result.cause}", f"tfdist: logs are in {out / 'logs'}", sep="\n", file=sys.stderr)
                return result.code
        if len(counts) > 1 and runtime != "auto":
            compare_models(runtime, [out / f"{runtime}-{count}.csv" for count in counts])
    return 0


def compare_models(runtime: str, files: list[Path]) -> None:
    """Over several numbers of workers the algorithms can be told apart."""
    from tfdist.communication import present

    found = sorted((one for path in files for one in present.read_csv(path)), key=lambda one: COLLECTIVES.index(one.collective))
    for name, group in present.by_collective(found):
        print(f"\n{name}, {runtime}, {' and '.join(str(count) for count in sorted({one.workers for one in group}))} workers together", *present.explanations(name, group), sep="\n", flush=True)


if __name__ == "__main__":
    exit_codes.run_command(main, sys.argv[1:])
