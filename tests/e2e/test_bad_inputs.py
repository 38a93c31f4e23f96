"""What users get wrong, at the real command: one sentence, the documented exit code, no traceback."""

from __future__ import annotations

import json

import pytest

from tests.e2e.job import CLUSTERS, run, snapshot, train

pytestmark = pytest.mark.slow


def tf_config(**changes):
    return {
        "TF_CONFIG": json.dumps(
            {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 0}, **changes}
        )
    }


OUTPUTS = "--model_args=widths=(16,),num_outputs=4"  # for sources that do not tell the number of classes
LOOKUPS = ["--source=tests.e2e.sources:with_a_row_too_many", "--model=tests.e2e.sources:lookups", "--model_args="]
ROW_TOO_MANY = ["Sample 70 of tests.e2e.sources:with_a_row_too_many/train has 10 in x at [3]", "rows 0 to 9"]
# name -> (flags after CLUSTERS, environment, exit code, words of the message)
CASES = {
    "TF_CONFIG: bad JSON": ([], {"TF_CONFIG": "{cluster: worker}"}, 3, ["TF_CONFIG", "JSON"]),
    "TF_CONFIG: no task": ([], {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, 3, ["task"]),
    "TF_CONFIG: index out of range": (
        [],
        tf_config(task={"type": "worker", "index": 7}),
        3,
        ["task.index is 7", "0 to 1"],
    ),
    "TF_CONFIG: duplicate address": (
        [],
        tf_config(cluster={"worker": ["a:1", "a:1"]}),
        3,
        ["a:1", "cluster.worker[1]"],
    ),
    "TF_CONFIG: no port": ([], tf_config(cluster={"worker": ["a", "b:1"]}), 3, ["cluster.worker[0]", "port"]),
    "TF_CONFIG: two chiefs": ([], tf_config(cluster={"chief": ["a:1", "b:1"]}), 3, ["2 chiefs"]),
    "a peer that does not come": (
        ["--startup_timeout=1"],
        tf_config(cluster={"worker": ["127.0.0.1:29871", "127.0.0.1:29872"]}),
        5,
        ["worker 1 (rank 1, 127.0.0.1:29872)", "--startup_timeout"],
    ),
    "unknown flag": (["--batchsize=3"], {}, 2, ["--batchsize"]),
    "batch contradiction": (
        ["--micro_batch=7", "--accumulation=2"],
        {},
        2,
        ["--global_batch=24", "--micro_batch=7", "= 14"],
    ),
    "no length": (["--steps=0"], {}, 2, ["--steps", "--epochs"]),
    "unknown model": (["--model=resnet5000"], {}, 2, ["--model=resnet5000", "resnet50"]),
    "unknown model option": (["--model_args=width=3"], {}, 2, ["width", "widths"]),
    "unknown strategy": (["--strategy=multi"], {}, 2, ["--strategy=multi", "multi_worker"]),
    "unknown source": (["--source=digit"], {}, 2, ["--source=digit", "digits"]),
    "module without the function": (["--source=tests.e2e.sources:nothing"], {}, 2, ["nothing"]),
    "no data": (["--source=tests.e2e.sources:empty"], {}, 4, ["tests.e2e.sources:empty"]),
    "a label that is no class": (
        ["--source=tests.e2e.sources:with_label_below_zero"],
        {},
        4,
        ["Sample 70 of tests.e2e.sources:with_label_below_zero/train", "-1", "0 to 3"],
    ),
    "a row that a table does not have": (
        [*LOOKUPS, "--steps=25"],
        {},
        4,
        ["A row is looked up that does not exist", *ROW_TOO_MANY],
    ),
    "a row that a table does not have, with XLA, which does not say so": (
        [*LOOKUPS, "--steps=25", "--jit_compile", "--model_args=kind='frozen embedding'"],
        {},
        8,
        ["became NaN or infinite", *ROW_TOO_MANY],
    ),
    "the same in a table of whole numbers of the user's own": (
        [*LOOKUPS, "--steps=25", "--jit_compile", "--model_args=kind='whole numbers'"],
        {},
        8,
        ["became NaN or infinite"],
    ),
    "too few outputs": (["--model_args=widths=(16,),num_outputs=2"], {}, 2, ["--model=mlp has 2 outputs", "4 classes"]),
    "a function that is no objective": (
        ["--objective=tests.e2e.sources:clean"],
        {},
        2,
        ["--objective=tests.e2e.sources:clean takes (split", "(outputs, y, w)"],
    ),
    "a function that is no augmentation": (
        ["--augment=tests.e2e.sources:clean"],
        {},
        2,
        ["--augment=tests.e2e.sources:clean takes (split", "(x, y, seeds)"],
    ),
    "best by an unknown metric": (["--keep_best=max:acc"], {}, 2, ["--keep_best=max:acc", "loss, accuracy"]),
    "NaN in the data": (
        ["--source=tests.e2e.sources:with_nan", "--steps=50"],
        {},
        8,
        ["Sample 70 of tests.e2e.sources:with_nan/train has NaN in x at [0]"],
    ),
    "an evaluation without an end, before the first step": (
        ["--source=tests.e2e.sources:endless_evaluation", "--log_every=1"],
        {},
        4,
        ["tests.e2e.sources:endless_evaluation/eval", "endless stream: set --eval_samples"],
    ),
    "missing files": (["--source=text", "--data_dir=/nonexistent"], {}, 4, ["/nonexistent"]),
    "mirrored without GPUs": (["--strategy=mirrored"], {}, 2, ["--virtual_devices"]),
    "a run folder that cannot be made": (["--run_dir=/proc/run"], {}, 2, ["--run_dir=/proc/run"]),
    "nothing to resume": (["--resume=must"], {}, 9, ["--resume=must"]),
}


@pytest.mark.parametrize("name", CASES)
def test_one_sentence_and_its_code(name, tmp_path):
    flags, environment, code, words = CASES[name]
    result = train([*CLUSTERS, "--steps=5", f"--run_dir={tmp_path}", *flags], environment)
    told = [line for line in result.stderr.splitlines() if line.startswith("tfdist: error:")]
    assert result.returncode == code, result.stderr
    assert len(told) == 1 and all(word in told[0] for word in words), result.stderr
    assert "Traceback" not in result.stderr and f"(exit code {code}," in told[0]
    assert "before the first step" not in name or "step 1/" not in result.stdout + result.stderr


def test_an_endless_stream_that_is_not_evaluated_on(tmp_path):
    endless = [*CLUSTERS, "--source=tests.e2e.sources:endless_evaluation", OUTPUTS, "--steps=2"]
    for number, flags in enumerate([["--eval_every=-1"], ["--eval_samples=20"]]):
        assert train([*endless, f"--run_dir={tmp_path / str(number)}", *flags]).returncode == 0


@pytest.mark.parametrize(
    "workers, strategy, source",
    [
        (1, "auto", "LostEvaluation"),
        (2, "multi_worker", "LostEvaluation"),
        (2, "multi_worker", "LostEvaluationOfOne"),
        (2, "sockets", "LostEvaluationOfOne"),
    ],
)
def test_a_failing_evaluation_does_not_cost_the_steps_before(tmp_path, workers, strategy, source):
    """In the middle, with a snapshot due, and at the end; on all workers, and on one that must not leave the others."""
    step, flags = (20, []) if source.endswith("OfOne") else (10, ["--eval_every=10", "--save_every=10"])
    job = ["--steps=20", OUTPUTS, f"--source=tests.e2e.sources:{source}", f"--strategy={strategy}"]
    output = run(workers, [*CLUSTERS, *job, *flags, f"--run_dir={tmp_path}"], code=4)
    assert "item 64 of tests.e2e.sources:LostEvaluation" in output and "the disk is gone" in output
    assert snapshot(tmp_path, step)["train/step"] == step


def test_workers_with_different_data(tmp_path):
    output = run(
        2,
        [
            *CLUSTERS,
            "--steps=5",
            f"--run_dir={tmp_path / 'run'}",
            "--source=tests.e2e.sources:unseeded",
            "--strategy=sockets",
        ],
        code=4,
    )
    assert (
        "Rank 1 and rank 0 have different samples, or a different order, in tests.e2e.sources:unseeded/train" in output
        and "Traceback" not in output
    )
    assert "checkpoints  " in run(
        2,
        [
            *CLUSTERS,
            "--steps=5",
            f"--run_dir={tmp_path / 'run'}",
            "--source=tests.e2e.sources:seeded_by_the_run",
            "--strategy=sockets",
        ],
    )
