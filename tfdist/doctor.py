"""python -m tfdist.doctor: is this machine, or are these workers, fit to train? Run it before the first job, and when a
job fails.

  python -m tfdist.doctor                                    this machine
  python -m tfdist.doctor --workers=2 --run_dir=runs/one     as many workers on it
  srun python -m tfdist.doctor --run_dir=/shared/run         on Slurm; elsewhere once per worker, with its TF_CONFIG
  python -m tfdist.launch --on=ray --workers=2 -- -m tfdist.doctor      on Ray

Checks versions, GPUs, driver and cuDNN; computes in each precision with and without XLA; checks cores, memory,
/dev/shm, open files, the run folder, and the object stores in the flags. With several workers it also checks addresses,
ports, clocks and an all-reduce. Each check prints one line: fine, or what is wrong and how to fix it. Takes the flags
of the training. Exit code 13 if anything is wrong on any worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tfdist import flags
from tfdist.config import Config, option
from tfdist.control import exit_codes
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ExitCode
from tfdist.control.resolvers import cluster_to_join, resolve_cluster
from tfdist.control.token import host_of, with_token
from tfdist.diagnosis import folder_speed, gpus, interfaces, limits, meeting, packages, store_speed, trials
from tfdist.diagnosis.findings import Finding, State, is_healthy
from tfdist.launcher.local_job import LocalJob


@dataclass(frozen=True)
class DoctorOptions:
    """What to check."""

    workers: int = option(0, "Start this many workers on this machine. 0: be one worker of the cluster.", least=0)
    arithmetic: bool = option(True, "Try matrix products and convolutions, which takes half a minute.")


def main(argv: list[str]) -> int:
    config, options = flags.parse(argv, usage=__doc__ or "", command=DoctorOptions)
    if options.workers:
        return start_workers(argv, options.workers)
    cluster = with_token(cluster_to_join(os.environ), os.environ, config.cluster.job_token_file)
    report = examine(config, options)
    if cluster.size < 2 or not cluster.peers or cluster.rank < 0:
        alone = list(report.findings)
        if options.arithmetic and report.gpus > 1:
            alone.append(trials.all_reduce(report.gpus))
        show(alone)
        return concluded(alone)
    addresses = meeting.addresses(cluster)
    if is_healthy(addresses) and report.gpus:
        with contextlib.suppress(socket.gaierror):  # IPv6 only: the interfaces are known by their IPv4 addresses
            own_address = socket.gethostbyname(host_of(cluster.peers[cluster.rank]))
            addresses.append(interfaces.network(interfaces.read_interfaces(), own_address, os.environ))
    if not is_healthy(addresses):
        show([*report.findings, *addresses])
        return concluded([*report.findings, *addresses])
    report = dataclasses.replace(report, findings=(*report.findings, *addresses))
    of_all, between = meeting.meet(config, cluster, report)
    if cluster.is_chief or len(of_all) == 1:
        for other in of_all:
            show(other.findings, cluster, other.rank)
        show(between)
    return concluded([*(finding for other in of_all for finding in other.findings), *between])


def examine(config: Config, options: DoctorOptions) -> meeting.WorkerReport:
    """Runs all checks that one process can do alone."""
    versions, cards = packages.packages(), gpus.read_gpus()
    findings = [versions]
    build, computed = (None, [])
    if options.arithmetic and versions.state is not State.WRONG:
        count = 1 if isinstance(cards, Finding) else max(len(cards), 1)
        build, computed = trials.arithmetic(seconds=count * trials.SECONDS)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if isinstance(cards, Finding):
        findings.append(cards)
    elif not cards or build:
        cudnn = packages.version_of("nvidia-cudnn-cu12")
        findings += gpus.gpus(cards, build or gpus.Build(), cudnn, visible)
    findings += computed
    findings += limits.limits(limits.Limits.read(os.environ))
    findings.append(folder_speed.run_folder(config.run.folder))
    findings += store_speed.stores(config)
    return meeting.WorkerReport(
        resolve_cluster(os.environ).rank, build.devices if build else 0, versions.what, tuple(findings)
    )


def show(findings: list[Finding] | tuple[Finding, ...], cluster: Cluster | None = None, rank: int = 0) -> None:
    """Prints a line for each finding; with a cluster, below the worker's name."""
    if cluster:
        print(f"{cluster.name(rank)}:")
    for finding in findings:
        print(finding, flush=True)


def concluded(findings: list[Finding]) -> int:
    """Prints the overall result. Returns the exit code."""
    counts = {state: sum(finding.state is state for finding in findings) for state in State}
    if is_healthy(findings):
        print(
            f"Fit to train: {counts[State.FINE]} checks are fine, {counts[State.WARNING]} with a warning.", flush=True
        )
        return ExitCode.OK
    print(f"Not fit to train: {counts[State.WRONG]} of {len(findings)} checks found problems to fix.", flush=True)
    return ExitCode.UNHEALTHY


def start_workers(argv: list[str], count: int) -> int:
    """Starts workers on this machine. Returns the exit code of the job."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    with tempfile.TemporaryDirectory(prefix="tfdist-doctor-") as logs:
        job = LocalJob([sys.executable, "-m", "tfdist.doctor", *argv, "--workers=0"], count, Path(logs))
        job.start()
        return job.wait().code


if __name__ == "__main__":
    exit_codes.run_command(main, sys.argv[1:])
