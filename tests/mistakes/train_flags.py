"""Mistakes in the flags of tfdist.train, and in flag files."""

from __future__ import annotations

import random

from tests.mistakes.mistake import ANY, CONFIG, DATA, Mistake, one
from tests.mistakes.modules import TRAIN
from tfdist.config import iter_options

OPTIONS = [field for _, field in iter_options()]
NUMBERS = [field for field in OPTIONS if type(field.default) in (int, float)]
TEXTS = [field.name for field in OPTIONS if isinstance(field.default, str) and not field.metadata["choices"]]
CHOICES = [field for field in OPTIONS if field.metadata["choices"]]
BOOLS = [field.name for field in OPTIONS if isinstance(field.default, bool)]
# Numbers for which infinity makes no sense. The others are limits, which infinity turns off.
ENDLESS = (
    "learning_rate",
    "weight_decay",
    "epochs",
    "ema",
    "label_smoothing",
    "loss_scale_initial",
    "decay_fraction",
    "min_learning_rate_ratio",
    "grace_period",
)
NOT_NUMBERS = (
    "abc",
    "",
    "1,5",
    "ten",
    "true",
    "0..1",
    "--",
    "1e",
    "5 %",
    "½",
    "None",
    "[1]",
    "\t",
    "1_0_",
    "3;4",
    "🙂",
    "-",
    "++1",
)
HUGE = (2**31, 2**63, 2**64 + 1, 10**30)
# Numbers for which a huge value is only slow, or is obeyed.
NOT_HUGE = (
    "steps",
    "epochs",
    "sequence_length",
    "virtual_devices",
    "reader_threads",
)


def number(chance: random.Random) -> Mistake:
    field = chance.choice(NUMBERS)
    flag, whole, least = f"--{field.name}", isinstance(field.default, int), field.metadata["least"]
    how = chance.choice(["text", "low", "nan", "endless", "huge", "high", "fraction"])
    if how == "low" and least is not None:
        value = chance.choice([least - 1, least - 0.5 if not whole else least - 2, -(10**6), -(2**63)])
        return one("train: a number too low", [*TRAIN, f"{flag}={value}"], CONFIG, flag)
    if how == "high" and field.metadata["most"] is not None:
        value = field.metadata["most"] * 2
        return one("train: a number too high", [*TRAIN, f"{flag}={value}"], CONFIG, flag)
    if how == "nan":
        return one("train: nan", [*TRAIN, f"{flag}={chance.choice(['nan', 'NaN', '-nan'])}"], CONFIG, flag)
    if how == "endless":
        value = chance.choice(["inf", "Infinity", "1e999"])
        return one(
            "train: an endless number",
            [*TRAIN, f"{flag}={value}"],
            CONFIG if whole or field.name in ENDLESS else ANY,
            flag,
        )
    if how == "huge" and field.name not in NOT_HUGE:
        return one("train: a huge number", [*TRAIN, f"{flag}={chance.choice(HUGE)}"], ANY, flag)
    if how == "fraction" and whole:
        return one("train: a fraction", [*TRAIN, f"{flag}={chance.choice([1.5, 0.1, '1e3', '2.0'])}"], CONFIG, flag)
    return one("train: text for a number", [*TRAIN, f"{flag}={chance.choice(NOT_NUMBERS)}"], CONFIG, flag)


def misspelt(word: str, chance: random.Random) -> str:
    at = chance.randrange(len(word))
    changed = {
        "lost": word[:at] + word[at + 1 :],
        "twice": word[:at] + word[at] + word[at:],
        "other": word[:at] + chance.choice("abcxyz_") + word[at + 1 :],
        "swapped": word[:at] + word[at + 1 : at + 2] + word[at : at + 1] + word[at + 2 :],
        "longer": word + chance.choice("s_1z"),
        "upper": word.upper(),
    }
    return changed[chance.choice(list(changed))]


def name(chance: random.Random) -> Mistake:
    names = [field.name for field in OPTIONS]
    wrong = misspelt(chance.choice(names), chance)
    if not wrong or wrong in names or wrong.removeprefix("no") in BOOLS or not wrong.replace("_", "").isalnum():
        wrong = "batchsize"
    value = chance.choice(["=3", "=", ""])
    return one("train: a misspelt flag", [*TRAIN, f"--{wrong}{value}"], CONFIG, wrong)


def choice(chance: random.Random) -> Mistake:
    field = chance.choice(CHOICES)
    wrong = chance.choice(
        [
            misspelt(chance.choice(field.metadata["choices"]), chance),
            "",
            "1",
            ",".join(field.metadata["choices"][:2]),
            "None",
        ]
    )
    wrong = "other" if wrong in field.metadata["choices"] else wrong
    return one("train: a misspelt value", [*TRAIN, f"--{field.name}={wrong}"], CONFIG, f"--{field.name}")


def boolean(chance: random.Random) -> Mistake:
    flag = chance.choice(BOOLS)
    if chance.random() < 0.3:
        return one("train: a switch that is no switch", [*TRAIN, f"--no{chance.choice(NUMBERS).name}"], CONFIG, "--no")
    return one(
        "train: a switch that is no switch",
        [*TRAIN, f"--{flag}={chance.choice(['maybe', '2', 'yes please', '', 'nein', 'TRUEE'])}"],
        CONFIG,
        flag,
    )


def form(chance: random.Random) -> Mistake:
    """Arguments that are not flags."""
    arguments = [*TRAIN]
    how = chance.choice(["word", "dash", "spaces", "no value", "before", "colon", "one dash"])
    wrong = {
        "word": "runs/first",
        "dash": "–steps=3",
        "spaces": "--steps =3",
        "no value": "--steps",
        "before": "-- --steps=3",
        "colon": "--steps:3",
        "one dash": "-",
    }[how]
    return one(
        "train: not a flag",
        [*arguments, *([wrong] if how != "before" else ["--", "steps=3"])],
        CONFIG,
        "steps" if how not in ("word", "one dash") else wrong,
    )


# flag -> values that it cannot have, except in VALID
WRONG_TEXTS: dict[str, tuple[str, ...]] = {
    "mesh": (
        "data=2",
        "data=0",
        "data=x",
        "model",
        "data=1,data=1",
        "tensor=2",
        "data=-1",
        "=2",
        "data=2,,model=1",
        "data = 1",
        ",",
    ),
    "keep_best": ("accuracy", "min:", "max:acc", "best:loss", "MAX:loss", ":", "max:loss,accuracy", "min: loss"),
    "export": ("onnx", "keras,", "keras,onnx", "none,keras", "Keras", "keras;saved_model", "", "saved-model"),
    "profile_steps": ("3", "5:2", "2:2", "a:b", "1:", ":3", "1-3", "-1:3", "1:2:3"),
    "profile_ranks": ("-1", "a", "0,", "0;1", "", "0-1", "alle"),
    "trackers": (
        "tensorbord",
        "none,csv",
        "mine:nothing",
        "nowhere:tracker",
        "csv;tensorboard",
        ",",
        "csv,csvv",
        "mine:",
        ":tracker",
    ),
    "source_args": ("x", "=3", "a=1,b", "size", "1=2", "wrong=1", "a b=1", "split=train", "=", "count:3"),
    "model_args": (
        "x",
        "=3",
        "widths",
        "widths=abc",
        "widths=(8,",
        "width=(8,)",
        "widths=(-1,)",
        "widths=(0,)",
        "widths=8.5",
        "dropout=2",
        "dropout=-1",
        "dropout=x",
        "num_outputs=0",
        "num_outputs=-3",
        "num_outputs=2",
        "num_outputs=three",
        "x_spec=1",
        "widths=()",
        "widths=(8,)dropout=0.1",
        "widths={}",
        "widths=None",
        "num_outputs=1.5",
    ),
    "optimizer_args": (
        "x",
        "beta_1",
        "beta1=0.9",
        "beta_1=2",
        "beta_1=abc",
        "learning_rate=1",
        "epsilon=-1",
        "name=3",
        "beta_1=-0.5",
        "weight_decay=x",
        "foo=",
        "beta_1=None",
    ),
    "pipe_cut": ("block_1", ","),
    "scaling_baseline": ("nowhere", "-5", "0", "nan", "mine.py", "inf", "1e"),
    "data_dir": (
        "nowhere",
        "s3://",
        "s3://bucket",
        "s3:/bucket/data",
        "s3:bucket/data",
        "s3//bucket/data",
        "s3://a:b@bucket/data",
        "s3://bucket/a/../b",
        "ftp://host/x",
    ),
    "run_dir": (
        "mine.py",
        "mine.py/run",
        "/proc/run",
        "/dev/null",
        "a" * 300,
        "s3://",
        "s3://bucket",
        "s3:///run",
        "s3:bucket/run",
        "gs//bucket/run",
        " s3://bucket/run",
        "s3://a:b@bucket/run",
        "s3://bucket/a/../b",
        "ftp://host/run",
        "http://x/y?z",
    ),
    "backup_dir": (
        "mine.py",
        "/proc/backup",
        "run/checkpoints/../../mine.py/x",
        "a" * 300,
        "s3://bucket",
        "s3:bucket/backup",
    ),
    "cache_dir": ("s3://bucket/cache",),
    "job_token_file": ("nowhere", "mine.py", ".", "/dev/null", "/proc/self/mem"),
    "strategy": ("multiworker", "MIRRORED", "mirrored", "tpu", "", "multi_worker,mesh", "ps", "mesh ", "horovod"),
    "objective": (
        "mse",
        "classification ",
        "",
        "mine:nothing",
        "nowhere:objective",
        "mine",
        "regresion",
        "mine:data",
        "mine:np",
        ":",
    ),
    "model": (
        "resnet",
        "",
        "mine",
        "mine:nothing",
        "nowhere:model",
        "mine.py",
        "./mine.py:nothing",
        "nowhere.py:model",
        ":model",
        "mine:",
        "MLP",
        "keras.applications:ResNet51",
        "mine:np",
        "mine:Items",
        "..:model",
        "mine.model:model",
        "os:path",
        "builtins:len",
        "mine:data:model",
        "/:x",
        "mine:__doc__",
        "mine :model",
        "json:loads",
    ),
    "source": (
        "digit",
        "",
        "mine",
        "mine:nothing",
        "nowhere:data",
        "mine.py",
        "./mine.py:nothing",
        ":data",
        "mine:",
        "mine:np",
        "os:getcwd",
        "builtins:print",
        "tfds",
        "tfrecord",
        "json:loads",
        "mine:model",
    ),
    "augment": (
        "flipp",
        "",
        "mine:nothing",
        "nowhere:augment",
        "flip",
        "shift",
        "flip_crop",
        "random_resized_crop",
        "mine:data",
        "None",
        "mine:np",
        "builtins:len",
        "mine:objective",
    ),
}
# Flags whose values depend on the data, and not on the flag alone.
OF_THE_DATA = ("data_dir", "source", "augment", "model_args", "model")


def text(chance: random.Random) -> Mistake:
    flag = chance.choice(list(WRONG_TEXTS))
    value = chance.choice(WRONG_TEXTS[flag])
    arguments = [*TRAIN, f"--{flag}={value}"]
    if flag == "mesh":
        arguments.append("--strategy=mesh")
    if flag == "optimizer_args":
        arguments.append("--optimizer=adamw")
    if flag == "data_dir":
        arguments.append(f"--source={chance.choice(['text', 'tfrecord'])}")
        if arguments[-1].endswith("tfrecord"):
            arguments.append("--source_args=x=x:float32[6],y=y:int64,classes=3")
    maybe = (flag, value) in VALID
    codes = ANY if maybe else CONFIG | DATA if flag in OF_THE_DATA else CONFIG
    if flag == "strategy" and value == "horovod":
        codes = ANY
    return one(
        f"train: --{flag}",
        arguments,
        codes,
        f"--{flag}",
        "" if maybe else flag,
        *(["--model="] if flag == "model_args" else []),
    )


# Values of the above that are valid in some case.
VALID = {
    ("model_args", "widths=()"),
    ("optimizer_args", "foo="),
    ("mesh", "data=1"),
    ("scaling_baseline", "inf"),
    ("pipe_cut", ","),
    ("trackers", ","),
    ("mesh", "data=2,,model=1"),
    ("model_args", "widths=(8,)dropout=0.1"),
    ("optimizer_args", "beta_1=-0.5"),
    ("optimizer_args", "epsilon=-1"),
    ("optimizer_args", "weight_decay=x"),
    ("profile_ranks", "-1"),
    ("keep_best", "min: loss"),
    ("backup_dir", "run/checkpoints/../../mine.py/x"),
    ("strategy", "mesh "),
    ("optimizer_args", "beta_1=None"),
    ("mesh", "data = 1"),
}

CONTRADICTIONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--steps=5", "--epochs=2"), "--epochs"),
    (("--steps=0",), "--steps"),
    (("--micro_batch=3", "--accumulation=2"), "--global_batch"),
    (("--global_batch=0",), "--global_batch"),
    (("--global_batch=2", "--accumulation=3"), "--global_batch"),
    (("--jit_compile", "--jit_tune"), "--jit_tune"),
    (("--ema=1",), "--ema"),
    (("--label_smoothing=1.2",), "--label_smoothing"),
    (("--zero=2",), "--zero"),
    (("--strategy=mesh", "--zero=4"), "--zero"),
    (("--pipe_chunks=2",), "--pipe_chunks"),
    (("--offload=optimizer",), "--offload"),
    (("--all_reduce=hierarchical",), "--all_reduce"),
    (("--strategy=mesh", "--all_reduce=hierarchical", "--zero=1"), "--all_reduce"),
    (("--workers_per_host=2",), "--workers_per_host"),
    (("--sequence_parallel",), "--sequence_parallel"),
    (("--compression=int8", "--strategy=sockets"), "--compression"),
    (("--compression=bf16", "--strategy=one_device"), "--compression"),
    (("--virtual_devices=2", "--strategy=sockets"), "--virtual_devices"),
    (("--keep_best=min:loss", "--eval_every=-1"), "--keep_best"),
    (("--schedule=cosine", "--warmup_steps=5"), "--warmup_steps"),
    (("--schedule=wsd", "--decay_fraction=1.5"), "--decay_fraction"),
    (("--min_learning_rate_ratio=2",), "--min_learning_rate_ratio"),
    (("--ps_mode=sync", "--strategy=sockets"), "--ps_mode"),
    (("--max_staleness=3", "--strategy=mesh"), "--max_staleness"),
    (("--ps_mode=async", "--backup_workers=1"), "--backup_workers"),
    (("--ps_mode=sync", "--max_staleness=2"), "--max_staleness"),
    (("--strategy=parameter_server", "--precision=float16"), "--precision"),
    (("--strategy=parameter_server", "--on_nan=rollback"), "--on_nan"),
    (("--strategy=parameter_server", "--backup_dir=b"), "--backup_dir"),
    (("--strategy=parameter_server",), "parameter_server"),
    (("--strategy=mirrored",), "--virtual_devices"),
    (("--strategy=mesh", "--mesh=data=2"), "--mesh"),
    (("--strategy=mesh", "--mesh=pipe=1,data=1", "--pipe_cut=block_7"), "pipe"),
    (("--precision=float16", "--optimizer=adafactor", "--optimizer_args=beta_1=3"), "--optimizer_args"),
    (("--label_smoothing=0.1", "--objective=regression"), "--"),
    (("--communication=nccl", "--strategy=sockets"), "--communication"),
    (("--objective=regression",), "--"),
    (("--source=text", "--model=cnn"), "--model"),
    (("--source=text", "--data_dir=.", "--run_dir=run"), "--run_dir"),
    (("--source=text", "--data_dir=texts", "--backup_dir=texts/backup"), "--backup_dir"),
    (("--source=digits", "--model=transformer"), "--model"),
    (("--source=mine:data", "--model=cnn", "--model_args="), "--model"),
    (("--source=mine:data", "--model=resnet50", "--model_args="), "--model"),
    (("--source=mine:data", "--model=vit", "--model_args="), "--model"),
    (("--source=mine:data", "--augment=flip"), "--augment"),
    (("--source=mine:stream", "--steps=0", "--epochs=2"), "--epochs"),
    (("--compression=powersgd", "--strategy=multi_worker"), "--compression"),
    (("--strategy=mesh", "--offload=optimizer", "--precision=float16"), ""),
)
MAYBE_VALID = (
    "--objective=regression",
    "--label_smoothing=0.1",
    "--source=text",
    "--offload=optimizer",
    "--communication=nccl",
    "--strategy=parameter_server",
    "--precision=float16",
)


def contradiction(chance: random.Random) -> Mistake:
    flags, word = chance.choice(CONTRADICTIONS)
    maybe = flags[0] in MAYBE_VALID or flags[-1] in ("--offload=optimizer", "--precision=float16")
    return one("train: flags that contradict each other", [*TRAIN, *flags], ANY if maybe else CONFIG | DATA, word)


def odd_text(chance: random.Random) -> Mistake:
    """Texts that nobody types on purpose: none of them may reach a terminal as a control sequence."""
    flag = chance.choice([flag for flag in TEXTS if flag not in ("trackers",)])
    value = chance.choice(
        [
            "\x1b[31mred\x1b[0m",
            "a\nb",
            "ünï",
            "a b",
            "💥",
            "\u202ereversed",
            "%s%n{x}",
            "../..",
            "~",
            "$HOME",
            "a" * 5000,
            "'",
            '"',
            "\\",
            "*",
            " ",
            "\x07",
            "http://127.0.0.1:1/x",
            "\udcff",
            "gs://x/y",
        ]
    )
    return one("train: an odd text", [*TRAIN, f"--{flag}={value}"], ANY, "")


# Lines of a flag file -> (codes, a word of the sentence)
FLAG_FILES: tuple[tuple[str, frozenset[int], str], ...] = (
    ("steps=3\n", CONFIG, "line 1"),
    ("--steps=3\n--steps\n", CONFIG, "steps"),
    ("# nothing\n\n--stepss=3\n", CONFIG, "stepss"),
    ("--flagfile=my.flags\n", CONFIG, "my.flags"),
    ("--flagfile=nowhere.flags\n", CONFIG, "nowhere.flags"),
    ("--flagfile\n", CONFIG, "my.flags"),
    ("--steps=three # three\n", CONFIG, "--steps"),
    ('{"steps": 3}\n', CONFIG, "line 1"),
    ("steps: 3\n", CONFIG, "line 1"),
    ("--steps 3\n", CONFIG, "steps"),
    ("--steps=3\n--model=cnn --source=digits\n", CONFIG, "--model"),
    ("\ufeff--steps=3\n", ANY, ""),
    ("--steps=3\r\n--keep=0\r\n", CONFIG, "--keep"),
    ("\x00\x01", CONFIG, "my.flags"),
    ("--run_dir=\n", ANY, ""),
    ("--noshuffle=maybe\n", CONFIG, "shuffle"),
    ("-\n", CONFIG, "my.flags"),
    ("--\n", CONFIG, "my.flags"),
    ("--steps=3 --keep=0\n", CONFIG, "--steps"),
    ("--steps='3'\n", CONFIG, "--steps"),
    ("export A=3\n", CONFIG, "line 1"),
    ("--help\n", ANY, ""),
    ("--=3\n", CONFIG, ""),
    ("\udcff\udcfe\n", CONFIG, "my.flags"),
    ("--source_args=a=1\n  b=2\n", CONFIG, "my.flags"),
)


def flag_file(chance: random.Random) -> Mistake:
    how = chance.random()
    rest = [argument for argument in TRAIN if not argument.startswith("--steps")] if how < 0.6 else list(TRAIN)
    if how < 0.75:
        content, codes, word = chance.choice(FLAG_FILES)
        return one("train: a flag file", [*rest, "--flagfile=my.flags"], codes, word, files={"my.flags": content})
    path = chance.choice(["nowhere.flags", ".", "", "/proc/self/mem", "mine.py", "a" * 300, "my.flags/x"])
    return one(
        "train: a flag file",
        [*rest, chance.choice([f"--flagfile={path}", f"-flagfile={path}"])],
        CONFIG,
        "--flagfile",
        "mine.py",
        files={"my.flags": "--steps=3\n"},
    )
