"""python -m tfdist.plan: layouts, the search, hardware descriptions, text, JSON, picture."""

import json
import subprocess
import sys

import pytest

from tfdist import flags
from tfdist.control.exit_codes import ConfigError
from tfdist.plan import main, model_shape
from tfdist.planner.estimate import Plan, communication_table, estimate, scaling
from tfdist.planner.hardware import DEVICES, load_hardware
from tfdist.planner.layout import Layout
from tfdist.planner.memory import memory
from tfdist.planner.plan_text import gigabytes
from tfdist.planner.search import Wish, layouts, parse_mesh, search
from tfdist.planner.time import DAY
from tfdist.runtime.mesh import Mesh

SMALL = [
    "--source=text",
    "--sequence_length=1024",
    "--model=transformer",
    "--model_args=size=gpt2,vocabulary=50257",
    "--global_batch=64",
    "--precision=bfloat16",
]
LARGE = [
    "--source=text",
    "--sequence_length=2048",
    "--model=transformer",
    "--model_args=layers=32,width=4096,heads=32,vocabulary=32000",
    "--global_batch=512",
    "--precision=bfloat16",
]


def plan(train, devices, hardware="h100", **changes):
    config = flags.parse([*train, "--steps=1000"]).config
    return Plan(
        config, model_shape(config, train, input_shape="", outputs=0), load_hardware(hardware), devices, **changes
    )


def test_a_model_that_takes_too_long_to_count_is_named(monkeypatch):
    monkeypatch.setattr("tfdist.plan._COUNTING_SECONDS", 0.01)
    train = ["--source=digits", "--model=somebody.elses:model", "--global_batch=64", "--steps=1"]
    with pytest.raises(ConfigError, match="--model=somebody.elses:model was not counted within 0.01 s"):
        model_shape(flags.parse(train).config, train, input_shape="", outputs=0)


@pytest.mark.parametrize(
    ("train", "given", "source", "tokens"),
    [
        (["--source=text", "--sequence_length=64"], ("", 0), "task=text,vocab=256 --sequence_length=64", 64),
        (
            ["--source=synthetic", "--source_args=task=text,vocab=99", "--sequence_length=8"],
            ("", 0),
            "task=text,vocab=99 --sequence_length=8",
            8,
        ),
        (["--source=tfrecord", "--objective=next_token"], ("32", 50), "task=text,vocab=50 --sequence_length=32", 32),
        (["--source=digits"], ("", 0), "task=image,shape=(8,8,1,),classes=10", 1),
        (["--source=tfrecord"], ("32", 50), "task=image,shape=(32,),classes=50", 1),
        (["--source=mine:data"], ("", 0), "", 16),
    ],
)
def test_samples_with_which_a_model_of_ones_own_is_counted(monkeypatch, train, given, source, tokens):
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, json.dumps({"name": "mine", "tokens": 16, "parts": []}), "")

    monkeypatch.setattr(subprocess, "run", run)
    train = [*train, "--model=mine:lm", "--global_batch=8", "--steps=1"]
    shape = model_shape(flags.parse(train).config, train, *given)
    assert shape.tokens == tokens
    added = commands[0][3 + len(train) :]
    assert added == (["--source=synthetic", *f"--source_args={source}".split()] if source else [])


def test_a_model_of_seven_billion_needs_zero_on_eight_devices():
    found = search(plan(LARGE, 8))
    best = [each.estimate for each in found]
    assert best[0].layout.zero > 0 and "without ZeRO it would need" in found[0].reason
    assert [found.fits(DEVICES["h100"]) for found in best] == [True] * len(best) and 1 < len(best) <= 3
    assert len({found.layout.mesh for found in best}) == len(best)


def test_a_small_model_is_best_with_data_parallelism_alone():
    best = search(plan(SMALL, 8))[0]
    layout = best.estimate.layout
    assert layout.mesh.describe() == "data=8" and not layout.recompute and "the fastest that fits" in best.reason


def test_what_does_not_fit_says_why():
    (only,) = search(plan(LARGE, 1, "t4,reserved_gb=0"))
    reason = only.reason
    assert f"needs {gigabytes(only.estimate.memory.peak)} on a device of 16 GB" in reason
    assert "does not fit, because" in reason and "optimizer state" in reason and "more devices" in reason
    assert only.estimate.layout.recompute  # it has tried
    (only,) = search(plan([*SMALL, "--micro_batch=64"], 1, "t4"), Wish(recompute=False))
    assert "activations" in only.reason and "--micro_batch" in only.reason


def test_of_another_model_it_is_not_known_what_model_divides():
    of_cnn = plan(["--source=digits", "--model=cnn", "--global_batch=64"], 2)
    with pytest.raises(ConfigError, match="what model=2 would divide in cnn is known only for tfdist's transformers"):
        search(of_cnn, Wish(mesh=Mesh.create(model=2)))
    with pytest.raises(ConfigError, match="model=5 must divide the [0-9]+ attention heads of"):
        search(plan(SMALL, 5), Wish(mesh=Mesh.create(model=5)))


def test_memory_of_layouts():
    shape, config = plan(LARGE, 8).model, plan(LARGE, 8).config
    alone = memory(shape, config, Layout())
    sharded = [memory(shape, config, Layout(data=8, zero=zero)) for zero in range(4)]
    assert (
        sharded[0].parameters == alone.parameters == 4 * shape.parameters
        and alone.optimizer == 2 * alone.parameters == 8 * sharded[1].optimizer
    )
    assert (sharded[2].gradients, sharded[3].parameters) == (alone.gradients / 8, alone.parameters / 8)
    assert sharded[3].peak < sharded[2].peak <= sharded[1].peak < sharded[0].peak
    assert memory(shape, config, Layout(recompute=True)).activations < alone.activations / 10
    halves = memory(shape, config, Layout(model=2))
    assert alone.parameters / 2 < halves.parameters < alone.parameters * 0.52
    stages = memory(shape, config, Layout(pipe=4, micro_batches=8))
    assert stages.parameters < alone.parameters / 3
    first, last = (
        sum(part.repeat * part.saved for part in shape.stages(4)[at]) * held for at, held in ((0, 4), (-1, 1))
    )
    assert first > last and stages.stage == 0 and stages.activations == pytest.approx(first)


def test_stages_have_all_parts_in_order_and_about_the_same_work():
    shape = plan(LARGE, 8).model
    for pipe in (1, 2, 3, 5, 8, 32):
        stages = shape.stages(pipe)
        assert [part.name for parts in stages for part in parts for _ in range(part.repeat)] == [
            "embed",
            *["block"] * 32,
            "head",
        ]
        assert all(any(part.block for part in parts) for parts in stages)
        if pipe in (2, 8):
            work = [sum(part.repeat * part.flops for part in parts) for parts in stages]
            assert max(work) < 1.3 * sum(work) / pipe


def test_scaling_gets_worse_and_faster():
    slow = scaling(plan(SMALL, 8, "a100,network=ethernet-10,cards=1"), Layout(micro_batch=2))
    assert slow[3]["efficiency"] > 0.8 and slow[4]["efficiency"] < 0.3  # from the second node on
    rows = scaling(plan(SMALL, 8), Layout(micro_batch=2))
    assert [row["devices"] for row in rows] == [2**power for power in range(11)]
    assert rows[0]["efficiency"] == 1 and rows[-1]["efficiency"] < 1
    assert all(a["samples_per_s"] < b["samples_per_s"] for a, b in zip(rows, rows[1:], strict=False))


def test_replicas_of_a_stage_share_a_node_and_stages_do_not():
    """As in the runtime, whose `pipe` is the outermost axis."""
    asked = plan(SMALL, 16, "h100,per_node=8,link_us=0,network_us=0")
    layout = Layout(pipe=2, data=8, micro_batches=4)
    inside, everywhere = communication_table(asked, layout).items()
    assert inside == ("in one node, over 8", everywhere[1]) and everywhere[0] == "over all 8 replicas"
    sent = max(part.output for part in asked.model.parts if part.block)
    one = sent / (asked.hardware.node_gbs * 1e9 / 8)  # eight stages share the network of a node
    assert estimate(asked, layout).step.tensor == pytest.approx(2 * one * (4 + 2 - 1))


def test_a_batch_that_does_not_divide_counts_as_it_is():
    """Replicas that have a sample less wait for the others."""
    even, uneven = (
        estimate(plan([*SMALL, f"--global_batch={batch}"], 16), Layout(data=16, micro_batch=7)) for batch in (112, 100)
    )
    assert uneven.step.total == even.step.total
    assert uneven.samples_per_s == pytest.approx(even.samples_per_s * 100 / 112)
    assert uneven.mfu == pytest.approx(even.mfu * 100 / 112)


def test_a_step_is_its_parts():
    found = estimate(plan(LARGE, 16), Layout(data=2, pipe=2, model=4, micro_batch=1, micro_batches=4))
    step = found.step
    assert step.total == pytest.approx(
        step.compute + step.bubble + step.tensor + step.exposed + step.update + step.fixed
    )
    assert step.bubble / (step.compute + step.bubble) == pytest.approx(1 / 5)
    assert 0 < found.mfu < DEVICES["h100"].efficiency and found.samples_per_s == 8 / step.total


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hardware=h1000"], ["h1000", "b200"]),
        (["--hardware=h100,speed=3"], ["speed", "per_node"]),
        (["--hardware=h100,per_node=0"], ["per_node", "above 0"]),
        (["--hardware=name=mine"], ["memory_gb", "h100,"]),
        (["--hardware=h100,network=isdn"], ["isdn", "ib-ndr"]),
        (["--hardware=no/file.json"], ["no/file.json"]),
        (["--mesh=data=3"], ["--devices=8: --mesh=data=3 needs 3 workers", "there are 8", "--mesh=data=8"]),
        (["--mesh=model=8"], ["12", "heads"]),
        (["--mesh=pipe=8,pipe=1"], ["pipe=8,pipe=1", "pipe twice"]),
        (["--mesh=expert=8"], ["no experts"]),
        (["--devices=16", "--mesh=pipe=16"], ["12 blocks"]),
        (["--mesh=row=8"], ["row=8"]),
        (["--devices=0"], ["--devices=0"]),
        (["--devices=eight"], ["eight", "--help"]),
        (["--input_shape=a"], ["--input_shape=a"]),
        (["--calibrate=no/run"], ["no/run"]),
        (["--devices=1024", "--mesh=data=1024"], ["--global_batch=64"]),
        (["--steps=3"], ["--steps", "before `--`"]),
        (["--hardware=v100"], ["bfloat16", "float16"]),
        (["--hardware=h100,bfloat16=false"], ["--hardware=", "bfloat16='false' must be True or False"]),
        (["--hardware=h100,bfloat16=maybe"], ["--hardware=", "bfloat16='maybe' must be True or False"]),
        (["--plot=no/folder.png"], ["--plot=no/folder.png"]),
        (["--json=no/file"], ["--json=no/file"]),
    ],
)
def test_mistakes_are_named(arguments, words):
    with pytest.raises(ConfigError) as error:
        main([*arguments, "--", *SMALL])
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value), error.value


def test_tokens_are_those_of_sequences(capsys):
    """Else a number of tokens would be taken for one of samples."""
    train = ["--source=digits", "--model=cnn", "--global_batch=64"]
    with pytest.raises(
        ConfigError, match=r"--tokens=1e\+12, but the samples of --source=digits are no .*give --samples"
    ):
        main(["--tokens=1e12", "--", *train])
    for of_run, samples in ((["--epochs=2"], 12800), ([], 6400), (["--steps=1000"], 64000)):
        assert main(["--samples=6400", "--json=-", "--", *train, *of_run]) == 0
        assert json.loads(capsys.readouterr().out)["samples"] == samples


def test_options_of_the_model_are_checked():
    for own in ("size=huge", "depth=3"):
        with pytest.raises(ConfigError, match="model_args"):
            main(["--", *SMALL, f"--model_args={own}"])


def test_hardware_of_the_user(tmp_path):
    (tmp_path / "mine.json").write_text(
        json.dumps({"base": "a100", "name": "mine", "per_node": 4, "network": "ethernet-100"})
    )
    found = load_hardware(str(tmp_path / "mine.json"))
    assert (found.name, found.per_node, found.memory_gb, found.network_gbs) == ("mine", 4, 80, 12.5)
    assert load_hardware("name=own,memory_gb=10,half_tflops=1,float32_tflops=1,memory_gbs=1,link_gbs=1").name == "own"
    assert parse_mesh("auto", 8) is None and parse_mesh("data=4,model=2", 8) == Mesh.create(data=4, model=2)


def test_data_takes_what_a_mesh_leaves_as_in_train():
    wished = parse_mesh("model=2", 8)
    assert wished == Mesh.create(data=4, model=2)
    assert {layout.mesh for layout in layouts(plan(SMALL, 8), Wish(mesh=wished))} == {wished}


def test_days_without_a_global_batch():
    """Which then follows from the layout: the steps take as long as they take."""
    train = [*SMALL, "--global_batch=0", "--micro_batch=2", "--steps=1000"]
    found = estimate(plan(train, 8, steps=1000), Layout(data=8, micro_batch=2))
    assert found.days * DAY * found.reliability.availability == pytest.approx(1000 * found.step.total)


@pytest.mark.parametrize("batch", [["--global_batch=64"], ["--global_batch=0", "--micro_batch=2"]])
def test_the_command_tells_days_for_all_steps(batch, capsys):
    assert main(["--mesh=data=8", "--json=-", "--", *SMALL, *batch, "--steps=1000"]) == 0
    told = json.loads(capsys.readouterr().out)
    best = told["plans"][0]
    assert told["samples"] == 1000 * best["layout"]["global_batch"]
    assert best["days"] * DAY * best["reliability"]["availability"] == pytest.approx(1000 * best["step_s"]["total"])


def test_the_command_answers_at_once_without_tensorflow(tmp_path):
    code = (
        "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = sys.modules['numpy'] = None; from tfdist.plan"
        " import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "--devices=64",
        f"--json={tmp_path / 'plan.json'}",
        "--tokens=1e12",
        "--",
        *SMALL,
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for words in (
        "124,439,808 parameters",
        "ZeRO-3",
        "optimizer state",
        "with recompute",
        "MFU",
        "days",
        "scaling",
        "Daly",
        "halving-doubling",
    ):
        assert words in output, output
    values = json.loads((tmp_path / "plan.json").read_text())
    assert (
        values["model"]["parameters"] == 124_439_808 and values["plans"][0]["fits"] and len(values["zero_bytes"]) == 4
    )
    assert values["plans"][0]["days"] > 0 and values["scaling"][0]["efficiency"] == 1


def test_json_alone_and_exit_codes(capsys, tmp_path):
    assert main(["--json=-", f"--plot={tmp_path / 'plan.png'}", "--", *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == 8
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert main(["--hardware=t4", "--devices=1", "--", *LARGE, "--precision=float16"]) == 2
