"""Job files: valid against the published schemas, and saying what they must."""

import json
import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tfdist import flags, jobs
from tfdist.config import Config
from tfdist.control import jobspecs
from tfdist.control.exit_codes import RESTARTABLE, ConfigError, ExitCode
from tfdist.control.jobspecs.job_options import parse_job_options
from tfdist.control.resolvers import from_kubernetes
from tfdist.jobs import main

yaml = pytest.importorskip("yaml")
TRAIN = ["--model=mlp", "--model_args=widths=(16,)", "--global_batch=8", "--steps=10", "--run_dir=/runs/first run"]
POD = ["--image=registry.example/tfdist:1", "--claim=runs", "--workers=4"]
VARIANTS = {
    "plain": [],
    "gpus": ["--gpus=8", "--rdma=rdma/hca=1", "--namespace=ml", "--memory=64Gi"],
    "one worker, no volume": ["--workers=1", "--claim="],
}


def written(capsys, *arguments, train=TRAIN):
    assert main([*arguments, "--", *train]) == 0
    return capsys.readouterr().out


def documents(capsys, *arguments):
    return list(yaml.safe_load_all(written(capsys, *arguments)))


def worker_of(pod):
    (container,) = pod["containers"]
    return container


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_indexed_job_fits_the_schemas(variant, capsys):
    validate = pytest.importorskip("kubernetes_validate").validate
    service, job, policy = documents(capsys, "kubernetes", *POD, *VARIANTS[variant])
    for document in (service, job, policy):
        for version in ("1.29", "1.32", "1.36"):
            validate(document, version, strict=True)
    assert (
        service["spec"]["clusterIP"] == "None"
        and service["spec"]["publishNotReadyAddresses"]
        and service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    )
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"] == "first-run"


def test_the_schemas_would_notice(capsys):
    """That validating does anything."""
    package = pytest.importorskip("kubernetes_validate")
    _, job, _ = documents(capsys, "kubernetes", *POD)
    job["spec"]["completion"] = 4
    with pytest.raises(package.ValidationError):
        package.validate(job, "1.32", strict=True)


def test_exit_codes_decide_whether_a_job_starts_again(capsys):
    _, job, _ = documents(capsys, "kubernetes", *POD)
    rules = {
        tuple(rule["onExitCodes"]["values"]): rule["action"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert rules[(42,)] == "Ignore"
    (fatal,) = (set(codes) for codes, action in rules.items() if action == "FailJob")
    assert fatal == {code.value for code in ExitCode} - {0} - {code.value for code in RESTARTABLE}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_jobset_fits_its_schema(variant, capsys):
    jobsets = pytest.importorskip("kubeflow_trainer_api.models.jobset_v1alpha2_job_set_spec")
    validate = pytest.importorskip("kubernetes_validate").validate
    document, _ = documents(capsys, "kubernetes", "--jobset", *POD, *VARIANTS[variant])
    assert (document["apiVersion"], document["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    read = jobsets.JobsetV1alpha2JobSetSpec.from_dict(document["spec"])
    assert read.to_dict() == document["spec"]  # a field that it does not know would be lost
    # The Job inside once more, by Kubernetes' own schema.
    inner = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": inner}, "1.32", strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tfjob_fits_its_schema(variant, capsys):
    models = pytest.importorskip("kubeflow.training.models")
    client = pytest.importorskip("kubernetes.client").ApiClient()
    document, _ = documents(capsys, "tfjob", *POD, *VARIANTS[variant])
    known = {**{name: getattr(models, name) for name in dir(models) if name.startswith("Kubeflow")}}
    import kubernetes.client.models as core

    for name, model in known.items():
        setattr(core, name, model)  # so that the client finds the types of nested fields
    read = client.deserialize(SimpleNamespace(data=json.dumps(document)), "KubeflowOrgV1TFJob")
    assert client.sanitize_for_serialization(read) == document
    replica = document["spec"]["tfReplicaSpecs"]["Worker"]
    assert replica["restartPolicy"] == "ExitCode" and worker_of(replica["template"]["spec"])["name"] == "tensorflow"


def test_a_tfjob_tells_its_operator_in_the_operators_codes(capsys):
    """128 and more are "start again" there. The real shell command around processes that end with each code."""
    command = worker_of(documents(capsys, "tfjob", *POD)[0]["spec"]["tfReplicaSpecs"]["Worker"]["template"]["spec"])[
        "command"
    ]
    assert command[:2] == ["sh", "-c"] and command[4:] == ["python", "-m", "tfdist.train", *TRAIN]
    for code in ExitCode:
        result = subprocess.run([*command[:4], "sh", "-c", f"exit {code.value}"])
        assert result.returncode == (138 if code in RESTARTABLE else code.value), code
    process = subprocess.Popen(
        [*command[:4], "sh", "-c", "trap 'exit 42' TERM; echo ready; while :; do sleep 0.1; done"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(timeout=20) == 138


@pytest.mark.parametrize("kind", [[], ["--jobset"]])
def test_pods_are_given_their_cluster_and_their_time(kind, capsys):
    document = documents(capsys, "kubernetes", *kind, *POD, "--grace=77", "--gpus=2", "--rdma=rdma/hca=1")[-2]
    job = document["spec"]["replicatedJobs"][0]["template"] if kind else document
    pod = job["spec"]["template"]["spec"]
    worker = worker_of(pod)
    assert pod["terminationGracePeriodSeconds"] == 77 and pod["restartPolicy"] == "Never"
    assert worker["command"] == ["python", "-m", "tfdist.train", *TRAIN]
    assert worker["resources"]["limits"] == {"memory": "32Gi", "nvidia.com/gpu": "2", "rdma/hca": "1"}
    assert worker["resources"]["requests"] == {"memory": "32Gi", "cpu": "8"}  # 16Gi and 4 for each GPU
    cluster = from_kubernetes(
        {**{item["name"]: item["value"] for item in worker["env"] if "value" in item}, "JOB_COMPLETION_INDEX": "3"}
    )
    addresses, rank = list(cluster.peers), cluster.rank
    prefix = "first-run-workers-0-" if kind else "first-run-"
    assert rank == 3 and addresses == [f"{prefix}{index}.first-run:2222" for index in range(4)]
    assert {mount["mountPath"] for mount in worker["volumeMounts"]} == {"/dev/shm", "/runs"}


@pytest.mark.parametrize("kind", [["kubernetes"], ["kubernetes", "--jobset"], ["tfjob"]])
def test_only_the_pods_of_the_job_are_let_in_and_share_its_secret(kind, capsys):
    *_, workload, policy = documents(capsys, *kind, *POD, "--namespace=ml", "--name=digits")
    text = json.dumps(workload)
    labels = {"tfdist-job": "digits"}
    assert json.dumps({"metadata": {"labels": labels}})[1:-1] in text
    assert policy["kind"] == "NetworkPolicy" and policy["metadata"] == {"name": "digits", "namespace": "ml"}
    assert policy["spec"] == {
        "podSelector": {"matchLabels": labels},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": labels}}]}],
    }
    assert (
        json.dumps(
            {
                "name": "TFDIST_JOB_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": "digits-token", "key": "token", "optional": True}},
            }
        )
        in text
    )
    assert "kubectl create secret generic digits-token --namespace=ml" in written(
        capsys, *kind, *POD, "--namespace=ml", "--name=digits"
    )
    policy = list(yaml.safe_load_all(written(capsys, *kind, *POD, train=[*TRAIN, "--prometheus_port=9400"])))[-1]
    assert policy["spec"]["ingress"][1:] == [{"ports": [{"port": 9400, "protocol": "TCP"}]}]


def test_a_batch_script_makes_a_secret_for_each_start(capsys, tmp_path):
    (tmp_path / "job.sh").write_text(written(capsys, "slurm"))
    (tmp_path / "srun").write_text('#!/bin/sh\necho "token $TFDIST_JOB_TOKEN"\n')
    (tmp_path / "srun").chmod(0o755)

    def token(**environment):
        return subprocess.run(
            ["bash", tmp_path / "job.sh"],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", **environment},
            capture_output=True,
            text=True,
        ).stdout.split()[1]

    assert len(token()) == 64 and int(token(), 16) and token() != token()
    assert token(TFDIST_JOB_TOKEN="your own") == "your"


def test_a_batch_script_is_a_shell_script(capsys, tmp_path):
    text = written(
        capsys,
        "slurm",
        "--nodes=2",
        "--per_node=4",
        "--gpus=1",
        "--grace=90",
        "--partition=gpu",
        "--setup=source venv/bin/activate",
    )
    (tmp_path / "job.sh").write_text(text)
    subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if line.startswith("#SBATCH")
    )
    assert (
        options["nodes"] == "2"
        and options["ntasks"] == "8"
        and options["ntasks-per-node"] == "4"
        and options["gres"] == "gpu:4"
    )
    assert (
        options["signal"] == "TERM@90"
        and "requeue" in options
        and options["partition"] == "gpu"
        and "account" not in options
    )
    line = next(line for line in text.splitlines() if "tfdist.train" in line).removesuffix(" &")
    assert shlex.split(line) == ["python", "-m", "tfdist.train", *TRAIN]


def test_slurm_ends_no_worker_since_another_has_ended(capsys):
    """A chief that still sent its snapshots --grace seconds after the end of the others was killed. srun(1): "how long
    to wait after the first task terminates before terminating all remaining tasks. A value of 0 indicates an unlimited
    wait"."""
    line = next(line for line in written(capsys, "slurm", "--grace=90").splitlines() if line.startswith("srun "))
    assert {"--wait=0", "--kill-on-bad-exit=0"} <= set(line.split())


@pytest.mark.parametrize("code", [*(code.value for code in ExitCode), 137, 143])
@pytest.mark.parametrize("restarts", [None, 10])
def test_a_batch_script_goes_back_to_the_queue_by_the_exit_code(code, restarts, capsys, tmp_path):
    """The real script, with stand-ins for srun and scontrol on its path (test_slurm.py runs Slurm itself)."""
    (tmp_path / "job.sh").write_text(written(capsys, "slurm", "--max_restarts=10"))
    for name, body in (("srun", f"exit {code}"), ("scontrol", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "5",
        **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
    }
    result = subprocess.run(
        ["bash", tmp_path / "job.sh"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    again = code == 42 or (restarts is None and (code > 130 or code in {code.value for code in RESTARTABLE}))
    assert ("requeue 5" in result.stdout) == again and result.returncode == (0 if again else code), result


def test_only_failures_since_the_last_stop_on_request_count(capsys, tmp_path):
    """Slurm counts all starts. A long job, which goes back to the queue at every time limit, keeps its retries."""
    (tmp_path / "job.sh").write_text(written(capsys, "slurm", "--max_restarts=2"))
    lost = ExitCode.PEER_LOST.value
    for name, body in (("srun", "exit $CODE"), ("scontrol", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def goes_back(restarts: int, code: int) -> bool:
        environment = {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_JOB_ID": "5",
            "SLURM_RESTART_COUNT": str(restarts),
            "CODE": str(code),
        }
        result = subprocess.run(
            ["bash", tmp_path / "job.sh"], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert not result.stderr
        return "requeue 5" in result.stdout

    assert all(goes_back(restarts, 42) for restarts in range(10))
    assert goes_back(10, lost) and goes_back(11, lost) and not goes_back(12, lost)
    assert not list(tmp_path.glob(".tfdist*"))  # nothing is left of a job that has ended
    assert not goes_back(12, lost)


CANNOT_SEND = """
import os
from tfdist.control import exit_codes
def main(argv):
    assert exit_codes.FINAL_CODE_VARIABLE not in os.environ  # a command that it runs may fail, and the job go on
    raise exit_codes.CheckpointError("Not all of the run could be sent.")
exit_codes.run_command(main, [])
"""


def test_a_code_that_no_new_start_mends_counts_more_than_the_highest(capsys, tmp_path):
    """A chief could not send its last snapshot and ended with 9, all others with 42: the job went back to the queue
    without end, and on other machines without that snapshot."""
    (tmp_path / "job.sh").write_text(written(capsys, "slurm"))
    (tmp_path / "chief.py").write_text(CANNOT_SEND)
    for name, body in (("srun", '"$PYTHON" "$CHIEF"; exit 42'), ("scontrol", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def end(python: str, restarts: int) -> tuple[int, str]:
        environment = {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "PYTHONPATH": os.getcwd(),
            "PYTHON": python,
            "CHIEF": str(tmp_path / "chief.py"),
            "SLURM_JOB_ID": "5",
            "SLURM_RESTART_COUNT": str(restarts),
        }
        found = subprocess.run(
            ["bash", tmp_path / "job.sh"], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        return found.returncode, found.stdout

    assert end(sys.executable, 3) == (ExitCode.CHECKPOINT, "")
    assert not list(tmp_path.glob(".tfdist*"))
    # A worker of an earlier start that Slurm could not reach, and which has ended since then.
    (tmp_path / ".tfdist-5.final-3").write_text("2")
    code, said = end("true", 4)
    assert code == 0 and "requeue 5" in said


def test_a_dockerfile_and_files(capsys, tmp_path):
    assert main(["dockerfile", "--cuda", f"--write={tmp_path / 'Dockerfile'}"]) == 0
    text = (tmp_path / "Dockerfile").read_text()
    assert text.splitlines()[2] == "FROM python:3.12-slim" and "tensorflow[and-cuda]" in text
    assert main(["dockerfile"]) == 0 and "and-cuda" not in capsys.readouterr().out


def test_flag_files_are_read_where_the_job_is_written(capsys):
    train = ["--flagfile=flags/digits_cnn.flags", "--noshuffle", "--run_dir", "/runs/digits", "--shuffle"]
    _, job, _ = yaml.safe_load_all(written(capsys, "kubernetes", *POD, train=train))
    command = worker_of(job["spec"]["template"]["spec"])["command"]
    assert command[3:5] == ["--run_dir=/runs/digits", "--source=digits"] and command[-1] == "--shuffle"
    assert len({flag.partition("=")[0] for flag in command}) == len(command) and "--noshuffle" not in command
    assert flags.parse(command[3:]) == flags.parse(train)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["slurm", "--nodes=0", "--", *TRAIN], ["--nodes=0"]),
        (["slurm", "--", "--steps=0"], ["--steps"]),
        (["kubernetes", "--", *TRAIN], ["--image"]),
        (["cloud", "--", *TRAIN], ["cloud"]),
        (["kubernetes", *POD, "--", *TRAIN, "--run_dir=runs/x"], ["--run_dir=runs/x", "/runs/x"]),
        (["kubernetes", *POD, "--claim=", "--", *TRAIN], ["--claim"]),
        ([], ["slurm|kubernetes"]),
        (["kubernetes", *POD, "--rdma=fast", "--", *TRAIN], ["--rdma=fast"]),
        (["slurm", "--name=My Job", "--", *TRAIN], ["My Job"]),
        (["slurm", "--write=no/file", "--", *TRAIN], ["--write=no/file"]),
        (["slurm", "--time=1\n2", "--", *TRAIN], ["--time", "line break"]),
        (["slurm", "--steps=3"], ["--steps=3"]),
        (["slurm", "--nodes=2", "--", *TRAIN, "--strategy=mesh", "--mesh=data=3"], ["--mesh=data=3", "2"]),
        (["tfjob", *POD, "--", *TRAIN, "--strategy=parameter_server"], ["--strategy=parameter_server", "tfjob"]),
        (["slurm", "--time=tomorrow", "--", *TRAIN], ["--time=tomorrow", "2-12:00:00"]),
        (["slurm", "--time=99:99:99", "--", *TRAIN], ["--time=99:99:99", "minutes and seconds below 60"]),
        (["slurm", "--time=1-24", "--", *TRAIN], ["--time=1-24", "hours below 24 after days"]),
        (["slurm", "--grace=65536", "--", *TRAIN], ["--grace=65536", "at most 65535"]),
        (["kubernetes", "--image=", "--", *TRAIN], ["--image=", "one word"]),
        (["dockerfile", "--base="], ["--base=", "one word"]),
        (["slurm", "--memory=lots", "--", *TRAIN], ["--memory=lots", "64G"]),
        (["kubernetes", *POD, "--memory=lots", "--", *TRAIN], ["--memory=lots", "16Gi"]),
        (["kubernetes", *POD, "--claim=C_!", "--", *TRAIN], ["--claim=C_!", "lowercase letters"]),
        (["dockerfile", "--base=x y"], ["--base=x y", "one word"]),
    ],
)
def test_mistakes_are_named(arguments, words):
    with pytest.raises(ConfigError) as error:
        main(arguments)
    assert all(word in str(error.value) for word in words), error.value


def test_templates_leave_out_lines_and_keep_indents():
    assert (
        jobspecs.fill("a\n{{?no}}b {{no}}\n  {{many}}\n{{?yes}}c {{yes}}", {"no": "", "many": "x\ny", "yes": 1})
        == "a\n  x\n  y\nc 1\n"
    )
    with pytest.raises(KeyError):
        jobspecs.fill("{{missing}}", {})


NASTY = [
    "--model_args=a b",
    "--x='; touch pwned; '",
    '--x="$(touch pwned)"',
    "--x=`touch pwned`",
    "--x=$(HOME) $HOME $$",
    "--x=line\n  break\ttab",
    "--x=restartPolicy: name: worker",
    "--x={{name}} {{?gpus}}",
    "--x=\\ \\n ü ✓",
    "--x=- [a, b]: {c} # d",
]


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "jobset", "tfjob"])
def test_whatever_a_flag_holds_reaches_the_worker_as_it_was(kind, tmp_path, monkeypatch):
    command = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv))"]
    if kind == "slurm":
        words = " ".join(jobspecs.bash_word(word) for word in [*command, *NASTY])
        script = jobspecs.fill("  {{command}} &\nwait\n", {"command": words})
        found = json.loads(
            subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        )[1:]
        assert found == NASTY and not list(tmp_path.iterdir())
        return
    options = parse_job_options(
        [
            "kubernetes" if kind == "jobset" else kind,
            "--image=1.5",
            "--namespace=123",
            "--claim=yes",
            "--memory=16Gi",
            "--name=run",
            *(["--jobset"] if kind == "jobset" else []),
        ],
        "",
    )
    make = jobs.tfjob if kind == "tfjob" else jobs.kubernetes
    config = Config().replace(run_dir="/runs/run")
    monkeypatch.setattr(jobs.flags, "expand_flagfiles", list)
    containers = [
        container
        for document in yaml.safe_load_all(make(options, config, NASTY))
        for container in _containers(document)
    ]
    assert containers and all(
        [flag.replace("$$", "$") for flag in container["command"][-len(NASTY) :]] == NASTY for container in containers
    )
    assert all(container["image"] == "1.5" for container in containers)


def _containers(node):
    if isinstance(node, dict):
        yield from node.get("containers", ())
        for value in node.values():
            yield from _containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from _containers(value)


@pytest.mark.parametrize(
    "argv, word",
    [
        (["slurm", "--partition=a b"], "--partition"),
        (["slurm", '--log=x"y'], "--log"),
        (["slurm", "--python='python"], "--python"),
        (["slurm", "--name=true"], "--name"),
        (["kubernetes", "--image=i", "--namespace=a;b"], "--namespace"),
        (["kubernetes", "--image=i", "--namespace=a.b"], "--namespace"),
        (["tfjob", "--image=i", f"--namespace={'a' * 64}"], "--namespace"),
        (["slurm", "--time=1:00 x"], "--time"),
        (["slurm", "--memory=64G'"], "--memory"),
    ],
)
def test_what_cannot_be_quoted_is_refused(argv, word):
    with pytest.raises(ConfigError, match=word):
        jobs.main([*argv, "--", "--source=digits", "--model=mlp", "--global_batch=8", "--steps=1", "--run_dir=/runs/x"])


SCRIPT = ["train it.py", "--epochs=3", "--name=$HOME"]
DOCTOR = ["-m", "tfdist.doctor", "--run_dir=/runs/a"]


def test_the_doctor_looks_at_the_workers_of_a_job(capsys):
    sbatch = written(capsys, "slurm", "--nodes=2", train=DOCTOR)
    assert "python -m tfdist.doctor --run_dir=/runs/a &" in sbatch and "#SBATCH --job-name=tfdist-doctor\n" in sbatch
    for kind in (["kubernetes"], ["kubernetes", "--jobset"], ["tfjob"]):
        pods = yaml.safe_load_all(written(capsys, *kind, "--image=i", "--workers=2", train=DOCTOR))
        containers = [container for document in pods for container in _containers(document)]
        assert containers and all(each["command"][-4:] == ["python", *DOCTOR] for each in containers)


def test_a_keras_script_is_run_by_what_gives_it_exit_codes(capsys):
    sbatch = written(capsys, "slurm", "--nodes=2", train=SCRIPT)
    assert "python -m tfdist.script 'train it.py' --epochs=3 '--name=$HOME' &" in sbatch
    assert "#SBATCH --job-name=train-it\n" in sbatch
    for kind in (["kubernetes"], ["kubernetes", "--jobset"], ["tfjob"]):
        pods = yaml.safe_load_all(written(capsys, *kind, "--image=i", "--workers=2", train=SCRIPT))
        containers = [container for document in pods for container in _containers(document)]
        wanted = ["python", "-m", "tfdist.script", "train it.py", "--epochs=3", "--name=$$HOME"]
        assert containers and all(container["command"][-len(wanted) :] == wanted for container in containers)


@pytest.mark.parametrize("time", ["90", "99:59", "99:59:59", "2-12", "2-12:30", "2-23:00:00", "UNLIMITED"])
def test_times_of_slurm_are_taken(time, capsys):
    assert f"#SBATCH --time={time}\n" in written(capsys, "slurm", f"--time={time}", "--grace=65535")
