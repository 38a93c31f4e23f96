"""Jobs on each runtime while a stranger attacks all their ports: nothing is executed, no job ends, the right rank is
named.

The attacker is on the same machine, where nothing is filtered away, and attacks from the first moment on.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.attacker import Attacker, processes
from tests.e2e.job import ENVIRONMENT, TRAINED, children, records, start, wait_for
from tests.unit.control.test_packet_filter import machines_address
from tfdist.control.preflight import PortReservation
from tfdist.control.tf_config import worker_environment

pytestmark = pytest.mark.slow

FIT = """
import numpy as np, keras, tensorflow as tf, tfdist
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
model.compile("sgd", "sparse_categorical_crossentropy")
rng = np.random.default_rng()  # not the same on the workers: the chief's batches go to all
rows = rng.normal(size=(64, 4)).astype("float32"), rng.integers(0, 3, 64)
data = tf.data.Dataset.from_tensor_slices(rows).batch(16).repeat()
history = tfdist.fit(model, data, epochs=3, steps_per_epoch=40, verbose=0)
print("losses:", history.history["loss"])
"""


def workers_of(process: subprocess.Popen) -> list[int]:
    """By rank."""
    return children(process.pid)


def is_training(folder: Path, size: int, process: subprocess.Popen) -> bool:
    assert process.poll() is None, process.communicate()[0]
    return all(
        (folder / "logs" / f"rank-{rank}.jsonl").exists() and len(records(folder, rank, "train")) > 3
        for rank in range(size)
    )


@contextlib.contextmanager
def ended(process: subprocess.Popen) -> Iterator[None]:
    """After a failure, too, no job is left: workers end with their launcher."""
    try:
        yield
    finally:
        process.kill()
        process.wait()


def environment_of(pid: int) -> dict[str, str]:
    """With which a process was started."""
    return dict(
        item.split("=", 1)
        for item in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        if "=" in item
    )


def cluster_of(pid: int) -> list[str]:
    return json.loads(environment_of(pid)["TF_CONFIG"])["cluster"]["worker"]


def assert_only_this_machine_reaches(port: int) -> None:
    """TensorFlow listens on all interfaces; of a local job, strangers on other machines must not get there."""
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with contextlib.suppress(pytest.skip.Exception):  # no other address
        own = machines_address()  # what another machine would connect to
        with pytest.raises(TimeoutError):
            socket.create_connection((own, port), timeout=0.5)


# What a stranger finds open while a job trains: of sockets nothing but the beacons.
@pytest.mark.parametrize(
    ("flags", "listening"),
    [
        (["--strategy=sockets"], 0),
        (["--strategy=multi_worker"], 2),
        pytest.param(["--strategy=mesh", "--mesh=data=2", "--zero=3"], 2, marks=pytest.mark.thorough),
    ],
    ids=["sockets", "multi_worker", "mesh"],
)
def test_a_job_goes_on_and_who_is_lost_is_named(flags, listening, tmp_path):
    folder, proof = tmp_path / "run", tmp_path / "proof"
    process = start(
        2,
        [
            *TRAINED,
            *flags,
            "--steps=1000000",
            "--log_every=20",
            "--progress=none",
            "--heartbeat_timeout=5",
            f"--run_dir={folder}",
        ],
        ("--grace=1",),
        {"TFDIST_FAULTS": "0:5:slow"},
    )
    with ended(process), Attacker(process.pid, proof, 2) as attacker:
        wait_for(lambda: is_training(folder, 2, process), 200)
        attacker.pause = attacker.look = 0.2  # of a core, which the job needs as well
        before, rounds = records(folder, 0, "train")[-1]["step"], attacker.rounds
        wait_for(
            lambda: (
                process.poll() is not None
                or (attacker.rounds > rounds + 12 and records(folder, 0, "train")[-1]["step"] > before + 100)
            ),
            120,
        )
        workers = workers_of(process)
        (secret,) = {environment_of(pid)["TFDIST_JOB_TOKEN"] for pid in workers}
        for address in cluster_of(workers[0]) if listening else ():
            assert_only_this_machine_reaches(int(address.rpartition(":")[2]))
        commands = "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in processes(process.pid))
        os.kill(workers[1], signal.SIGSTOP)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 6, output
    error = re.search(r"tfdist: worker 0 ended with exit code 6.*", output).group()
    assert "worker 1 (rank 1" in error or "rank 1 no longer answers" in error, output
    assert "forged" not in output and "Traceback" not in output and not proof.exists()
    assert attacker.udp and len(attacker.tcp) >= listening + 1
    assert len(secret) == 64 and secret not in output and secret not in commands
    for path in (path for path in folder.rglob("*") if path.is_file()):
        assert secret.encode() not in path.read_bytes(), path


def test_a_fit_job_ends_well(tmp_path):
    (tmp_path / "script.py").write_text(FIT)
    proof = tmp_path / "proof"
    process = subprocess.Popen(
        [sys.executable, "-m", "tfdist.launch", "--workers=2", "--", str(tmp_path / "script.py")],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with Attacker(process.pid, proof, 2) as attacker:
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and not proof.exists() and attacker.tcp, output
    losses = re.findall(r"losses: (\[.*\])", output)
    assert len(losses) == 2 and losses[0] == losses[1] and "the workers read different batches" in output, output


def test_who_knows_the_addresses_only_cannot_take_a_workers_place(tmp_path):
    """The stranger runs tfdist itself, as rank 1, before the true rank 1 comes. It has no token, then another one."""
    (tmp_path / "script.py").write_text(FIT)
    (tmp_path / "token").write_text("of this job, and of no other one")
    (tmp_path / "token").chmod(0o600)
    ports = PortReservation(2)

    def worker(rank, **more):
        environment = {**ENVIRONMENT, **worker_environment(ports.addresses, rank, 0, ENVIRONMENT), **more}
        return subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    token = (tmp_path / "token").read_text()
    chief, running = worker(0, TFDIST_JOB_TOKEN=token), []
    try:
        for more, said in (
            ({}, "has a job token, but this worker has none"),
            ({"TFDIST_JOB_TOKEN": "guessed, guessed"}, "has another job token"),
        ):
            running.append(worker(1, **more))
            stranger, _ = running[-1].communicate(timeout=120)
            assert running[-1].returncode != 0 and said in stranger, stranger
            assert chief.poll() is None
        running.append(worker(1, TFDIST_JOB_TOKEN=token))
        outputs = [each.communicate(timeout=200)[0] for each in (chief, running[-1])]
        assert chief.returncode == running[-1].returncode == 0 and all("losses:" in output for output in outputs), (
            outputs
        )
        assert (
            "that claims to be rank 1 has none" in outputs[0]
            and "that claims to be rank 1 has another job token" in outputs[0]
        )
    finally:
        for process in (chief, *running):
            process.kill()
        ports.close()
