"""The engines that scripts/bench_peers.py compares, and how a measurement of each is started."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from cell import BLOCK
from workloads import Workload

PEERS = Path(__file__).resolve().parent
REPOSITORY = PEERS.parents[1]
WARM_UP = 2  # uncounted windows: in the first, engines trace, compile or rebuild buckets; in the second, speed settles


@dataclass(frozen=True)
class Engine:
    """One row of the table. `script`: file in this folder; empty for tfdist. `alone`: the row its efficiency refers to.
    `apart`: each worker is a separate job that knows nothing of the others; this shows the speed that the machine's
    memory and caches allow for two.
    """

    name: str
    environment: str
    script: str = ""
    variant: str = ""
    modes: tuple[str, ...] = ("1", "2")
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    alone: str = ""
    apart: bool = False
    kinds: tuple[str, ...] = ("transformer", "cnn", "resnet", "embedding")
    late: int = 0  # windows by which its snapshots are late; the last snapshot then belongs to the block before


BOTH = ("1", "2", "2s")
ALONE, PAIR = ("1c", "1r"), ("2c", "2r")
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("tfdist one_device", "tfdist", flags=("--strategy=one_device",), modes=("1", *ALONE)),
        Engine(
            "tfdist multi_worker",
            "tfdist",
            flags=("--strategy=multi_worker",),
            modes=("2", "2s", *PAIR),
            alone="tfdist one_device",
        ),
        Engine(
            "tfdist.fit",
            "tfdist",
            "keras_fit.py",
            "tfdist",
            modes=BOTH,
            variables={"PYTHONPATH": str(REPOSITORY)},
        ),
        Engine("PyTorch DDP", "torch", "torch_ddp.py", modes=(*BOTH, *PAIR)),
        Engine("Horovod", "tfdist", "horovod_loop.py", modes=(*BOTH, *PAIR)),
        # Keras 3's BackupAndRestore counts one batch less before its first snapshot.
        Engine("Keras fit", "tfdist", "keras_fit.py", modes=("1", *ALONE), late=1),
        Engine(
            "tf-keras fit, MWMS",
            "tf-keras",
            "tf_keras_fit.py",
            modes=(*BOTH, *PAIR),
            variables={"TF_USE_LEGACY_KERAS": "1"},
        ),
        Engine("Orbit, MWMS", "orbit", "orbit_trainer.py", modes=("1", "2", *PAIR)),
        Engine(
            "tfdist sockets", "tfdist", flags=("--strategy=sockets",), modes=("2", *PAIR), alone="tfdist one_device"
        ),
        Engine(
            "tfdist one_device, twice",
            "tfdist",
            flags=("--strategy=one_device",),
            modes=("2", "2s"),
            alone="tfdist one_device",
            apart=True,
        ),
        Engine(
            "tfdist multi_worker, TCP",
            "tfdist",
            flags=("--strategy=multi_worker", "--communication=socket"),
            modes=("2",),
            alone="tfdist one_device",
            kinds=("transformer",),
        ),
        Engine(
            "tfdist multi_worker, TCP, bf16",
            "tfdist",
            flags=("--strategy=multi_worker", "--communication=socket", "--compression=bf16"),
            modes=("2",),
            alone="tfdist one_device",
            kinds=("transformer",),
        ),
        Engine("tfdist horovod", "tfdist", flags=("--strategy=horovod",), modes=("2",), alone="tfdist one_device"),
        Engine("PyTorch DDP, compiled", "torch", "torch_ddp.py", "compile"),
        Engine("Keras fit, XLA", "tfdist", "keras_fit.py", "xla", modes=("1",)),
        Engine(
            "tfdist one_device, XLA",
            "tfdist",
            flags=("--strategy=one_device", "--jit_compile"),
            modes=("1",),
            kinds=("transformer",),
        ),
        Engine(
            "tfdist multi_worker, XLA",
            "tfdist",
            flags=("--strategy=multi_worker", "--jit_compile"),
            modes=("2",),
            alone="tfdist one_device, XLA",
            kinds=("transformer",),
        ),
    )
}

# mode -> (workers, divisor of a worker's batch, description)
MODES = {
    "1": (1, 1, "1 worker"),
    "2": (2, 1, "2 workers"),
    "2s": (2, 2, "2 workers, half the batch each"),
    "1c": (1, 1, "1 worker, snapshots"),
    "2c": (2, 1, "2 workers, snapshots"),
    "1r": (1, 1, "1 worker, resuming from a snapshot"),
    "2r": (2, 1, "2 workers, resuming from a snapshot"),
}


@dataclass(frozen=True)
class Plan:
    """One measurement: a fresh start of an engine."""

    workload: Workload
    engine: Engine
    mode: str
    round: int
    steps: int
    windows: int  # counted windows, without warm-up
    saved: int = 0  # steps done by the job that wrote the snapshot to resume from

    @property
    def name(self) -> str:
        return self._name(self.mode)

    @property
    def saves(self) -> bool:
        return self.mode.endswith("c")

    @property
    def newest(self) -> int:
        """The step of the newest snapshot of the job to resume from; 0 if there is none."""
        return self.saved - (BLOCK - self.engine.late) * self.steps if self.saved and self.engine.late else self.saved

    @property
    def origin(self) -> str:
        """The name of the measurement that writes the snapshot to resume from, or ""."""
        return self._name(self.mode.replace("r", "c")) if self.mode.endswith("r") else ""

    def _name(self, mode: str) -> str:
        words = f"{self.workload.name}.{mode}.{self.engine.name}.{self.round}"
        return words.replace(", ", "-").replace(" ", "_")

    @property
    def world(self) -> int:
        return 1 if self.engine.apart else MODES[self.mode][0]

    @property
    def batch(self) -> int:
        return self.workload.batch // MODES[self.mode][1]

    def settings(self) -> dict:
        """Returns the settings that must be equal for --resume to keep a measurement."""
        return {
            "workload": self.workload.name,
            "engine": self.engine.name,
            "mode": self.mode,
            "round": self.round,
            "world": self.world,
            "batch": self.batch,
            "steps": self.steps,
            "windows": self.windows,
        }


def commands(
    plan: Plan, venvs: Path, folder: Path, cores: list[int]
) -> list[tuple[list[str], dict[str, str], set[int]]]:
    """Returns the processes to start: (command, environment, cores) each. A worker has one core and one thread."""
    python = venvs / plan.engine.environment / "bin" / "python"
    told = {
        "workload": plan.workload.name,
        "batch": plan.batch,
        "steps": plan.steps,
        "windows": plan.windows + WARM_UP,
        "world": plan.world,
        "cores": cores,
        "variant": plan.engine.variant,
        "folder": str(folder),
        "save": plan.saves,
        "resume": str(folder.parent / plan.origin) if plan.origin else "",
    }
    own = set(cores[: plan.world])
    environment = {
        **_environment(),
        **plan.engine.variables,
        "BENCH_CELL": json.dumps(told),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PATH": f"{python.parent}:{os.environ.get('PATH', '')}",
    }
    if not plan.engine.script:
        environment["PYTHONPATH"] = f"{REPOSITORY}:{PEERS}"
        if not plan.engine.apart:
            return [
                (
                    [str(python), "-m", "tfdist.launch", f"--workers={plan.world}", "--", *_tfdist_flags(plan, folder)],
                    environment,
                    own,
                )
            ]
        jobs = []
        for number, core in enumerate(cores[: MODES[plan.mode][0]]):
            place = (
                folder / f"apart-{number}" if number else folder
            )  # the first job writes its results where they are looked for
            place.mkdir(exist_ok=True)
            jobs.append(
                (
                    [str(python), "-m", "tfdist.launch", "--workers=1", "--", *_tfdist_flags(plan, place)],
                    {**environment, "BENCH_CELL": json.dumps({**told, "folder": str(place)})},
                    {core},
                )
            )
        return jobs
    script = [str(python), str(PEERS / plan.engine.script)]
    if plan.engine.script == "horovod_loop.py":
        return [([str(python.parent / "horovodrun"), "-np", str(plan.world), "--gloo", *script], environment, own)]
    ports = _free_ports(plan.world)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    started = []
    for rank in range(plan.world):
        mine = {
            "BENCH_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports[0]),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if plan.world > 1:
            mine["TF_CONFIG"] = json.dumps(
                {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
            )
        started.append((script, {**environment, **mine}, {cores[rank % len(cores)]}))
    return started


def _tfdist_flags(plan: Plan, folder: Path) -> list[str]:
    workload = plan.workload
    home = folder.parent / plan.origin if plan.origin else folder
    saves = [f"--save_every={BLOCK * plan.steps}", "--keep=1"] if plan.saves else []
    return [
        "--model=tfdist_job:model",
        f"--model_args=workload={workload.name}",
        "--source=tfdist_job:source",
        f"--source_args=workload={workload.name}",
        "--objective=classification",
        "--noshuffle",
        "--nosync_batchnorm",
        f"--micro_batch={plan.batch}",
        "--accumulation=1",
        f"--optimizer={workload.optimizer}",
        f"--learning_rate={workload.learning_rate}",
        f"--steps={plan.saved + (plan.windows + WARM_UP) * plan.steps}",
        f"--log_every={plan.steps}",
        "--eval_every=-1",
        "--save_minutes=0",
        "--nosave_final",
        "--export=none",
        "--noplot",
        "--progress=none",
        "--trackers=tfdist_job:tracker",
        f"--run_dir={home / 'run'}",
        *saves,
        *plan.engine.flags,
    ]


def _environment() -> dict[str, str]:
    left_out = ("TF_CONFIG", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    threads = dict.fromkeys(
        (
            "OMP_NUM_THREADS",
            "MKL_NUM_THREADS",
            "OPENBLAS_NUM_THREADS",
            "TF_NUM_INTRAOP_THREADS",
            "TF_NUM_INTEROP_THREADS",
        ),
        "1",
    )
    return {
        **{
            name: value
            for name, value in os.environ.items()
            if name not in left_out and not name.startswith("HOROVOD_")
        },
        **threads,
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONUNBUFFERED": "1",
    }


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
