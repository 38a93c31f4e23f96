"""A real Slurm on this machine: a controller and two node daemons from Debian's packages, without touching the
machine's own configuration.

Each daemon runs in its own mount namespace, where the nodes' names map to two loopback addresses. Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from tests.e2e.job import ENVIRONMENT, free_ports, wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue")
NODES = {"tfnode1": "127.0.0.11", "tfnode2": "127.0.0.12"}
CONFIGURATION = """
ClusterName=tfdist
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
PlugStackConfig=/dev/null
NodeName=tfnode1 NodeHostname={host} NodeAddr=127.0.0.11 Port={ports[1]} CPUs=2
NodeName=tfnode2 NodeHostname={host} NodeAddr=127.0.0.12 Port={ports[2]} CPUs=2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE
"""


def install() -> str:
    """Installs Debian's packages if they are missing; returns "" or why there is no Slurm."""
    if os.geteuid() != 0:
        return "it needs root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if all(shutil.which(program, path=path) for program in PROGRAMS):
        return ""
    if not shutil.which("apt-get"):
        return "slurm-wlm is not installed, and there is no apt-get"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "slurm-wlm", "munge"],
    ):
        try:
            result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            return f"`{' '.join(command)}` did not end in 300 s"
        if result.returncode:
            return f"`{' '.join(command)}` failed: {result.stderr.strip().splitlines()[-1:]}"
    return ""


class SlurmCluster:
    """Started by `start`, ended by `stop`; `run` calls a Slurm command."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.daemons: list[subprocess.Popen] = []
        self.environment = {
            **ENVIRONMENT,
            "PATH": f"{ENVIRONMENT['PATH']}:/usr/sbin:/sbin",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def start(self) -> SlurmCluster:
        first, host = free_ports(3), socket.gethostname().partition(".")[0]
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(host=host, folder=self.folder, ports=[*range(first, first + 3)])
        )
        hosts = [f"{address} {name}" for name, address in NODES.items()]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"127.0.0.1 {host}", *hosts]) + "\n")
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={self.folder}/munge.key",
            f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munge.pid",
            f"--log-file={self.folder}/munge.log",
            f"--seed-file={self.folder}/munge.seed",
        )
        wait_for(lambda: (self.folder / "munge.socket").exists(), 30)
        self._daemon("slurmctld", "-D", "-i")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        wait_for(lambda: self.run("sinfo", "--noheader", "--format=%D %T", check=False).strip() == "2 idle", 60)
        return self

    def _daemon(self, *command: str) -> None:
        # exec: the daemon replaces this process, and the namespace and everything in it ends with the daemon.
        script = f'mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        with open(self.folder / f"{command[0]}.out", "ab") as output:
            self.daemons.append(
                subprocess.Popen(
                    ["unshare", "--mount", "sh", "-c", script, "sh", *command],
                    env=self.environment,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    def run(self, *command: str, check: bool = True) -> str:
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0 or not check, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout

    def field(self, job: str, name: str) -> str:
        """Returns a field of `scontrol show job`; "" if there is no such field."""
        fields = dict(
            piece.partition("=")[::2] for piece in self.run("scontrol", "show", "job", job, check=False).split()
        )
        return fields.get(name, "")

    def stop(self) -> None:
        self.run("scancel", "--user=root", check=False)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
