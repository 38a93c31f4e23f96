"""The pods of a generated Job, run for real: the container's command with the environment that Kubernetes gives it,
each in a network namespace with an address of its own, under the names that the headless service would give them."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.e2e.job import CLUSTERS, ENVIRONMENT, free_ports, records, wait_for

yaml = pytest.importorskip("yaml")
pytestmark = [pytest.mark.slow, pytest.mark.thorough]

ADDRESSES = ("10.213.7.1", "10.213.7.2")


@pytest.fixture
def pods():
    """Names of two network namespaces, joined by a virtual cable."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces cannot be made here: it needs root and iproute2")
    names = [f"tfdist-{os.getpid()}-{index}" for index in range(2)]
    ends = [f"tf{os.getpid() % 10**6}-{index}" for index in range(2)]
    made = []
    try:
        for name in names:
            result = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if result.returncode:
                pytest.skip(f"network namespaces cannot be made here: {result.stderr.strip()}")
            made.append(name)
        subprocess.run(
            [
                "ip",
                "link",
                "add",
                ends[0],
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "name",
                ends[1],
                "netns",
                names[1],
            ],
            check=True,
        )
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            for command in (f"addr add {address}/24 dev {end}", f"link set {end} up", "link set lo up"):
                subprocess.run(["ip", "-n", name, *command.split()], check=True)
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def test_two_pods_find_each_other_train_and_go_on(pods, tmp_path):
    arguments = [
        "kubernetes",
        "--workers=2",
        "--image=tfdist",
        "--claim=runs",
        f"--mount={tmp_path}",
        "--name=digits",
        "--",
        *CLUSTERS,
        "--steps=600",
        "--steps_per_loop=1",
        "--log_every=5",
        "--progress=none",
        f"--run_dir={tmp_path}/run",
    ]
    text = subprocess.run(
        [sys.executable, "-m", "tfdist.jobs", *arguments], env=ENVIRONMENT, capture_output=True, text=True, check=True
    ).stdout
    service, job, _ = yaml.safe_load_all(text)
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    names = [
        f"{job['metadata']['name']}-{index}.{spec['subdomain']}" for index in range(2)
    ]  # as Kubernetes names the pods of an Indexed Job
    assert service["metadata"]["name"] == spec["subdomain"]
    (tmp_path / "hosts").write_text(
        "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in zip(ADDRESSES, names, strict=True))
    )

    def start(index: int) -> subprocess.Popen:
        environment = {
            **ENVIRONMENT,
            **{item["name"]: item.get("value", "of-the-secret-" * 4) for item in container["env"]},
            "JOB_COMPLETION_INDEX": str(index),
        }
        command = [sys.executable if piece == "python" else piece for piece in container["command"]]
        script = f'mount --bind {tmp_path}/hosts /etc/hosts && exec "$@"'
        return subprocess.Popen(
            ["ip", "netns", "exec", pods[index], "sh", "-c", script, "sh", *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(processes: list[subprocess.Popen]) -> list[int]:
        try:
            outputs = [process.communicate(timeout=180)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        codes = [process.returncode for process in processes]
        assert set(codes) <= {0, 42}, outputs
        return codes

    def trained() -> bool:
        assert all(process.poll() is None for process in processes), [process.communicate()[0] for process in processes]
        return all(
            (tmp_path / "run" / "logs" / f"rank-{rank}.jsonl").exists() and records(tmp_path / "run", rank, "train")
            for rank in range(2)
        )

    processes = [start(index) for index in range(2)]
    wait_for(trained)
    processes[1].terminate()  # as when a node is drained: one pod is asked to end, and all save
    assert finish(processes) == [42, 42]
    assert finish([start(index) for index in range(2)]) == [0, 0]
    message = records(tmp_path / "run", 0, "start")[0]["values"]["message"]
    assert all(f"{name}:2222" in message for name in names) and records(tmp_path / "run", 0, "train")[-1]["step"] == 600


def test_containers_with_two_workers_each_read_only_their_own_memory(tmp_path):
    """Processes have the same numbers in both containers, and arrays under the same descriptors."""
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("PID namespaces cannot be made here: it needs root")
    first = free_ports(4)
    addresses = [f"127.0.0.1:{port}" for port in range(first, first + 4)]
    run = [sys.executable, "-m", "tfdist.train", *CLUSTERS, "--strategy=sockets", "--steps=6"]
    # Buckets that are not summed by doubling.
    run += ["--model_args=widths=(1000,1000)", f"--run_dir={tmp_path}/run"]

    def started(rank: int) -> str:
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        log = tmp_path / f"{rank}.log"
        return f"TF_CONFIG={shlex.quote(json.dumps(cluster))} {shlex.join(run)} > {log} 2>&1 & "

    token = {**ENVIRONMENT, "TFDIST_JOB_TOKEN": secrets.token_hex()}
    containers = [
        subprocess.Popen([*alone, "bash", "-c", "".join(map(started, ranks)) + "wait -n && wait -n"], env=token)
        for ranks in ((0, 1), (2, 3))
    ]
    codes = [container.wait(timeout=240) for container in containers]
    # At the end the weights of all workers are compared.
    assert codes == [0, 0], [log.read_text() for log in sorted(tmp_path.glob("*.log"))]
