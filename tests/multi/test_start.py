"""A peer that answers the first probe, and then nothing more: the start ends, in time, with STARTUP."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading

import pytest

from tests.e2e.job import CLUSTERS, ENVIRONMENT, free_ports, wait_for

pytestmark = pytest.mark.slow

TIMEOUT = 10


class Peer:
    """Listens at a port, takes connections, and says nothing; gone after the first probe, if it `dies`."""

    def __init__(self, port: int, dies: bool):
        self._listener, self._dies, self._held = socket.create_server(("127.0.0.1", port)), dies, []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            while True:
                self._held.append(self._listener.accept()[0])
                if self._dies:
                    self.close()
        except OSError:
            return

    def wait_for_tensorflow(self) -> None:
        """Until it wants to register here: by HTTP/2, which nothing else speaks."""
        wait_for(lambda: any(each.recv(3, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"PRI" for each in self._heard()))

    def _heard(self) -> list[socket.socket]:
        return select.select(self._held, [], [], 0)[0]

    def close(self) -> None:
        self._listener.close()
        for connection in self._held:
            connection.close()


def start_one_of_two(index: int, strategy: str, folder, dies: bool, asked_to_end: bool = False) -> tuple[int, str]:
    """(exit code, what it said) of a worker whose peer is such a one; it is killed if it does not end in time.
    asked_to_end: by SIGTERM, while TensorFlow waits for the peer; twice, since the first may fall into the moment that
    compat/tensorflow_preemption.py describes.
    """
    first = free_ports(2)
    addresses = [f"127.0.0.1:{first + number}" for number in range(2)]
    config = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})
    peer = Peer(first + 1 - index, dies)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tfdist.train",
            *CLUSTERS,
            f"--strategy={strategy}",
            "--steps=5",
            f"--startup_timeout={TIMEOUT}",
            f"--run_dir={folder}",
        ],
        env={**ENVIRONMENT, "TF_CONFIG": config},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    if asked_to_end:
        peer.wait_for_tensorflow()
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        process.terminate()
    try:
        output, _ = process.communicate(timeout=3 * TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    peer.close()
    return process.returncode, output


@pytest.mark.parametrize(
    "index, strategy, dies",
    [
        (0, "multi_worker", True),
        *(
            pytest.param(index, strategy, dies, marks=pytest.mark.thorough)
            for index, strategy, dies in [
                (1, "multi_worker", False),
                (0, "multi_worker", False),
                (1, "multi_worker", True),
                (0, "mesh", True),
                (0, "sockets", False),
                (1, "sockets", False),
                (1, "sockets", True),
                (1, "horovod", False),
            ]
        ),
    ],
)
def test_a_peer_that_dies_or_stops_after_its_knock(index, strategy, dies, tmp_path):
    code, output = start_one_of_two(index, strategy, tmp_path, dies)
    assert code == 5 and "Traceback" not in output, output
    assert (
        f"--startup_timeout={TIMEOUT} s" in output
        or "Not all workers came together" in output
        or f"within {TIMEOUT} s" in output
    ), output


@pytest.mark.parametrize("strategy", ["multi_worker", pytest.param("mesh", marks=pytest.mark.thorough)])
def test_who_is_asked_to_end_while_tensorflow_waits_for_a_peer_does(strategy, tmp_path):
    """TensorFlow takes SIGTERM for itself before that."""
    code, output = start_one_of_two(1, strategy, tmp_path, dies=False, asked_to_end=True)
    assert code == -signal.SIGTERM, output
