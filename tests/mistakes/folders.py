"""Mistakes in run folders (damaged, truncated, mixed up) and in data folders."""

from __future__ import annotations

import random
from typing import Any

from tests.mistakes.mistake import ANY, CHECKPOINT, CONFIG, DATA, OK, Mistake, one
from tests.mistakes.modules import TRAIN

# The run of prepared.py: 6 steps, snapshots of 3 and 6, an export.
OLD, NEW = "run/checkpoints/step-00000003", "run/checkpoints/step-00000006"
OTHER_VALUES = (
    None,
    True,
    -1,
    0,
    1e308,
    2**70,
    "",
    "x",
    "3",
    [],
    {},
    [[]],
    ["x"],
    {"a": 1},
    "\x1b[31m",
    float("nan"),
    "../../etc/passwd",
    10**400,
)
ENTRIES = (
    "format",
    "step",
    "files",
    "consumed",
    "skipped_samples",
    "passed_over",
    "config_digest",
    "identity",
    "workers",
    "replicas",
    "strategy",
    "versions",
    "variables",
    "generators",
    "clock",
    "metrics",
    "learning_rate",
    "losses",
    "time",
    "run_id",
    "stream_cut",
    "sha256",
    "epoch",
    "none of these",
)
GOES_ON = (*TRAIN, "--steps=8")


def _damage(chance: random.Random, folder: str) -> tuple[Any, ...]:
    """Draws one damage to a snapshot."""
    step = int(folder[-8:])
    files = [f"{folder}/manifest.json", f"{folder}/state-{step}.index", f"{folder}/state-{step}.data-00000-of-00001"]
    file = chance.choice(files)
    entry = chance.choice(ENTRIES)
    return chance.choice(
        [
            ("remove", file),
            ("truncate", file, chance.choice([0, 0.3, 0.99])),
            ("flip", file, chance.random() * 0.98),
            ("append", file, "x"),
            ("folder", file),
            ("write", file, chance.choice(["", "{}", "[]", "null", "\x00" * 50, "3", "[" * 100_000])),
            ("drop", files[0], [entry]) if entry != "none of these" else ("drop", files[0], ["step"]),
            ("json", files[0], [entry], chance.choice(OTHER_VALUES)),
            ("remove", folder),
            ("write", folder, "x"),
        ]
    )


def damaged(chance: random.Random) -> Mistake:
    """The newest snapshot is damaged: the one before it is taken, and the reason is logged."""
    damage = _damage(chance, NEW)
    command = chance.choice([GOES_ON, ("evaluate", "--run_dir=run"), (*GOES_ON, "--resume=must")])
    return one("run folder: the newest snapshot is damaged", command, OK, prepared=("run",), damage=(damage,))


def all_damaged(chance: random.Random) -> Mistake:
    damage = (_damage(chance, NEW), _damage(chance, OLD))
    command = chance.choice(
        [(*GOES_ON, "--resume=must"), ("evaluate", "--run_dir=run"), ("evaluate", "--run_dir=run", "--at_step=6")]
    )
    return one(
        "run folder: all snapshots are damaged",
        command,
        CHECKPOINT | CONFIG,
        "checkpoints",
        "--resume",
        prepared=("run",),
        damage=damage,
    )


def sealed(chance: random.Random) -> Mistake:
    """A manifest whose checksum is right, but whose content tfdist never writes."""
    entry = chance.choice(ENTRIES[:-1])
    keys = [
        entry,
        *chance.choice(
            [
                [],
                [],
                ["seconds"],
                ["pauses"],
                ["python"],
                ["numpy"],
                ["0"],
                ["state-6.index"],
                ["global_batch"],
                ["state-6.index", "bytes"],
            ]
        ),
    ]
    damage = chance.choice(
        [
            ("sealed", f"{NEW}/manifest.json", keys, chance.choice(OTHER_VALUES[:-1])),
            ("sealed_drop", f"{NEW}/manifest.json", keys),
        ]
    )
    command = chance.choice(
        [GOES_ON, ("evaluate", "--run_dir=run"), (*GOES_ON, "--resume=must", "--allow_config_change")]
    )
    return one("run folder: a manifest made up", command, ANY, prepared=("run",), damage=(damage,))


def other_file(chance: random.Random) -> Mistake:
    """Damages any other file in a run folder."""
    file = chance.choice(
        [
            "flags.txt",
            "status.json",
            "logs/rank-0.jsonl",
            "checkpoints/checkpoint",
            "export/model.keras",
            "summary.json",
            "checkpoints",
            "logs",
            "lease.json",
            "job.lease",
            "export",
        ]
    )
    damage = chance.choice(
        [
            ("remove", f"run/{file}"),
            ("truncate", f"run/{file}", 0.5),
            (
                "write",
                f"run/{file}",
                chance.choice(
                    [
                        "",
                        "{}",
                        "null",
                        "[" * 100_000,
                        "\udcff\udcfe",
                        "\x00" * 20,
                        '{"status": 3}',
                        "--steps=-3\n",
                        "--nonsense\n",
                        "[1, 2]",
                    ]
                ),
            ),
            ("folder", f"run/{file}"),
            ("flip", f"run/{file}", chance.random()),
        ]
    )
    command = chance.choice(
        [
            GOES_ON,
            ("evaluate", "--run_dir=run"),
            ("evaluate", "--run_dir=run", "--model_file=run/export/model.keras"),
            ("report", "run"),
            ("report", "run", "--text"),
            ("plan", "--hardware=cpu", "--devices=2", "--calibrate=run", "--", *TRAIN[1:]),
            ("evaluate", "--run_dir=run", "--follow", "--startup_timeout=1"),
        ]
    )
    return one("run folder: another file is damaged", command, ANY, prepared=("run",), damage=(damage,))


def logs(chance: random.Random) -> Mistake:
    """Records that no version of tfdist has written."""
    entry = chance.choice(["v", "time", "run_id", "attempt", "rank", "host", "kind", "step", "values"])
    record = (
        '{"v": 1, "time": "2026-01-01T00:00:00.000+00:00", "run_id": "a", "attempt": 0, "rank": 0, "host": "h", "kind":'
        ' "%s", "step": 7, "values": {"train/loss": %s, "perf/steps_per_s": %s, "workers": %s, "message": %s}}\n'
    )
    values = ("1.0", '"nan"', "null", '"x"', "[]", "{}", "-1", "0", "1e400", "true", '"\\u001b[31m"', "NaN")
    lines = [
        record
        % (
            chance.choice(
                [
                    "train",
                    "eval",
                    "start",
                    "end",
                    "save",
                    "phases",
                    "verdict",
                    "restore",
                    "warning",
                    "error",
                    "odd",
                    "backup",
                ]
            ),
            *(chance.choice(values) for _ in range(4)),
        )
        for _ in range(3)
    ]
    if chance.random() < 0.5:
        lines[1] = lines[1].replace(f'"{entry}":', f'"{entry}s":')
    command = chance.choice(
        [
            ("report", "run"),
            ("report", "run", "--text"),
            GOES_ON,
            ("plan", "--hardware=cpu", "--devices=2", "--calibrate=run", "--", *TRAIN[1:]),
        ]
    )
    damage = chance.choice(
        [("append", "run/logs/rank-0.jsonl", "".join(lines)), ("write", "run/logs/rank-0.jsonl", "".join(lines))]
    )
    return one("run folder: records that nobody wrote", command, ANY, prepared=("run",), damage=(damage,))


MIXED_UP: tuple[tuple[tuple[Any, ...], tuple[str, ...], frozenset[int], str], ...] = (
    (("copy", NEW, "run/checkpoints/step-00000009"), GOES_ON, ANY, ""),
    (("copy", NEW, "run/checkpoints/step-99999999999999999999"), GOES_ON, OK, ""),
    (("rename", NEW, "run/checkpoints/step-6"), GOES_ON, OK, ""),
    (("folder", "run/checkpoints/step-00000100"), GOES_ON, OK, ""),
    (
        ("folder", "run/checkpoints/step-00000100"),
        ("evaluate", "--run_dir=run", "--at_step=100"),
        CHECKPOINT,
        "step-00000100",
    ),
    (("copy", OLD, NEW), GOES_ON, OK, ""),
    (("remove", "nothing"), (*GOES_ON, "--resume=never"), CHECKPOINT | CONFIG, "--resume"),
    (("remove", "nothing"), (*GOES_ON, "--learning_rate=0.5"), CHECKPOINT, "--learning_rate"),
    (("remove", "nothing"), (*GOES_ON, "--model_args=widths=(9,)"), CHECKPOINT, "--model_args"),
    (("remove", "nothing"), (*GOES_ON, "--model_args=widths=(9,)", "--allow_config_change"), CHECKPOINT, ""),
    (("remove", "nothing"), (*GOES_ON, "--optimizer=sgd", "--allow_config_change"), ANY, ""),
    (("remove", "nothing"), (*GOES_ON, "--steps=2"), ANY, ""),
    (("remove", "nothing"), (*GOES_ON, "--source=mine:stream", "--allow_config_change"), ANY, ""),
    (("remove", "nothing"), (*GOES_ON, "--precision=float16", "--allow_config_change"), ANY, ""),
    (("remove", "run/checkpoints"), (*GOES_ON, "--resume=must"), CHECKPOINT, "--resume=must"),
    (("remove", "nothing"), ("evaluate", "--run_dir=run", "--at_step=4"), CHECKPOINT, "--at_step=4"),
    (("remove", "nothing"), ("evaluate", "--run_dir=run", "--at_step=-2"), CONFIG, "--at_step"),
    (("remove", "nothing"), ("evaluate", "--run_dir=nowhere"), CONFIG, "--run_dir=nowhere"),
    (("remove", "nothing"), ("evaluate", "--run_dir=mine.py"), CONFIG, "--run_dir=mine.py"),
    (
        ("remove", "nothing"),
        ("evaluate", "--run_dir=run", "--model_file=nowhere.keras"),
        CONFIG | CHECKPOINT,
        "nowhere.keras",
    ),
    (("remove", "nothing"), ("evaluate", "--run_dir=run", "--model_file=mine.py"), CONFIG | CHECKPOINT, "mine.py"),
    (("remove", "nothing"), ("evaluate", "--run_dir=run", "--model_file=run"), CONFIG | CHECKPOINT, "model file"),
    (
        ("remove", "nothing"),
        ("evaluate", "--run_dir=run", "--model_args=widths=(9,)"),
        CHECKPOINT | CONFIG,
        "model flags",
    ),
    (("remove", "nothing"), ("evaluate", "--run_dir=run", "--model=mine:model", "--model_args="), ANY, ""),
    (("remove", "nothing"), ("evaluate", "--run_dir=run", "--source=digits"), CHECKPOINT | CONFIG | DATA, ""),
    (
        ("remove", "nothing"),
        ("evaluate", "--run_dir=run", "--model_file=run/export/model.keras", "--source=digits"),
        CHECKPOINT | CONFIG | DATA,
        "run/export/model.keras",
    ),
    (("remove", "nothing"), ("evaluate", "--run_dir=run", "--follow", "--at_step=3"), ANY, ""),
    (
        ("write", "run/mine.keras", "PK"),
        ("evaluate", "--run_dir=run", "--model_file=run/mine.keras"),
        CONFIG | CHECKPOINT,
        "mine.keras",
    ),
    (
        ("truncate", "run/export/model.keras", 0.7),
        ("evaluate", "--run_dir=run", "--model_file=run/export/model.keras"),
        CONFIG | CHECKPOINT,
        "model.keras",
    ),
    (("remove", "nothing"), ("evaluate", "--run_dir=run", "--source=mine:nothing"), CONFIG, "mine:nothing"),
    (("remove", "nothing"), ("evaluate", "--run_dir=run", "--eval_samples=-3"), CONFIG, "--eval_samples"),
    (("remove", "nothing"), ("evaluate", "--run_dir=run", "--eval_batch=100000"), OK, ""),
    (("remove", "mine.py"), ("evaluate", "--run_dir=run"), CONFIG, "mine"),
    (("remove", "mine.py"), GOES_ON, CONFIG, "mine"),
    (("write", "run/checkpoints/.writing-x", "x"), GOES_ON, OK, ""),
    (("write", "run/checkpoints/step-00000004", "x"), GOES_ON, OK, ""),
)


def mixed_up(chance: random.Random) -> Mistake:
    damage, command, codes, word = chance.choice(MIXED_UP)
    return one("run folder: mixed up", command, codes, *([word] if word else []), prepared=("run",), damage=(damage,))


BACKUP = (*GOES_ON, "--backup_dir=backup", "--backup_every=2")


def backup(chance: random.Random) -> Mistake:
    damage = chance.choice(
        [
            ("write", "backup", "x"),
            ("write", "backup/step-00000007", "x"),
            ("write", "backup/status.json", "{"),
            ("copy", NEW, "backup/step-00000006"),
            ("copy", OLD, "backup/step-00000007"),
            ("folder", "backup/step-00000007"),
            ("copy", "mine.py", "backup/mine.py"),
            ("copy", "run", "backup"),
        ]
    )
    return one("backup folder", BACKUP, ANY, prepared=("run",), damage=(damage,))


RECORDS = (*TRAIN, "--source=tfrecord", "--data_dir=records")
GOOD_RECORDS = "--source_args=x=x:float32[6],y=y:int64,classes=3"
WRONG_RECORDS = (
    "x=x:float32[6],y=y:int64",
    "x=x:float32[7],y=y:int64,classes=3",
    "x=x:float32[5],y=y:int64,classes=3",
    "x=z:float32[6],y=y:int64,classes=3",
    "x=x:int64[6],y=y:int64,classes=3",
    "x=x:float[6],y=y:int64,classes=3",
    "y=y:int64,classes=3",
    "x=x,y=y,classes=3",
    "x=x:float32[6],y=y:int64,classes=2",
    "x=x:float32[6],y=y:int64,classes=three",
    "x=x:float32[6],y=y:int64,classes=-3",
    "x=x:float32[6],y=y:int64,classes=3,train=*nothing*",
    "x=x:float32[6],y=y:int64,classes=3,train=*,eval=*",
    "x=x:float32[6],y=y:int64,classes=3,compression=GZIP",
    "x=x:float32[6],y=y:int64,classes=3,stream=yes",
    "x=x:float32[6],y=y:int64,classes=3,stream=True,compression=GZIP",
    "x=x:float32[6],y=y:int64,classes=3,stream=True,compression=ZIP",
    "x=x:image[8,8,3],y=y:int64,classes=3",
    "x=x:image[8,9,3],y=y:int64,classes=3",
    "x=x:uint8[6],y=y:int64,classes=3",
    "x=x:float32[-1],y=y:int64,classes=3",
    "x=x:float32[0],y=y:int64,classes=3",
    "x=x:float32[6,y=y:int64,classes=3",
    "x=x:float32[99999999999999999999],y=y:int64,classes=3",
    "x=x:float32[6],y=y:int64[2],classes=3",
    "x=:float32[6],y=y:int64,classes=3",
    "x=x:float32[6],y=y:int64,class=3",
    "x=x:float32[2,3],y=y:int64,classes=1",
    "x=x:string[6],y=y:int64,classes=3",
)


def records(chance: random.Random) -> Mistake:
    if chance.random() < 0.5:
        wrong = chance.choice(WRONG_RECORDS)
        return one(
            "data: options of records",
            [*RECORDS, f"--source_args={wrong}"],
            CONFIG | DATA,
            "source_args",
            "tfrecord",
            "num_outputs",
            "--source",
            prepared=("records",),
        )
    file = chance.choice(["records/train-0.tfrecord", "records/train-1.tfrecord", "records/eval-0.tfrecord"])
    damage = chance.choice(
        [
            ("remove", "records"),
            ("truncate", file, chance.choice([0.5, 0.97])),
            ("truncate", file, 0),
            ("flip", file, chance.random() * 0.98),
            ("flip", file, 0.001),
            ("write", file, "no records at all"),
            ("append", file, "x"),
            ("folder", file),
            ("rename", file, "records/other.tfrecord"),
            ("copy", "mine.py", "records/train-2.txt"),
            ("write", "records", "x"),
        ]
    )
    more = chance.choice([[], [], [",stream=True"]])
    return one(
        "data: damaged records", [*RECORDS, GOOD_RECORDS + "".join(more)], ANY, prepared=("records",), damage=(damage,)
    )


TEXTS = (
    *TRAIN,
    "--source=text",
    "--data_dir=texts",
    "--model=transformer",
    "--model_args=size=tiny",
    "--sequence_length=16",
)


def texts(chance: random.Random) -> Mistake:
    damage = chance.choice(
        [
            ("remove", "nothing"),
            ("remove", "texts"),
            ("remove", "texts/a.txt"),
            ("truncate", "texts/a.txt", 0),
            ("truncate", "texts/a.txt", 0.002),
            ("write", "texts", "x"),
            ("folder", "texts/a.txt"),
            ("write", "texts/a.txt", "\udcff" * 900),
        ]
    )
    more = chance.choice(
        [
            ["--sequence_length=100000"],
            ["--source_args=pattern=*.nothing"],
            ["--source_args=pattern=3"],
            ["--source_args=eval_pattern=*"],
            ["--source_args=max_bytes=-1"],
            ["--source_args=max_bytes=3"],
            ["--source_args=max_bytes=x"],
            ["--source_args=patterns=*"],
            ["--model_args=size=huge"],
            ["--model_args=sizes=tiny"],
            ["--model_args=size=tiny,heads=3"],
            ["--model_args=size=tiny,layers=-1"],
            ["--model_args=size=tiny,layers=two"],
            ["--model_args=size=tiny,num_outputs=3"],
            ["--objective=regression"],
            ["--augment=shift"],
            [],
        ]
    )
    surely = bool(more) and more[0] not in ("--source_args=max_bytes=3",)
    return one(
        "data: texts", [*TEXTS, *more], CONFIG | DATA if surely else ANY, "--", prepared=("texts",), damage=(damage,)
    )


SYNTHETIC = (
    "task=video",
    "shape=8",
    "shape=(8,)x",
    "shape=()",
    "shape=(0,)",
    "shape=(8.5,)",
    "shape=(-8,)",
    "classes=0",
    "classes=-1",
    "classes=x",
    "classes=10**9",
    "classes=99999999999",
    "samples=0",
    "samples=-5",
    "samples=x",
    "eval_samples=0",
    "fixed=yes",
    "vocab=0,task=text",
    "sample=3",
    "shape=(8,),classes=3,samples=1",
    "shape=(100000,100000,3)",
    "shape='abc'",
    "task=text",
    "shape=(8,),samples=99999999999999999999",
)
IN_DATA_SET = (
    "name=",
    "name=nothing_of_this_name",
    "",
    "split=x",
    "name=mnist,data=1",
    "name=../../etc",
    "name=mnist:99.0.0",
)


def synthetic(chance: random.Random) -> Mistake:
    if chance.random() < 0.25:
        return one(
            "data: options of tfds",
            [*TRAIN, "--source=tfds", f"--source_args={chance.choice(IN_DATA_SET)}", "--data_dir=nowhere"],
            ANY - OK,
            "source",
            "data_dir",
            "tfds",
            "tensorflow_datasets",
        )
    wrong = chance.choice(SYNTHETIC)
    maybe = wrong in (
        "shape=(8,),classes=3,samples=1",
        "task=text",
        "shape=(8,),samples=99999999999999999999",
        "eval_samples=0",
        "shape=(100000,100000,3)",
        "classes=99999999999",
    )
    return one(
        "data: options of synthetic",
        [*TRAIN, "--source=synthetic", f"--source_args={wrong}", "--eval_every=-1"],
        ANY if maybe else CONFIG | DATA,
        "" if maybe else "source",
        "samples",
    )
