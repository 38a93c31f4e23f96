"""What a mesh refuses, as sentences; a mesh of one worker is the model as it is."""

import contextlib
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import build
from tfdist.config import Config, OptimizerConfig
from tfdist.config.optimizers import OPTIMIZERS
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.planner import mesh_rules
from tfdist.runtime.collectives import Group
from tfdist.runtime.mesh import Mesh
from tfdist.runtime.mesh_runtime import MeshRuntime
from tfdist.training.composition_checks import check_weighted
from tfdist.training.optimizer import make_optimizer
from tfdist.training.parallel.compose import _pieces, compose_mesh
from tfdist.training.parallel.expert import parallelize_experts
from tfdist.training.parallel.pipeline_parts import divide
from tfdist.training.parallel.segments import cut_into_blocks
from tfdist.training.parallel.sequence import parallelize_sequence
from tfdist.training.parallel.shards import build_optimizer, empty_like, shard_variables
from tfdist.training.parallel.tensor import parallelize_layers
from tfdist.training.parallel.zero import sharded_update
from tfdist.training.schedule import Schedule

BASE = Config().replace(
    strategy="mesh",
    steps=2,
    source="synthetic",
    source_args="task=text,vocab=17,samples=16,eval_samples=4",
    sequence_length=4,
    model="transformer",
    model_args="layers=2,width=8,heads=2",
    global_batch=4,
    eval_samples=4,
    ema=0.9,
)


class Alone(MeshRuntime):
    """One worker that counts itself as the first of a larger mesh; for checks, which come before anything travels."""

    def __init__(self, mesh):
        self.mesh, self.rank, self.size, self.replicas = mesh, 0, mesh.size, mesh.replicas


@pytest.mark.parametrize(
    "mesh, changes, words",
    [
        ("expert=2", {"global_batch": 5}, ["expert=2", "--global_batch=5", "2 replicas"]),
        ("expert=2", {"jit_compile": True}, ["--jit_compile"]),
        ("expert=2", {"compression": "int8"}, ["--compression=int8", "expert=2"]),
        ("pipe=2", {"global_batch": 6, "accumulation": 4}, ["pipe=2", "--global_batch=6", "--accumulation=4"]),
        (
            "pipe=2",
            {"pipe_chunks": 2, "global_batch": 6, "accumulation": 3},
            ["--pipe_chunks=2", "rounds of pipe=2", "--accumulation=3"],
        ),
        ("pipe=2", {"recompute": "attention"}, ["--recompute=attention", "pipe=2"]),
        ("model=2", {"jit_compile": True}, ["--jit_compile"]),
        ("model=2", {"global_batch": 10, "accumulation": 3}, ["model=2", "--global_batch=10", "--accumulation=3"]),
        ("data=2", {"sequence_parallel": True}, ["--sequence_parallel", "data=2", "model=2"]),
        ("model=2", {"sequence_parallel": True, "zero": 3}, ["--sequence_parallel", "--zero=3"]),
        ("data=2", {"jit_compile": True, "zero": 3}, ["--jit_compile", "--zero=3"]),
        ("data=2", {"compression": "int8", "zero": 1}, ["--compression=int8", "--zero=1"]),
        ("data=2", {"compression": "topk", "precision": "float16"}, ["--compression=topk", "float16"]),
        ("data=2", {"compression": "topk", "objective": "own:loss"}, ["--compression=topk", "--objective=own:loss"]),
        ("model=2", {"compression": "fp16"}, ["--compression=fp16", "model=2"]),
        ("data=2", {"offload": "optimizer"}, ["--offload=optimizer", "--zero=1"]),
        ("data=2", {"optimizer": "lamb", "zero": 1}, ["--zero=1", "--optimizer=lamb", "each element"]),
        ("expert=2", {"optimizer": "lamb"}, ["--mesh=expert=2", "--optimizer=lamb", "each element"]),
        ("data=2", {"pipe_cut": "block_01", "pipe_chunks": 2}, ["--pipe_cut=block_01", "pipe=1"]),
        ("pipe=2", {"pipe_cut": "block_00,block_01"}, ["--pipe_cut=block_00,block_01", "3 parts", "pipe=2"]),
    ],
)
def test_refused(mesh, changes, words):
    runtime = Alone(Mesh.parse(mesh, 2))
    config = BASE.replace(**changes)
    refused = mesh_rules.refusal(config, runtime.mesh, build.plan_batch(config.batch, runtime.replicas))
    assert all(word in refused for word in words), refused
    with pytest.raises(ConfigError) as error:  # before anything is done to a model
        compose_mesh(config, runtime, None, None, None, build.plan_batch(config.batch, runtime.replicas), None)
    assert str(error.value) == refused


@pytest.mark.parametrize("changes", [{"global_batch": 9, "accumulation": 3}, {"global_batch": 11, "accumulation": 2}])
def test_what_a_model_axis_can_repeat_is_not_refused(changes):
    runtime = Alone(Mesh.parse("model=2", 2))
    config = BASE.replace(**changes)
    assert not mesh_rules.refusal(config, runtime.mesh, build.plan_batch(config.batch, runtime.replicas))


# A model of few layers.
DIGITS = {"source": "digits", "source_args": "", "model": f"{__name__}:one_block", "model_args": ""}


def one_block(num_outputs):
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Flatten()(inputs)
    y = keras.layers.Dense(64, activation="tanh")(keras.layers.LayerNormalization(name="block_00_norm_1")(x))
    x = keras.layers.Add(name="block_00_mlp_add")([x, y])
    return keras.Model(inputs, keras.layers.Dense(num_outputs, dtype="float32")(x))


@pytest.mark.slow
def test_a_mesh_of_one_worker_with_everything_that_needs_no_other():
    losses = []
    for changes in (
        {"strategy": "one_device"},
        {"zero": 3, "recompute": "block"},
        {"zero": 1, "offload": "optimizer"},
        {"compression": "powersgd"},
    ):
        keras.backend.clear_session()
        config = BASE.replace(**DIGITS, **changes)
        job = build.compose(config, build.start_runtime(config, Cluster()))
        output = job.step(job.iterators(0), 2)
        losses.append((output.means["loss"], job.evaluator()()["loss"]))
    np.testing.assert_allclose(losses, [losses[0]] * 4, rtol=1e-5)


@pytest.mark.parametrize("optimizer", ["lamb", "muon", "adafactor"])
def test_optimizers_that_need_whole_variables(optimizer):
    with pytest.raises(ConfigError, match=f"--optimizer={optimizer}"):
        config = BASE.replace(**DIGITS, zero=1, optimizer=optimizer, ema=0.0)
        build.compose(config, build.start_runtime(config, Cluster()))


def test_variables_that_must_stay_whole():
    runtime = build.start_runtime(BASE, Cluster())
    for options, stage, word in (
        ({"kernel_constraint": "max_norm"}, 1, "constraint"),
        ({"kernel_regularizer": "l2"}, 3, "regularizer"),
    ):
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, **options)])
        with pytest.raises(ConfigError, match=word):
            sharded_update(runtime, model, keras.optimizers.SGD(), stage)


class Subclassed(keras.Model):
    """Of any layers, one after the other; Keras does not know the shape of what comes out."""

    def __init__(self, *parts):
        super().__init__(name="own")
        self.parts = list(parts)

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize(
    "mesh, words",
    [
        ("model=2", "layer embed_tokens, but it is not a functional model"),
        ("pipe=2", "own has no layers called block_00_norm_1"),
    ],
)
def test_a_subclassed_model_is_refused_where_it_cannot_be_spread(mesh, words):
    rest = Subclassed(keras.layers.Embedding(17, 8, name="embed_tokens"), keras.layers.Dense(17))
    rest(np.zeros((1, 4), "int32"))
    config = BASE.replace(mesh=mesh, accumulation=2)
    runtime = Alone(Mesh.parse(mesh, 2))
    runtime.group = lambda *axes: SimpleNamespace(size=runtime.mesh.degree(*axes), index=0)
    with pytest.raises(ConfigError, match=words):
        compose_mesh(config, runtime, rest, keras.optimizers.SGD(), None, build.plan_batch(config.batch, 1), rows=None)


def test_a_layer_of_another_kind_than_its_name_says_is_refused():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Embedding(17, 8, name="embed_tokens")])
    with pytest.raises(ConfigError, match="embed_tokens of .*, but its type is Embedding"):
        parallelize_layers(model, SimpleNamespace(size=2, index=0))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_that_a_layer_sets_must_stay_whole(stage):
    model = keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.SpectralNormalization(keras.layers.Dense(2, name="inner"), name="spectral"),
        ]
    )
    update = sharded_update(build.start_runtime(BASE, Cluster()), model, keras.optimizers.SGD(), stage)
    update.refresh_shards()  # as after a restore: they may be set between steps
    with pytest.raises(
        ConfigError, match=f"^--zero={stage}, but layer spectral sets its weight .*inner/kernel in the forward pass"
    ):
        tf.function(lambda: model(tf.ones([2, 3]), training=True), autograph=False)()


def test_a_pipeline_hands_on_one_tensor():
    def block(number, x, y):
        return keras.layers.Add(name=f"block_0{number}_mlp_add")(
            [x, keras.layers.LayerNormalization(name=f"block_0{number}_norm_1")(y)]
        )

    ids = keras.Input((3,), dtype="int32")
    table = keras.layers.Embedding(5, 4, mask_zero=True)(ids)
    x = block(1, block(0, table, table), table)
    for model, words in (
        (keras.Model(ids, keras.layers.LSTM(4)(block(0, table, table))), "block_00.*mask"),
        (keras.Model(ids, x), "earlier layer's output"),
        (keras.Model(ids, [x, x]), "1 inputs and 2 outputs"),
    ):
        with pytest.raises(ConfigError, match=words):
            divide(cut_into_blocks(model, "--mesh"), len(cut_into_blocks(model, "--mesh").segments), cut="")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"kernel_regularizer": "l2"}, ["mlp_up/kernel", "regularizer", "--weight_decay"]),
        ({"kernel_constraint": "max_norm"}, ["mlp_up/kernel", "constraint", "data="]),
        ({"activity_regularizer": "l2"}, ["mlp_up", "activity regularizer"]),
    ],
)
def test_layers_that_must_stay_whole(options, words):
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, name="block_00_mlp_up", **options)])
    with pytest.raises(ConfigError) as error:
        parallelize_layers(model, Group((0, 1), 0, tasks=("a", "b")))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    "spread",
    [
        lambda variables: shard_variables(variables, [Group((0,), 0, tasks=("a",))] * len(variables)),
        lambda variables: [empty_like(each) for each in variables],
    ],
)
def test_shards_decay_as_the_whole_variables_do(spread):
    model = keras.Sequential(
        [keras.layers.Input((3,)), keras.layers.Dense(2, name="first"), keras.layers.Dense(2, name="second")]
    )
    optimizer = make_optimizer(
        OptimizerConfig(optimizer="adamw", weight_decay=0.1, weight_decay_exclude="bias,second/kernel"),
        Schedule("constant", 0.1, 0, 10, 0.1, 0.0),
    )
    shards = spread(model.trainable_variables)
    optimizer.build(shards)
    assert [optimizer._use_weight_decay(shard.value) for shard in shards] == [True, False, False, False]
    assert [(shard.path, len(shard.shape)) for shard in shards] == [
        (variable.path, len(shard.shape)) for variable, shard in zip(model.trainable_variables, shards, strict=True)
    ]


@pytest.mark.parametrize("options", [{"kernel_regularizer": "l2"}, {"activity_regularizer": "l2"}])
def test_added_losses_beside_weights_are_refused_on_every_stage_of_a_pipeline(options):
    """Not where the step is traced: the stages that add nothing would wait for the one that refuses."""
    x = tf.TensorSpec([None, 3])

    def model(**options):
        return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, **options), keras.layers.Dense(2)])

    stages = SimpleNamespace(mesh=Mesh.create(pipe=2))
    with pytest.raises(ConfigError, match="Losses that layers add.*pipe="):
        check_weighted(BASE, stages, model(**options), True, x)
    check_weighted(BASE, stages, model(**options), False, x)
    check_weighted(BASE, stages, model(), True, x)
    for mesh in (None, Mesh.create(data=2)):
        check_weighted(BASE, SimpleNamespace(mesh=mesh), model(**options), True, x)


@pytest.mark.parametrize("kind", ["int8", "topk", "powersgd", "fp16"])
def test_errors_in_units_of_a_sum_of_weights_are_not_carried_to_a_step_with_another(kind):
    config = BASE.replace(compression=kind)
    check_weighted(config, None, None, False, None)
    refused = pytest.raises(ConfigError, match=f"^--compression={kind} carries errors .* --source=synthetic gives")
    with contextlib.nullcontext() if kind == "fp16" else refused:
        check_weighted(config, SimpleNamespace(mesh=None), None, True, None)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_whose_state_has_other_shapes_are_refused_on_a_pipeline(name):
    config = BASE.replace(optimizer=name, ema=0.0)
    optimizer = make_optimizer(config.optimizer, Schedule("constant", 0.1, 0, 10, 0.1, 0.0))
    owners = build_optimizer(optimizer, [keras.Variable(np.ones([3, 2]))])
    fits = all(not len(each.shape) or id(each) in owners for each in optimizer.variables)
    refused = mesh_rules.refusal(config, Mesh.create(pipe=2), build.plan_batch(config.batch, 1))
    assert fits == (refused == "") and (fits or f"pipe=2, over which the state of --optimizer={name}" in refused)


def test_experts_on_the_mesh_are_refused_where_they_make_no_sense():
    pair = Group((0, 1), 0, tasks=("a", "b"))
    spec = tf.TensorSpec([4], tf.int32)
    plain, three = (
        build.build_model(BASE.replace(model_args=args).model, spec, 17)
        for args in ("layers=1,width=8,heads=2", "layers=1,width=8,heads=2,experts=3")
    )
    with pytest.raises(ConfigError, match="expert=2, but no layer of transformer.*experts=8"):
        parallelize_experts(plain, pair)
    with pytest.raises(ConfigError, match="expert=2, which does not divide the 3 experts"):
        parallelize_experts(three, pair)
    runtime = Alone(Mesh.create(pipe=2))
    with pytest.raises(ConfigError, match="pipe=2.*experts drop"):
        _pieces(BASE, runtime, three)


def test_sequences_that_cannot_be_spread_are_refused():
    pair = Group((0, 1), 0, tasks=("a", "b"))
    for length, args, words in (
        (5, "layers=1,width=8,heads=2", "5 positions over model=2"),
        (4, "layers=1,width=8,heads=2,experts=2", "without experts"),
    ):
        model = build.build_model(BASE.replace(model_args=args).model, tf.TensorSpec([length], tf.int32), 17)
        with pytest.raises(ConfigError, match=words):
            parallelize_sequence(model, pair)


def test_sequences_of_unknown_length_are_refused():
    table = keras.layers.Embedding(17, 8, name="embed_tokens")
    ids, one = keras.Input((None,)), keras.Input(())
    subclassed = Subclassed(keras.layers.Embedding(17, 8, name="embed_tokens"))
    subclassed(np.zeros((1, 4), "int32"))
    for model in (keras.Model(ids, table(ids)), keras.Model(one, table(one)), subclassed):
        with pytest.raises(
            ConfigError, match=f"--sequence_parallel .* model=2, but {model.name} does not say how many"
        ):
            parallelize_sequence(model, Group((0, 1), 0, tasks=("a", "b")))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"all_reduce": "hierarchical", "zero": 1}, ["--all_reduce=hierarchical", "--zero=1"]),
        ({"all_reduce": "hierarchical", "compression": "int8"}, ["--all_reduce=hierarchical", "--compression=int8"]),
        ({"workers_per_host": 2}, ["--workers_per_host=2", "--all_reduce=hierarchical"]),
        ({"all_reduce": "hierarchical", "strategy": "one_device"}, ["--all_reduce=hierarchical", "one_device"]),
    ],
)
def test_hierarchical_is_refused_where_it_makes_no_sense(changes, words):
    with pytest.raises(ConfigError) as error:
        BASE.replace(**changes).validate()
    assert all(word in str(error.value) for word in words), error.value


def test_stages_are_balanced_or_as_given():
    model = build.build_model(
        BASE.replace(model_args="layers=6,width=8,heads=2").model, tf.TensorSpec([4], tf.int32), 17
    )
    cut_model = cut_into_blocks(model, "--mesh")

    def names(parts):
        return [[segment.gives[0] for segment in part] for part in parts]

    balanced = names(divide(cut_model, 2, cut=""))
    assert sum(balanced, []) == names([cut_model.segments])[0] and {len(part) for part in balanced} == {4}
    assert names(divide(cut_model, 3, "block_00,block_05")) == [
        ["start"],
        [f"block_0{index}" for index in range(5)],
        ["block_05", "outputs"],
    ]
    for cut in ("block_00", "block_05,block_00", "block_00,block_77"):
        with pytest.raises(ConfigError, match="--pipe_cut"):
            divide(cut_model, 3, cut)
    with pytest.raises(ConfigError, match="9 parts"):
        divide(cut_model, 9, cut="")
