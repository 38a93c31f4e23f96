"""The formulas against the models' own graphs, optimizer slots against Keras, and models without a formula."""

import json
import subprocess
import sys

import pytest

from tests.e2e.job import ENVIRONMENT
from tests.marks import slow_but
from tfdist import flags
from tfdist.config.optimizers import OPTIMIZERS
from tfdist.planner import formulas, shapes
from tfdist.planner.memory import slot_elements

keras = pytest.importorskip("keras")

IMAGE = ["--source=synthetic", "--source_args=shape=(32,32,3),classes=10"]
TEXT = ["--source=synthetic", "--source_args=task=text,vocab=300", "--sequence_length=48", "--model=transformer"]
MODELS = {
    "mlp": [*IMAGE, "--model=mlp", "--model_args=widths=(64,32),dropout=0.1"],
    "cnn": [*IMAGE, "--model=cnn"],
    "cnn on digits": ["--source=digits", "--model=cnn", "--model_args=norm=none,dropout=0.1"],
    "resnet50": [*IMAGE, "--model=resnet50"],
    "transformer": [*TEXT, "--model_args=layers=2,width=96,heads=3"],
    "transformer, dropout": [*TEXT, "--model_args=layers=1,width=96,heads=3,dropout=0.1,tied=False"],
    "transformer, bfloat16": [*TEXT, "--model_args=layers=1,width=96,heads=3", "--precision=bfloat16"],
    "transformer, bfloat16, dropout": [
        *TEXT,
        "--model_args=layers=1,width=96,heads=3,dropout=0.1",
        "--precision=bfloat16",
    ],
    "vit": [*IMAGE, "--model=vit", "--model_args=layers=2,pool=class"],
    "vit, bfloat16": [*IMAGE, "--model=vit", "--model_args=layers=1", "--precision=bfloat16"],
}


@pytest.fixture
def counted():
    """The model of a command line, counted from its graph; in this process, as starting TensorFlow takes seconds."""
    from tfdist.data.sources.load_split import load_split
    from tfdist.models.build_model import build_model
    from tfdist.training import model_cost
    from tfdist.training.objectives import make_objective
    from tfdist.training.precision import set_policy

    def make(arguments):
        config = flags.parse(arguments).config.replace(sync_batchnorm=False)
        split = load_split(config.data, "train")
        set_policy(config.precision)
        model = build_model(config.model, split.element_spec[0], split.num_classes)
        return shapes.from_json(
            model_cost.count(model, make_objective(config.model, split.element_spec[1]), split.element_spec)
        )

    yield make
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(
    ("path", "experts"),
    [("block_00_experts_up/kernel", {8}), ("mine/block_11_experts_down/bias", {8}), ("expert_0/kernel", set())],
)
def test_only_experts_that_training_spreads_are_experts(path, experts):
    part = {"name": "all", "weights": [(path, (8, 4))], "saved": [4.0]}
    part |= dict.fromkeys(("constants", "flops", "fixed", "output"), 0.0) | {"is_counted": True}
    assert shapes.from_json({"name": "mine", "tokens": 1, "parts": [part]}).experts == experts


@pytest.mark.parametrize("name", slow_but(MODELS, "mlp"))
def test_formula_and_graph_agree(name, counted):
    config = flags.parse(MODELS[name]).config
    by_formula, by_graph = formulas.shape_of(config, shapes.sample_of(config)), counted(MODELS[name])
    assert (by_formula.parameters, by_formula.tokens) == (by_graph.parameters, by_graph.tokens)
    assert by_formula.flops == pytest.approx(by_graph.flops, rel=1e-6)
    saved = [sum(part.saved * part.repeat for part in shape.parts) for shape in (by_formula, by_graph)]
    assert saved[0] == pytest.approx(saved[1], rel=0.06), saved
    constants = [sum(part.constants * part.repeat for part in shape.parts) for shape in (by_formula, by_graph)]
    assert abs(constants[0] - constants[1]) <= 40  # the states of dropout are left out
    fixed = [sum(part.fixed * part.repeat for part in shape.parts) for shape in (by_formula, by_graph)]
    assert fixed[0] == pytest.approx(fixed[1], rel=0.15, abs=60_000), fixed


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("more", [[], ["--ema=0.9"]])
def test_optimizer_state_is_that_of_keras(optimizer, more):
    from tfdist.training.optimizer import make_optimizer

    config = flags.parse([f"--optimizer={optimizer}", *more]).config
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            keras.layers.Embedding(11, 6),
            keras.layers.Conv1D(5, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(9),
        ]
    )
    built = make_optimizer(config.optimizer, keras.optimizers.schedules.ExponentialDecay(0.1, 1, 1))
    built.build(model.trainable_variables)
    elements = sum(int(keras.ops.size(variable)) for variable in built.variables) - 1  # the step counter
    assert elements == sum(
        slot_elements(config.optimizer, shapes.Weight(variable.path, tuple(variable.shape)))
        for variable in model.trainable_variables
    )


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_any_model_is_counted_without_its_memory(tmp_path):
    """4.3 billion parameters, 17 GB, under a limit of 6 GB of address space beyond TensorFlow's own."""
    code = """
import resource, sys
import tensorflow
pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + 6 * 2**30,) * 2)
from tfdist.training.model_cost import main
main(sys.argv[1:])
"""
    arguments = [
        "--source=synthetic",
        "--source_args=shape=(4096,),classes=10",
        "--model=tests.unit.planner.test_formulas:wide",
        "--model_args=width=65536",
    ]
    script = tmp_path / "script.py"
    script.write_text(code)
    output = subprocess.run([sys.executable, str(script), *arguments], env=ENVIRONMENT, capture_output=True, text=True)
    assert output.returncode == 0, output.stderr[-2000:]
    assert (
        shapes.from_json(json.loads(output.stdout.splitlines()[-1])).parameters
        == 4096 * 65536 + 65536 + 65536**2 + 65536 + 65536 * 10 + 10
    )


def wide(input_shape, num_outputs, width):
    inputs = keras.Input(input_shape)
    return keras.Model(
        inputs, keras.layers.Dense(num_outputs)(keras.layers.Dense(width)(keras.layers.Dense(width)(inputs)))
    )
