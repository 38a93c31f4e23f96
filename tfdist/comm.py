"""python -m tfdist.comm: measures how fast workers exchange data, and fits latency and bandwidth to the results.

On a cluster, start it like a training: once per worker, with TF_CONFIG (or whatever describes the cluster) and the
flags of the training. With --workers it starts that many workers on this machine: one job for every number and every
runtime:

  python -m tfdist.comm --workers=2,4 --runtimes=multi_worker:socket,multi_worker:ring,horovod,mesh

It prints times, and algorithm and bus bandwidth as NVIDIA's nccl-tests define them; for each collective a fitted line
with its error at sizes that were not used in the fit; and the link (latency and bandwidth) that ring, tree and
halving-doubling would need. Given several numbers of workers, it says which of these algorithms explains all
measurements best. --out gets RUNTIME-N.csv and .png, and RUNTIME-models.png.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist import flags
from tfdist.communication.measurement import BUS_FACTOR
from tfdist.config import Config, option
from tfdist.config.strategies import STRATEGIES, strategy_or_undecided
from tfdist.control import exit_codes, versions
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ClusterError, ConfigError, UnsupportedError
from tfdist.control.preflight import Preflight
from tfdist.control.resolvers import cluster_to_join
from tfdist.control.token import with_token
from tfdist.launcher.local_job import LocalJob
from tfdist.runtime.factory import resolve_strategy

if TYPE_CHECKING:
    from tfdist.communication.present import Series
    from tfdist.runtime.base import Runtime

COLLECTIVES = tuple(BUS_FACTOR)
RUNTIMES = tuple(name for name, strategy in STRATEGIES.items() if strategy.exchanges)


@dataclass(frozen=True)
class CommOptions:
    """What to measure."""

    workers: str = option(
        "",
        "Start this many workers on this machine; several numbers, such as 2,4, one after the other. Empty: be one"
        " worker of the cluster.",
    )
    runtimes: str = option(
        "",
        f"With --workers: some of {', '.join(RUNTIMES)}, one after the other; multi_worker:ring is"
        " --strategy=multi_worker --communication=ring. Empty: --strategy and --communication.",
    )
    collectives: str = option("all", f"all, or some of {', '.join(COLLECTIVES)}.")
    smallest: int = option(1024, "Smallest size, bytes.", least=4)
    largest: int = option(16 * 2**20, "Largest size, bytes.", least=4)
    factor: float = option(2.0, "Factor from one size to the next.", least=1.1)
    repeats: int = option(9, "Measurements of each size; their median counts.", least=1)
    out: str = option("comm", "Folder for CSV files and pictures.")


def main(argv: list[str]) -> int:
    config, options = flags.parse(argv, usage=__doc__ or "", command=CommOptions)
    config.replace(steps=1, epochs=0.0).validate()  # nothing is trained
    names, sizes, runtimes = collectives_of(options), sizes_of(options), runtimes_of(config, options)
    out = Path(options.out)
    if options.workers:
        return start_jobs(argv, options, runtimes, out)
    if options.runtimes:
        raise ConfigError(
            f"--runtimes={options.runtimes} is for workers on this machine: add --workers=2, or choose one with"
            " --strategy."
        )
    versions.check()
    versions.quiet()
    measure_as_worker(config, options, names, sizes, out)
    return 0


def collectives_of(options: CommOptions) -> list[str]:
    """Returns the names in --collectives. Raises ConfigError."""
    names = list(COLLECTIVES) if options.collectives == "all" else list(dict.fromkeys(options.collectives.split(",")))
    for name in names:
        if name not in COLLECTIVES:
            raise ConfigError(f"--collectives={options.collectives}: {name!r} is not one of {', '.join(COLLECTIVES)}.")
    return names


def sizes_of(options: CommOptions) -> list[int]:
    """Sizes in bytes, from the smallest to the largest, each `factor` times the previous one. Raises ConfigError."""
    if options.smallest > options.largest:
        raise ConfigError(f"--smallest={options.smallest} is above --largest={options.largest}: swap them.")
    found, size = [], float(options.smallest)
    while size <= options.largest * (1 + 1e-9):
        found.append(round(size))
        size *= options.factor
    return found


def runtimes_of(config: Config, options: CommOptions) -> list[tuple[str, list[str]]]:
    """Returns (label, its flags) for each of --runtimes. Raises ConfigError."""
    strategy, communication = resolve_strategy(config, Cluster(size=2)), config.strategy.communication
    default = strategy + (f":{communication}" if communication != "auto" else "")
    found = []
    for label in (each.removesuffix(":auto") for each in (options.runtimes or default).split(",")):
        name, _, communication = label.partition(":")
        if name not in RUNTIMES:
            raise ConfigError(
                f"--{'runtimes' if options.runtimes else 'strategy'}={label}: {name!r} is not one of"
                f" {', '.join(RUNTIMES)}, whose workers exchange data with each other."
            )
        config.replace(strategy=name, communication=communication or "auto", steps=1, epochs=0.0).validate()
        found.append((label, [f"--strategy={name}", f"--communication={communication or 'auto'}"]))
    return found


def make_folder(out: Path) -> None:
    """Creates the folder `out`. Raises ConfigError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out={out} cannot be created ({error.strerror}): choose a folder that can be written."
        ) from None


def stem(out: Path, label: str, count: int | str) -> Path:
    """Returns the path of result files, without the suffix."""
    return out / f"{label.replace(':', '-')}-{count}"


def results_of(out: Path, label: str, workers: int) -> Path:
    """Returns the file with the measurements of a runtime on a number of workers."""
    return stem(out, label, workers).with_suffix(".csv")


def measure_as_worker(config: Config, options: CommOptions, names: list[str], sizes: list[int], out: Path) -> None:
    """Measures as one worker of the cluster. Raises TfdistError subclasses, among them one for a lost peer."""
    cluster = with_token(cluster_to_join(os.environ), os.environ, config.cluster.job_token_file)
    if cluster.role not in ("chief", "worker"):
        raise ClusterError(
            f"tfdist.comm runs on the workers, but TF_CONFIG's task type of this process is {cluster.role!r}: start it"
            " on the workers only."
        )
    if cluster.size < 2:
        raise ClusterError(
            "tfdist.comm needs several workers, but this process is alone (TF_CONFIG lists no others): set TF_CONFIG,"
            " or add --workers=2 to start them on this machine."
        )
    if not strategy_or_undecided(resolve_strategy(config, cluster)).exchanges:
        raise ClusterError(
            "tfdist.comm measures workers that exchange data with each other, but TF_CONFIG lists ps: add"
            f" --strategy={RUNTIMES[0]}, or list no ps."
        )
    make_folder(out)
    with Preflight(cluster, config.cluster.startup_timeout) as preflight:
        import tensorflow as tf

        from tfdist import build
        from tfdist.runtime.errors import explain
    try:
        runtime = build.start_runtime(config, cluster, preflight.began)
        measure_on(runtime, config, options, names, sizes, out)
        runtime.barrier()
        runtime.close()
    except (MemoryError, tf.errors.ResourceExhaustedError) as error:
        raise ConfigError(f"--largest={options.largest} needs more memory than there is: lower it.") from error
    except Exception as error:
        sentence = explain(error, cluster)
        if sentence is None:
            raise
        raise sentence from error


def measure_on(
    runtime: Runtime,
    config: Config,
    options: CommOptions,
    names: list[str],
    sizes: list[int],
    out: Path,
) -> None:
    """Measures those of `names` that the runtime has, prints each as soon as it is known, and writes the files."""
    from tfdist.communication import present
    from tfdist.communication.measure import measure

    def tell(line: str) -> None:
        if runtime.rank == 0:
            print(line, flush=True)

    communication = config.strategy.communication
    label = runtime.name + (f":{communication}" if communication != "auto" else "")
    available = runtime.collectives()
    if left_out := [name for name in names if name not in available]:
        tell(f"{label} has no {' and no '.join(left_out)}")
    found = {name: available[name] for name in names if name in available}
    results = []
    for group in measure(runtime, found, sizes, options.repeats, tell):
        results.append(present.Series(label, found[group[0].collective].through, group))
        tell(present.table(results[-1]))
    if runtime.rank == 0 and results:
        path = stem(out, label, runtime.size)
        present.write_csv(results_of(out, label, runtime.size), results)
        tell(f"{path}.csv, {drawn(present.draw, path.with_suffix('.png'), results)}")


def start_jobs(argv: list[str], options: CommOptions, runtimes: list[tuple[str, list[str]]], out: Path) -> int:
    """Starts the local jobs one after another; returns the first exit code that is not 0."""
    counts = options.workers.split(",")
    if not all(count.isdecimal() and int(count) > 1 for count in counts):
        raise ConfigError(f"--workers={options.workers} must be a number from 2, or several such as 2,4.")
    make_folder(out)
    for label, runtime in runtimes:
        for count in map(int, counts):
            print(f"tfdist: {count} workers by {label}", flush=True)
            results_of(out, label, count).unlink(missing_ok=True)  # an earlier call's are not this one's
            # If a flag is given twice, the last value counts.
            job = LocalJob(
                [sys.executable, "-m", "tfdist.comm", *argv, "--workers=", "--runtimes=", *runtime],
                count,
                out / "logs",
                show={0},
            )
            job.start()
            result = job.wait()
            if result.code:
                print(
                    *result.last_lines,
                    f"tfdist: {result.cause}",
                    f"tfdist: logs are in {out / 'logs'}",
                    sep="\n",
                    file=sys.stderr,
                )
                return result.code
        if len(set(counts)) > 1:
            compare_models(label, out, sorted(set(map(int, counts))))
    return 0


def compare_models(label: str, out: Path, counts: list[int]) -> None:
    """Compares the algorithms over several numbers of workers, since only these tell them apart."""
    from tfdist.communication import present

    files = [results_of(out, label, count) for count in counts]
    together = [series for file in files if file.exists() for series in present.read_csv(file)]
    if not together:  # it has none of the collectives, which its workers have said
        return
    for name in COLLECTIVES:
        if group := [one for series in together for one in series.measurements if series.collective == name]:
            print(
                f"\n{name}, {label}, {' and '.join(map(str, counts))} workers together",
                *present.explanations(name, group),
                sep="\n",
                flush=True,
            )
    print(f"\n{drawn(present.draw_models, stem(out, label, 'models').with_suffix('.png'), together)}", flush=True)


def drawn(draw: Callable[[Path, Sequence[Series]], None], path: Path, series: Sequence[Series]) -> str:
    """Draws a picture. Returns its name, or the reason why there is none: the numbers are useful without it."""
    try:
        draw(path, series)
    except UnsupportedError as error:
        return f"no picture: {error}"
    return str(path)


if __name__ == "__main__":
    exit_codes.run_command(main, sys.argv[1:])
