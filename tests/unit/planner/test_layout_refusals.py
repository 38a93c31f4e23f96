"""What training would refuse is not proposed, and a wish for it ends with a sentence."""

import dataclasses
import itertools

import pytest

from tfdist import flags
from tfdist.config.optimizers import ELEMENTWISE_OPTIMIZERS
from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import plan_batch
from tfdist.plan import model_shape
from tfdist.planner import layout_refusals, mesh_rules
from tfdist.planner.estimate import Plan
from tfdist.planner.hardware import load_hardware
from tfdist.planner.layout import Layout
from tfdist.planner.memory import memory
from tfdist.planner.search import Wish, layouts, search
from tfdist.planner.shapes import Weight
from tfdist.planner.time import gradient_bytes
from tfdist.runtime.mesh import Mesh

TEXT = ["--source=text", "--model=transformer", "--model_args=layers=4,heads=4,width=64", "--global_batch=64"]
IMAGES = ["--source=synthetic", "--model=resnet50", "--global_batch=64"]


def plan(train, devices=8):
    config = flags.parse([*train, "--steps=10"]).config
    shape = model_shape(config, train, input_shape="", outputs=0)
    return Plan(config, shape, load_hardware("h100"), devices)


def with_experts(asked, experts):
    """The same model, whose blocks have so many experts each."""
    blocks = [
        dataclasses.replace(part, weights=(*part.weights, Weight("experts_up/kernel", (experts, 64, 64), "expert")))
        if part.block
        else part
        for part in asked.model.parts
    ]
    return dataclasses.replace(asked, model=dataclasses.replace(asked.model, parts=tuple(blocks)))


def test_experts_have_copies_along_data_only():
    asked = with_experts(plan([*TEXT, "--optimizer=adam"]), 4)
    experts = sum(part.elements.get("expert", 0) * part.repeat for part in asked.model.parts)
    others = asked.model.parameters - experts
    layout = Layout(data=2, expert=4, zero=3)
    held = memory(asked.model, asked.config, layout)
    assert held.parameters == pytest.approx(4 * (others / 8 + experts / 4 / 2))
    assert held.optimizer == pytest.approx(2 * held.parameters)
    sent = gradient_bytes(asked.model.stages(1), layout)
    assert sent == {("data", "expert"): 4 * others, ("data",): experts}


@pytest.mark.parametrize("optimizer", ["lamb", "adafactor", "muon"])
def test_an_optimizer_that_needs_whole_variables(optimizer):
    asked = plan([*TEXT, f"--optimizer={optimizer}"])
    found = list(layouts(asked, Wish()))
    assert {layout.zero for layout in found} == {0} and {layout.model for layout in found} == {1}
    assert {layout.pipe for layout in found} == ({1} if optimizer == "adafactor" else {1, 2, 4})
    with pytest.raises(ConfigError, match=f"--zero=1 with --optimizer={optimizer}: .*use sgd, .* or lion, or --zero=0"):
        search(asked, Wish(zero=1))
    with pytest.raises(ConfigError, match=f"--mesh=data=4,model=2 with --optimizer={optimizer}: .*, or data= only"):
        search(asked, Wish(mesh=Mesh.create(data=4, model=2)))


def test_adafactor_and_a_pipeline():
    with pytest.raises(ConfigError, match="pipe=2.*--optimizer=adafactor.*use another optimizer"):
        search(plan([*TEXT, "--optimizer=adafactor"]), Wish(mesh=Mesh.create(data=4, pipe=2)))


def test_elementwise_optimizers_are_spread():
    for optimizer in ELEMENTWISE_OPTIMIZERS:
        found = list(layouts(plan([*TEXT, f"--optimizer={optimizer}"]), Wish()))
        assert {layout.zero for layout in found} == {0, 1, 2, 3} and {layout.model for layout in found} == {1, 2, 4}


def test_experts_and_a_pipeline():
    asked = with_experts(plan(TEXT), 4)
    found = list(layouts(asked, Wish()))
    assert {layout.pipe for layout in found} == {1} and {layout.expert for layout in found} == {1, 2, 4}
    for mesh in (Mesh.create(data=4, pipe=2), Mesh.create(data=2, pipe=2, expert=2)):
        with pytest.raises(ConfigError, match="pipe=2, but transformer has experts.*use data="):
            search(asked, Wish(mesh=mesh))
    with pytest.raises(ConfigError, match="expert=8 must divide the 4 experts of a layer of"):
        search(asked, Wish(mesh=Mesh.create(expert=8)))


def test_a_resnet_has_no_blocks_that_training_can_cut():
    found = list(layouts(plan(IMAGES), Wish()))
    assert {layout.pipe for layout in found} == {1} and not any(layout.recompute for layout in found)
    with pytest.raises(ConfigError, match="pipe=2 is more than the 0 blocks"):
        search(plan(IMAGES), Wish(mesh=Mesh.create(data=4, pipe=2)))
    with pytest.raises(ConfigError, match="--recompute=blocks, but no blocks of resnet50.*--recompute=none"):
        search(plan(IMAGES), Wish(recompute=True))


@pytest.mark.parametrize("chunks", [1, 2])
def test_where_a_model_of_the_user_can_be_cut_is_not_known(chunks):
    asked = plan([*IMAGES, "--strategy=mesh", f"--pipe_chunks={chunks}"])
    asked = dataclasses.replace(asked, model=dataclasses.replace(asked.model, source="graph"))
    with pytest.raises(ConfigError, match="can be cut into pipe=2 stages is not known here.*without pipe="):
        search(asked, Wish(mesh=Mesh.create(data=4, pipe=2)))


def test_parts_of_a_pipeline():
    mesh = ["--strategy=mesh"]
    found = list(layouts(plan([*TEXT, *mesh, "--pipe_cut=block_02"]), Wish()))
    assert {layout.pipe for layout in found} == {2}
    found = list(layouts(plan([*TEXT, *mesh, "--pipe_chunks=2"]), Wish(mesh=Mesh.create(data=4, pipe=2))))
    assert found and not any(layout.micro_batches % 2 for layout in found)
    with pytest.raises(ConfigError, match="pipe_chunks=4 cuts .* pipe=2 .*blocks at which"):
        list(layouts(plan([*TEXT, *mesh, "--pipe_chunks=4"]), Wish(mesh=Mesh.create(data=4, pipe=2))))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulation": 2},
        {"accumulation": 3},
        {"global_batch": 63, "accumulation": 3},
        {"compression": "bf16"},
        {"compression": "topk", "precision": "float16"},
        {"offload": "optimizer"},
        {"sequence_parallel": True},
        {"jit_compile": True},
        {"all_reduce": "hierarchical"},
        {"pipe_chunks": 2, "accumulation": 1},
        {"pipe_chunks": 2, "accumulation": 4},
        {"pipe_cut": "block_02"},
        {"optimizer": "adafactor"},
    ],
)
def test_training_refuses_the_same(changes):
    asked = plan(TEXT)
    base = asked.config.replace(strategy="mesh", **changes)
    for mesh, zero in itertools.product(
        (
            Mesh.create(data=8),
            Mesh.create(data=4, pipe=2),
            Mesh.create(data=4, model=2),
            Mesh.create(data=4, expert=2),
            Mesh.create(data=2, pipe=2, model=2),
            Mesh.create(),
        ),
        range(4),
    ):
        config = base.replace(zero=zero)
        batch = plan_batch(config.batch, mesh.replicas)
        layout = Layout.on(mesh, zero=zero, micro_batch=batch.micro_batch, micro_batches=batch.accumulation)
        said = layout_refusals.of_zero(config) or layout_refusals.of_layout(asked.model, config, layout, batch)
        assert bool(said) == bool(refused_by_training(config, mesh, batch)), (mesh.describe(), zero, said)


def refused_by_training(config, mesh, batch):
    """The sentence of the checks that need no model; "": none."""
    try:
        config.validate()
    except ConfigError as error:
        return str(error)
    return mesh_rules.refusal(config, mesh, batch)  # which compose_mesh asks, see unit/training/test_compose.py
