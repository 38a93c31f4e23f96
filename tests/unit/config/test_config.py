"""The configuration: checks, digest, batch arithmetic."""

import os
import re
import subprocess
import sys

import pytest

from tfdist import train
from tfdist.config import BatchConfig, Config, iter_options, parse_args
from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import BatchPlan, plan_batch

GOOD = Config().replace(steps=100, global_batch=64)


def test_option_names_are_unique_and_documented():
    names = [field.name for _, field in iter_options()]
    assert len(names) == len(set(names))
    assert all(field.metadata["help"].endswith((".", ")")) for _, field in iter_options())


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"steps": 0}, ["--steps", "--epochs"]),
        ({"epochs": 2.0}, ["--steps=100", "--epochs=2"]),
        ({"steps": -1}, ["--steps=-1", "at least 0"]),
        ({"learning_rate": float("nan")}, ["--learning_rate=nan"]),
        ({"precision": "float64"}, ["--precision=float64", "bfloat16"]),
        ({"warmup_steps": 100, "schedule": "cosine"}, ["--warmup_steps=100", "--steps"]),
        ({"virtual_devices": 2, "strategy": "multi_worker"}, ["--virtual_devices=2", "multi_worker"]),
        ({"keep_best": "accuracy"}, ["--keep_best=accuracy", "max:"]),
        ({"keep_best": "max:accuracy", "eval_every": -1}, ["--keep_best", "--eval_every=-1"]),
        ({"export": "onnx"}, ["--export=onnx"]),
        ({"cache_gb": float("nan")}, ["--cache_gb=nan is not a number"]),
        ({"source": "text", "data_dir": "a", "run_dir": "a/b"}, ["--run_dir=a/b", "--data_dir=a,", "outside"]),
        (
            {"source": "text", "data_dir": "s3://a/b", "backup_dir": "s3://a/b/c"},
            ["--backup_dir=s3://a/b/c", "outside"],
        ),
        (
            {"run_dir": "a", "backup_dir": "a/checkpoints"},
            ["--backup_dir=a/checkpoints", "--run_dir=a", "separate folder"],
        ),
        ({"model_args": "size:tiny"}, ["--model_args=size:tiny", "key=value"]),
        ({"run_dir": "a", "backup_dir": "./a/"}, ["--backup_dir=./a/", "--run_dir=a", "separate folder"]),
        ({"ema": 1.0}, ["--ema=1"]),
        ({"seed": 2**32}, ["--seed=4294967296", "at most 4294967295"]),
        ({"prometheus_port": 70000}, ["--prometheus_port=70000", "at most 65535"]),
        ({"inter_op_threads": 10**6}, ["--inter_op_threads=1000000", "at most 4096"]),
        ({"intra_op_threads": 4097}, ["--intra_op_threads=4097", "at most 4096"]),
        ({"steps": 0, "epochs": 1e300}, ["--epochs=1e+300", "at most 1000000000"]),
        ({"loss_scale_initial": 1e39}, ["--loss_scale_initial=1e+39", "at most 1.7"]),
        ({"clip_norm": 1e39}, ["--clip_norm=1e+39", "at most 1.7"]),
        ({"clip_norm": 1e-38}, ["--clip_norm=1e-38", "float32", "0 for no clipping"]),
        ({"run_dir": ""}, ["--run_dir=", "empty", "--run_dir=runs/first"]),
        ({"run_dir": "runs/a "}, ["--run_dir='runs/a '", "ends with a space"]),
        ({"run_dir": "runs\n/a"}, [r"--run_dir='runs\n/a'", "line break"]),
        ({"on_nan": "st\nop"}, [r"--on_nan='st\nop'", "line break"]),
        ({"backup_dir": "a\0b"}, [r"--backup_dir='a\x00b'", "byte of value 0"]),
        ({"heartbeat_timeout": 1e30}, ["--heartbeat_timeout=1e+30", "at most 100000000"]),
        ({"save_minutes": 1e30}, ["--save_minutes=1e+30", "at most 1666666.6"]),
        ({"jit_compile": True, "jit_tune": True}, ["--jit_compile", "--jit_tune", "give one"]),
        ({"backup_workers": 1}, ["--backup_workers=1", "--ps_mode=sync"]),
        ({"ps_mode": "sync", "max_staleness": 3}, ["--max_staleness", "--ps_mode=async"]),
        ({"strategy": "mirrored", "ps_mode": "sync"}, ["--ps_mode=sync", "mirrored"]),
        ({"strategy": "parameter_server", "precision": "float16"}, ["--precision=float16", "bfloat16"]),
        ({"strategy": "parameter_server", "jit_compile": True}, ["--jit_compile", "drop it"]),
        ({"strategy": "parameter_server", "on_nan": "rollback"}, ["--on_nan=rollback", "skip"]),
        ({"strategy": "parameter_server", "histograms_every": 100}, ["--histograms_every=100", "--ps_mode=sync"]),
        (
            {"strategy": "mesh", "mesh": "model=1, pipe = 2", "histograms_every": 9},
            ["--histograms_every=9", "--mesh=pipe=2"],
        ),
        ({"strategy": "mesh", "zero": 3, "histograms_every": 9}, ["--histograms_every=9", "--zero=3"]),
        ({"strategy": "parameter_server", "deterministic": True}, ["--deterministic", "--ps_mode=sync"]),
        ({"strategy": "parameter_server", "optimizer": "adafactor"}, ["--optimizer=adafactor"]),
    ],
)
def test_contradictions_name_the_flag_and_the_value(changes, words):
    with pytest.raises(ConfigError) as error:
        GOOD.replace(**changes).validate()
    assert all(word in str(error.value) for word in words), error.value


def test_a_run_stays_where_it_is_when_the_working_directory_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config().replace(run_dir="runs/a", backup_dir="backup").with_absolute_folders()
    assert (config.run.run_dir, config.checkpoint.backup_dir) == (f"{tmp_path}/runs/a", f"{tmp_path}/backup")
    elsewhere = Config().replace(run_dir="s3://bucket/a", backup_dir="")
    assert elsewhere.with_absolute_folders() == elsewhere


def test_a_working_folder_whose_name_is_no_text_here_is_told(monkeypatch):
    monkeypatch.setattr(os, "getcwd", lambda: "/x/\udcc3\udcbc")  # as where the locale is C and Python's UTF-8 mode off
    with pytest.raises(ConfigError, match=r"--run_dir=/x/.*runs/a' is not text in UTF-8: .*LC_ALL=C.UTF-8"):
        Config().replace(run_dir="runs/a").with_absolute_folders()
    assert Config().replace(run_dir="/y/ü").with_absolute_folders().run.run_dir == "/y/ü"


@pytest.mark.parametrize(
    ("changes", "sentence", "other"),
    [
        ({"pipe_schedule": "gpipe"}, "--pipe_schedule=gpipe has no effect", {"strategy": "mesh", "mesh": "pipe=2"}),
        ({"max_rollbacks": 5}, "--max_rollbacks=5 has no effect without --on_nan=rollback", {"on_nan": "rollback"}),
        ({"backup_every": 50}, "--backup_every=50 has no effect without --backup_dir=FOLDER", {"backup_dir": "b"}),
        ({"double_backup": True}, "--double_backup=True has no effect without --backup_dir", {"backup_dir": "b"}),
        ({"delete_backup": False}, "--delete_backup=False has no effect without --backup_dir", {"backup_dir": "b"}),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused_where_a_training_starts(changes, sentence, other):
    flags = [f"--{name}={value}" for name, value in changes.items()]
    with pytest.raises(ConfigError, match=f"^{sentence}.*: add that, or drop it.$"):
        train.main(["--steps=1", "--global_batch=8", "--dry_run", *flags])
    GOOD.replace(**changes).validate()  # as the run of an earlier version, which is evaluated
    GOOD.replace(**{**changes, **other}).check_used()


def test_every_number_of_seconds_has_a_limit():
    """Beyond some of them TensorFlow, or the kernel, counts no further: it ended in a traceback."""
    times = [field for _, field in iter_options() if re.match("Seconds|Minutes|The same for", field.metadata["help"])]
    assert len(times) == 10 and all(field.metadata["most"] for field in times)
    assert not [field.name for _, field in iter_options() if field.name.endswith("timeout") and field not in times]


def test_the_largest_values_are_taken():
    GOOD.replace(seed=2**32 - 1, prometheus_port=65535, clip_norm=2.0**-126, intra_op_threads=4096).validate()


def test_unknown_option_is_refused():
    with pytest.raises(ConfigError, match="--nonsense"):
        Config.from_flat({"nonsense": 1})


def test_digest_counts_what_changes_numbers_and_nothing_else():
    same = {
        "run_dir": "elsewhere",
        "strategy": "mirrored",
        "accumulation": 4,
        "micro_batch": 8,
        "log_every": 1,
        "save_every": 5,
        "steps": 200,
    }
    other = {
        "seed": 1,
        "global_batch": 32,
        "learning_rate": 0.1,
        "model": "mlp",
        "precision": "bfloat16",
        "clip_norm": 1.0,
        "shuffle": False,
    }
    for name, value in same.items():
        assert GOOD.replace(**{name: value}).digest() == GOOD.digest(), name
    for name, value in other.items():
        assert GOOD.replace(**{name: value}).digest() != GOOD.digest(), name
    # A decay ends with the run, so there the length counts, unless the decay's end is given.
    cosine = GOOD.replace(schedule="cosine")
    assert cosine.replace(steps=200).digest() != cosine.digest()
    assert cosine.replace(steps=200, decay_steps=100).digest() == cosine.digest()


def test_digest_is_the_same_in_every_process():
    code = "from tfdist.config import Config; print(Config().replace(steps=100, global_batch=64).digest())"
    for seed in ("0", "1", "random"):
        output = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert output.stdout.strip() == GOOD.digest()


@pytest.mark.parametrize(
    "given, replicas, expected",
    [
        ((64, 0, 0), 2, (64, 32, 1)),
        ((64, 8, 0), 2, (64, 8, 4)),
        ((64, 0, 4), 2, (64, 8, 4)),
        ((0, 8, 4), 3, (96, 8, 4)),
        ((0, 8, 0), 1, (8, 8, 1)),
        ((64, 8, 4), 2, (64, 8, 4)),
        ((25, 0, 0), 3, (25, 9, 1)),
        ((60, 8, 0), 2, (60, 8, 4)),
        ((24, 8, 0), 2, (24, 6, 2)),  # three workers took 8 each; two take at most 8, twice
    ],
)
def test_batch_arithmetic(given, replicas, expected):
    plan = plan_batch(BatchConfig(*given), replicas)
    assert (plan.global_batch, plan.micro_batch, plan.accumulation) == expected


@pytest.mark.parametrize(
    "given, replicas, words",
    [
        ((0, 0, 0), 1, ["--global_batch", "--micro_batch"]),
        ((0, 0, 4), 1, ["--global_batch"]),
        ((64, 8, 2), 2, ["--global_batch=64", "--micro_batch=8", "--accumulation=2", "= 32"]),
        ((4, 0, 0), 5, ["--global_batch=4", "at least 5"]),
    ],
)
def test_batch_contradictions(given, replicas, words):
    with pytest.raises(ConfigError) as error:
        plan_batch(BatchConfig(*given), replicas)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("batch, accumulation, replicas", [(64, 1, 1), (64, 4, 3), (25, 2, 5), (7, 1, 7), (1000, 3, 7)])
def test_slices_cover_the_global_batch_once(batch, accumulation, replicas):
    plan = BatchPlan(batch, accumulation, replicas)
    slices = [plan.slice(micro, replica) for micro in range(accumulation) for replica in range(replicas)]
    assert [position for start, stop in slices for position in range(start, stop)] == list(range(batch))
    assert max(stop - start for start, stop in slices) <= plan.micro_batch
    assert plan.even == (len({stop - start for start, stop in slices}) == 1)


def test_parse_args():
    assert parse_args("x", "size=tiny, dropout=0.1,shape=(2,3),name='a,b',flag=True") == {
        "size": "tiny",
        "dropout": 0.1,
        "shape": (2, 3),
        "name": "a,b",
        "flag": True,
    }
    assert parse_args("x", "") == {}
    assert parse_args("x", "name='false',mode=true") == {"name": "false", "mode": "true"}
