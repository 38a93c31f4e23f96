"""Mistakes in the other commands: launch, evaluate, plan, jobs, report, comm, script."""

from __future__ import annotations

import json
import random

from tests.mistakes.mistake import ANY, CLUSTER, CONFIG, OK, Mistake, one
from tests.mistakes.modules import SCRIPT, TRAIN
from tests.mistakes.train_flags import NOT_NUMBERS, misspelt

RUN = TRAIN[1:]
# Of each command: (arguments before the flag, arguments after it, {number flag: least}, {choice flag: choices}).
LAUNCH = (
    ("launch", "--workers=1"),
    ("--", *RUN, "--dry_run"),
    {
        "workers": 1,
        "ps": 0,
        "gpus_per_worker": 0,
        "max_restarts": 0,
        "min_workers": 0,
        "grace": 0,
        "grow_after": 0,
        "placement_timeout": 0,
    },
    {"on": ("local", "ray"), "pin": ("auto", "none")},
)
PLAN = (
    ("plan", "--devices=4", "--hardware=h100"),
    ("--", *RUN, "--source=digits", "--model=cnn", "--model_args="),
    {"devices": 1, "outputs": 0, "tokens": 0, "samples": 0},
    {
        "zero": ("auto", "0", "1", "2", "3"),
        "recompute": ("auto", "none", "blocks"),
        "algorithm": ("auto", "ring", "tree"),
    },
)
SLURM = (
    ("jobs", "slurm"),
    ("--", *RUN),
    {"nodes": 1, "per_node": 1, "gpus": 0, "cpus": 1, "grace": 1, "max_restarts": 0},
    {},
)
KUBERNETES = (
    ("jobs", "kubernetes", "--image=i", "--claim=c"),
    ("--", *RUN, "--run_dir=/runs/a"),
    {"workers": 1, "gpus": 0, "cpus": 1, "grace": 1, "max_restarts": 0},
    {},
)
COMM = ("comm", "--workers=2"), (), {"smallest": 4, "largest": 4, "factor": 1.1, "repeats": 1}, {}
EVALUATE = ("evaluate", "--run_dir=run"), (), {"at_step": -1}, {}
COMMANDS = {
    "launch": LAUNCH,
    "plan": PLAN,
    "jobs slurm": SLURM,
    "jobs kubernetes": KUBERNETES,
    "comm": COMM,
    "evaluate": EVALUATE,
}


def number(chance: random.Random) -> Mistake:
    name = chance.choice(list(COMMANDS))
    before, after, numbers, _ = COMMANDS[name]
    flag = chance.choice(list(numbers))
    value = chance.choice(
        [
            *NOT_NUMBERS,
            "nan",
            "-7",
            str(numbers[flag] - 1),
            (
                "inf"
                if flag not in ("grace", "grow_after", "placement_timeout", "tokens", "samples", "factor")
                else "-inf"
            ),
            "1e3" if flag not in ("grace", "grow_after", "placement_timeout", "tokens", "samples", "factor") else "x",
        ]
    )
    return one(f"{name}: a number", [*before, f"--{flag}={value}", *after], CONFIG, f"--{flag}", flag)


def huge(chance: random.Random) -> Mistake:
    name = chance.choice(["plan", "jobs slurm", "jobs kubernetes", "launch", "evaluate"])
    before, after, numbers, _ = COMMANDS[name]
    flag = chance.choice([flag for flag in numbers if name != "launch" or flag not in ("workers", "ps")])
    return one(
        f"{name}: a huge number", [*before, f"--{flag}={chance.choice([2**31, 2**63, 10**30])}", *after], ANY, ""
    )


def name(chance: random.Random) -> Mistake:
    command = chance.choice(list(COMMANDS))
    before, after, numbers, choices = COMMANDS[command]
    known = [*numbers, *choices]
    wrong = misspelt(chance.choice(known), chance)
    wrong = "nonsense" if wrong in known or not wrong.isidentifier() or wrong == "grace" else wrong
    return one(f"{command}: a misspelt flag", [*before, f"--{wrong}=1", *after], CONFIG, wrong)


def choice(chance: random.Random) -> Mistake:
    command = chance.choice(["launch", "plan"])
    before, after, _, choices = COMMANDS[command]
    flag = chance.choice(list(choices))
    wrong = misspelt(chance.choice(choices[flag]), chance)
    wrong = "x" if wrong in choices[flag] or wrong in ("0", "1", "2", "3", "") else wrong
    return one(f"{command}: a misspelt value", [*before, f"--{flag}={wrong}", *after], CONFIG, f"--{flag}")


# command -> (arguments, codes, a word of the sentence)
CURATED: dict[str, tuple[tuple[tuple[str, ...], frozenset[int], str], ...]] = {
    "launch": (
        (("launch", "--workers=2"), CONFIG, "--"),
        (("launch",), CONFIG, "--"),
        (("launch", *RUN), CONFIG, "--"),
        (("launch", "--workers=2", "--", "nowhere.py"), CONFIG, "nowhere.py"),
        (("launch", "--workers=2", "--", "."), CONFIG, "."),
        (("launch", "--workers=2", "--", "train"), CONFIG, "train"),
        (("launch", "--min_workers=3", "--workers=2", "--", *RUN), CONFIG, "--min_workers"),
        (("launch", "--discover=echo 1", "--", *RUN), CONFIG, "--discover"),
        (("launch", "--ps=1", "--standby", "--", *RUN), CONFIG, "--standby"),
        (("launch", "--elastic", "--", *RUN), CONFIG, "--elastic"),
        (("launch", "--elastic", "--", *RUN, "--strategy=horovod", "--deterministic"), CONFIG, "--elastic"),
        (("launch", "--cpus_per_worker=2", "--", *RUN), CONFIG, "--cpus_per_worker"),
        (("launch", "--on=ray", "--ps=1", "--", *RUN), CONFIG, "--ps"),
        (("launch", "--show_ranks=7", "--", *RUN), CONFIG, "--show_ranks"),
        (("launch", "--show_ranks=a", "--", *RUN), CONFIG, "--show_ranks"),
        (("launch", "--show_ranks=", "--", *RUN), CONFIG, "--show_ranks"),
        (("launch", "--ps=1", "--", "script.py"), CONFIG, "--ps"),
        (("launch", "--elastic", "--", "script.py"), CONFIG, "--elastic"),
        (("launch", "--gpus_per_worker=2", "--", *RUN), CONFIG, "--gpus_per_worker"),
        (("launch", "--", *RUN, "--steps=x"), CONFIG, "--steps"),
        (("launch", "--", *RUN, "--model=resnet5"), CONFIG, "--model"),
        (("launch", "--workers=2", "--", *RUN, "--global_batch=1"), CONFIG, "--global_batch"),
        (("launch", "--workers=2", "--", *RUN, "--strategy=one_device"), CONFIG, "one_device"),
        (("launch", "--", *RUN, "--run_dir=mine.py"), CONFIG, "--run_dir"),
        (("launch", "--", *RUN, "--run_dir=/proc/x"), CONFIG, "--run_dir"),
        (("launch", "--", *RUN, "--flagfile=nowhere.flags"), CONFIG, "nowhere.flags"),
        (("launch", "--workers=1", "--", *RUN, "--source=mine:nothing"), CONFIG, "mine:nothing"),
        (("launch", "--workers=2", "--ps=1", "--", *RUN, "--strategy=sockets"), CONFIG, "sockets"),
        (("launch", "--workers=1000000", "--", *RUN), CONFIG, "--"),
        (("launch", "--workers=2", "--", *RUN, "--mesh=data=3", "--strategy=mesh"), CONFIG, "--mesh"),
        (("launch", "--workers", "2", "--", *RUN, "--dry_run"), OK, ""),
        (("launch", "--workers=2", "--workers=x", "--", *RUN), CONFIG, "--workers"),
        (("launch", "--", "--", *RUN), CONFIG, "--"),
        (("launch", "--", "broken.py"), frozenset({1}), ""),
        (("launch", "--evaluator", "--", *RUN, "--epochs=3"), CONFIG, "--epochs"),
    ),
    "plan": (
        (("plan", "--hardware=h1000", "--", *RUN), CONFIG, "--hardware"),
        (("plan", "--hardware=", "--", *RUN), CONFIG, "--hardware"),
        (("plan", "--hardware=nowhere.json", "--", *RUN), CONFIG, "--hardware"),
        (("plan", "--hardware=broken.json", "--", *RUN), CONFIG, "--hardware"),
        (("plan", "--hardware=list.json", "--", *RUN), CONFIG, "--hardware"),
        (("plan", "--hardware=wrong.json", "--", *RUN), CONFIG, "--hardware"),
        (("plan", "--hardware=h100,per_node=0", "--", *RUN), CONFIG, "--hardware"),
        (("plan", "--hardware=h100,per_node=x", "--", *RUN), CONFIG, "--hardware"),
        (("plan", "--hardware=h100,memory_gb=-3", "--", *RUN), CONFIG, "--hardware"),
        (("plan", "--hardware=h100,network=wifi", "--", *RUN), CONFIG, "--hardware"),
        (("plan", "--hardware=name=mine", "--", *RUN), CONFIG, "--hardware"),
        (("plan", "--hardware=h100,memory", "--", *RUN), CONFIG, "hardware"),
        (("plan", "--hardware=h100,efficiency=nan", "--", *RUN), ANY, ""),
        (("plan", "--hardware=h100,memory_gb=1e999", "--", *RUN), ANY, ""),
        (("plan", "--hardware=h100,per_node=2.5", "--", *RUN), ANY, ""),
        (("plan", "--hardware=h100,name=3", "--", *RUN), ANY, ""),
        (("plan", "--hardware=h100,bfloat16=maybe", "--", *RUN), CONFIG, "--hardware"),
        (("plan", "--hardware=h100,memory_gb=0.0000001", "--", *RUN), ANY, ""),
        (("plan", "--hardware=h100,efficiency=7", "--", *RUN), ANY, ""),
        (("plan", "--hardware=h100,overlap=9", "--", *RUN), ANY, ""),
        (("plan", "--hardware=h100,cards=1e-9", "--", *RUN), ANY, ""),
        (("plan", "--hardware=h100,network_us=1e30", "--", *RUN), ANY, ""),
        (("plan", "--mesh=data=3", "--devices=4", "--", *RUN), CONFIG, "--mesh"),
        (("plan", "--mesh=data", "--", *RUN), CONFIG, "--mesh"),
        (("plan", "--mesh=data=0", "--", *RUN), CONFIG, "--mesh"),
        (("plan", "--mesh=x=2", "--", *RUN), CONFIG, "--mesh"),
        (("plan", "--mesh=pipe=4", "--devices=4", "--", *RUN), CONFIG, "mesh"),
        (("plan", "--mesh=", "--", *RUN), CONFIG, "--mesh"),
        (("plan", "--input_shape=x", "--", *RUN), CONFIG, "--input_shape"),
        (("plan", "--input_shape=0", "--outputs=3", "--", *RUN), CONFIG, "--input_shape"),
        (("plan", "--input_shape=-6", "--outputs=3", "--", *RUN), CONFIG, "--input_shape"),
        (("plan", "--input_shape=6", "--", *RUN), ANY, ""),
        (("plan", "--calibrate=nowhere", "--", *RUN), CONFIG, "--calibrate"),
        (("plan", "--calibrate=", "--", *RUN), CONFIG, "--calibrate"),
        (("plan", "--json=/nowhere/x.json", "--input_shape=6", "--outputs=3", "--", *RUN), CONFIG, "--json"),
        (("plan", "--json=.", "--input_shape=6", "--outputs=3", "--", *RUN), CONFIG, "--json"),
        (("plan", "--plot=/nowhere/x.png", "--input_shape=6", "--outputs=3", "--", *RUN), CONFIG, "--plot"),
        (("plan", "--plot=x.exe", "--input_shape=6", "--outputs=3", "--", *RUN), CONFIG, "--plot"),
        (("plan", "--", *RUN, "--steps=-3"), CONFIG, "--steps"),
        (("plan", "--", "--model=nothing"), CONFIG, "--model"),
        (("plan", "--", *RUN, "--model=mine:nothing"), CONFIG, "mine:nothing"),
        (("plan", "--devices=3", "--", *RUN, "--source=digits", "--global_batch=1"), CONFIG, "--global_batch"),
        (
            ("plan", "--hardware=t4", "--", *RUN, "--precision=bfloat16", "--source=digits", "--model=mlp"),
            CONFIG,
            "--precision",
        ),
        (("plan", "stray", "--", *RUN), CONFIG, "stray"),
        (("plan", "--", *RUN, "--global_batch=0"), CONFIG, "--global_batch"),
    ),
    "jobs": (
        (("jobs",), CONFIG, "jobs"),
        (("jobs", "pbs"), CONFIG, "pbs"),
        (("jobs", "slurm", "--time=24 hours", "--", *RUN), CONFIG, "--time"),
        (("jobs", "slurm", "--partition=a;rm", "--", *RUN), CONFIG, "--partition"),
        (("jobs", "slurm", "--name=My Job", "--", *RUN), CONFIG, "--name"),
        (("jobs", "slurm", "--python='python", "--", *RUN), CONFIG, "--python"),
        (("jobs", "slurm", "--write=/nowhere/x", "--", *RUN), CONFIG, "--write"),
        (("jobs", "slurm", "--write=.", "--", *RUN), CONFIG, "--write"),
        (("jobs", "slurm", "--", *RUN, "--keep=0"), CONFIG, "--keep"),
        (("jobs", "slurm", "--"), CONFIG, "--steps"),
        (("jobs", "slurm", "--memory=64 G", "--", *RUN), CONFIG, "--memory"),
        (("jobs", "kubernetes", "--", *RUN), CONFIG, "--image"),
        (("jobs", "kubernetes", "--image=i", "--workers=2", "--", *RUN), CONFIG, "--claim"),
        (("jobs", "kubernetes", "--image=i", "--claim=c", "--", *RUN), CONFIG, "--run_dir"),
        (
            ("jobs", "kubernetes", "--image=i", "--claim=c", "--rdma=x", "--", *RUN, "--run_dir=/runs/a"),
            CONFIG,
            "--rdma",
        ),
        (("jobs", "kubernetes", "--image=i", "--namespace=A b", "--", *RUN), CONFIG, "--namespace"),
        (("jobs", "kubernetes", "--image=i\n- x", "--", *RUN), CONFIG, "--image"),
        (("jobs", "kubernetes", "--image=", "--", *RUN), CONFIG, "--image"),
        (("jobs", "tfjob", "--image=i", "--jobset", "--", *RUN), CONFIG, "--jobset"),
        (("jobs", "tfjob", "--image=i", "--name=-x", "--", *RUN), CONFIG, "--name"),
        (("jobs", "dockerfile", "--base=\nx"), CONFIG, "--base"),
        (("jobs", "dockerfile", "--write=/nowhere/x"), CONFIG, "--write"),
        (("jobs", "dockerfile", "--mount=runs"), ANY, ""),
        (("jobs", "slurm", "--name=true", "--", *RUN), CONFIG, "--name"),
        (("jobs", "slurm", "--", *RUN, "--run_dir=/"), ANY, ""),
        (("jobs", "kubernetes", "--image=i", "--memory=lots", "--", *RUN), ANY, ""),
        (("jobs", "slurm", "--time=", "--", *RUN), ANY, ""),
        (("jobs", "slurm", "--time=tomorrow", "--", *RUN), ANY, ""),
        (("jobs", "kubernetes", "--image=i", "--claim=C_", "--", *RUN, "--run_dir=/runs/x"), ANY, ""),
        (("jobs", "kubernetes", "--image=i", "--mount=runs", "--", *RUN), ANY, ""),
    ),
    "report": (
        (("report",), CONFIG, "RUN_DIR"),
        (("report", "nowhere"), CONFIG, "nowhere"),
        (("report", "mine.py"), CONFIG, "mine.py"),
        (("report", "."), CONFIG, "."),
        (("report", "run", "run"), CONFIG, "run"),
        (("report", "run", "--out=/nowhere/x.html"), CONFIG, "--out"),
        (("report", "run", "--out=."), CONFIG, "--out"),
        (("report", "run", "--out=mine.py"), CONFIG, "--out"),
        (("report", "run", "--txt"), CONFIG, "--txt"),
        (("report", "run", "nowhere"), CONFIG, "nowhere"),
        (("report", ""), CONFIG, "run folder"),
        (("report", "run/logs"), CONFIG, "run/logs"),
    ),
    "comm": (
        (("comm",), CLUSTER, "--workers"),
        (("comm", "--workers=1"), CONFIG, "--workers"),
        (("comm", "--workers=2,x"), CONFIG, "--workers"),
        (("comm", "--workers=0"), CONFIG, "--workers"),
        (("comm", "--workers=2", "--runtimes=gloo"), CONFIG, "--runtimes"),
        (("comm", "--runtimes=mesh"), CONFIG, "--runtimes"),
        (("comm", "--workers=2", "--collectives=allreduce"), CONFIG, "--collectives"),
        (("comm", "--workers=2", "--collectives="), CONFIG, "--collectives"),
        (("comm", "--workers=2", "--smallest=1000", "--largest=10"), CONFIG, "--smallest"),
        (("comm", "--workers=2", "--out=mine.py"), CONFIG, "--out"),
        (("comm", "--workers=2", "--out=/proc/x"), CONFIG, "--out"),
        (("comm", "--workers=2", "--runtimes=sockets:nccl"), CONFIG, "nccl"),
        (("comm", "--workers=2", "--strategy=mirrored"), CONFIG, "--strategy"),
        (("comm", "--workers=-2"), CONFIG, "--workers"),
        (("comm", "--workers=2", "--factor=inf"), CONFIG, "--factor"),
        (("comm", "--workers=2", "--runtimes=mesh:"), ANY, ""),
    ),
    "script": (
        (("script",), CONFIG, "script"),
        (("script", "nowhere.py"), CONFIG, "nowhere.py"),
        (("script", "."), CONFIG, "."),
        (("script", "run"), CONFIG, "run"),
        (("script", "broken.py"), frozenset({1}), ""),
        (("script", "list.json"), frozenset({1}) | CONFIG, ""),
        (("script", "--workers=2", "script.py"), CONFIG, "--workers"),
    ),
    "evaluate": (
        (("evaluate",), CONFIG, "--run_dir"),
        (("evaluate", "--run_dir="), CONFIG, "--run_dir"),
        (("evaluate", "run"), CONFIG, "run"),
        (("evaluate", "--run_dir=run", "--at_step"), CONFIG, "--at_step"),
        (("evaluate", "--run_dir=run", "--flagfile=nowhere"), CONFIG, "nowhere"),
        (("evaluate", "--run_dir=nowhere", "--follow", "--startup_timeout=1"), frozenset({5}), "--run_dir"),
        (("evaluate", "--run_dir=run", "--dry_run=x"), CONFIG, "--dry_run"),
    ),
}
FILES = {
    "broken.json": '{"base": ',
    "list.json": "[1, 2]",
    "wrong.json": json.dumps({"base": "h100", "memory": 3}),
    "script.py": SCRIPT,
    "broken.py": "print(undefined_name)\n",
}


def curated(chance: random.Random) -> Mistake:
    command = chance.choice(list(CURATED))
    arguments, codes, word = chance.choice(CURATED[command])
    prepared = ("run",) if command in ("report", "evaluate", "script") else ()
    return one(
        f"{command}: what cannot be", arguments, codes, *([word] if word else []), prepared=prepared, files=FILES
    )
