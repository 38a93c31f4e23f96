"""The figures that the formulas must give, from the papers and by hand."""

import math

import pytest

from tfdist.planner.communication import (
    Group,
    Link,
    all_reduce_seconds,
    all_to_all,
    halving_doubling_all_reduce,
    hierarchical_all_reduce,
    pass_seconds,
    ring_all_reduce,
    ring_pass,
    tree_all_reduce,
)
from tfdist.planner.hardware import load_hardware
from tfdist.planner.memory import Recipe, shard_states
from tfdist.planner.pipeline import bubble_fraction
from tfdist.planner.reliability import daly_interval, reliability, young_interval
from tfdist.runtime.mesh import REPLICA_AXES, Mesh

GB = 1e9
# 16-bit weights and gradients, float32 master weights and Adam: 16 bytes a parameter
ZERO_PAPER = Recipe(parameter=2, gradient=2, slot=4, master=4)


def test_seven_billion_parameters():
    float32 = shard_states(7e9, 2 * 7e9, Recipe(), 0, 1)
    assert (float32.parameters, float32.optimizer) == (28 * GB, 56 * GB)
    half = shard_states(7e9, 2 * 7e9, Recipe(parameter=2, gradient=2), 0, 1)
    assert (half.parameters, half.gradients, half.optimizer) == (14 * GB, 14 * GB, 56 * GB)


@pytest.mark.parametrize(("zero", "total"), [(0, 98), (1, 49), (2, 36.75), (3, 12.25)])
def test_zero_on_eight_devices(zero, total):
    """float32 parameters, 16-bit gradients, Adam in float32."""
    assert shard_states(7e9, 14e9, Recipe(gradient=2), zero, 8).total == total * GB


@pytest.mark.parametrize(("zero", "total"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_zero_paper(zero, total):
    """Rajbhandari et al. 2019, figure 1: 7.5 billion parameters on 64 devices, mixed-precision Adam."""
    assert round(shard_states(7.5e9, 15e9, ZERO_PAPER, zero, 64).total / GB, 1) == total


def test_a_ring_all_reduce():
    assert ring_all_reduce(8, 14 * GB, Link(0, 600 * GB)) == pytest.approx(0.0408333, rel=1e-5)
    assert round(ring_all_reduce(8, 14 * GB, Link(0, 600 * GB)) * 1e3) == 41
    assert ring_all_reduce(8, 0, Link(1e-6, 1)) == pytest.approx(14e-6)


def test_other_collectives():
    link = Link(2.0, 10.0)  # seconds, bytes a second
    assert tree_all_reduce(8, 100, link) == 2 * 3 * (2 + 10)
    assert tree_all_reduce(5, 100, link) == 2 * 3 * (2 + 10)
    assert halving_doubling_all_reduce(8, 80, link) == 2 * 3 * 2 + 2 * 7 / 8 * 8
    assert halving_doubling_all_reduce(6, 80, link) == 2 * (2 + 8) + 2 * 2 * 2 + 2 * 3 / 4 * 8
    assert ring_pass(4, 80, link) == 3 * 2 + 3 / 4 * 8 == all_to_all(4, 80, link)
    # Four nodes of two: halves within the node, a ring of half the vector between nodes.
    assert hierarchical_all_reduce(4, 2, 80, link, Link(5, 1)) == 2 * (2 + 4) + 2 * 3 * 5 + 2 * 3 / 4 * 40
    assert hierarchical_all_reduce(1, 4, 80, link, Link(5, 1)) == ring_all_reduce(4, 80, link)


def test_groups_on_nodes():
    hardware = load_hardware("h100,per_node=8,network_gbs=50,cards=8,link_gbs=450,link_us=0,network_us=0")
    inside = Group.of(8, 1, hardware)
    assert (inside.local, inside.nodes, inside.flat(hardware).beta) == (8, 1, 450 * GB)
    outside = Group.of(64, 1, hardware)
    assert (outside.local, outside.nodes, outside.rivals, outside.flat(hardware).beta) == (8, 8, 1, 400 * GB)
    beside_tensor = Group.of(8, 8, hardware)  # one device of each node: eight such groups share the network
    assert (beside_tensor.local, beside_tensor.nodes, beside_tensor.rivals, beside_tensor.flat(hardware).beta) == (
        1,
        8,
        8,
        50 * GB,
    )
    times = all_reduce_seconds(outside, 4 * GB, hardware)
    assert times["ring"] == 2 * 63 / 64 * 4 / 400
    assert times["hierarchical"] == pytest.approx(2 * 7 / 8 * 4 / 450 + 2 * 7 / 8 * 0.5 / 50)
    assert pass_seconds(outside, 4 * GB, hardware) == pytest.approx(63 / 64 * 4 / 400)
    assert set(all_reduce_seconds(Group.of(1, 1, hardware), 1, hardware).values()) == {0.0}


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "degrees",
    [
        {"data": 16},
        {"pipe": 2, "data": 8},
        {"pipe": 4, "data": 2, "model": 2},
        {"data": 4, "expert": 4},
        {"data": 2, "expert": 4, "model": 2},
        {"pipe": 2, "data": 2, "expert": 2, "model": 2},
    ],
)
def test_groups_are_those_of_the_runtime(degrees, per_node):
    """On nodes filled in the order of the ranks: how many each group spans, and how many groups leave each of them."""
    mesh, hardware = Mesh.create(**degrees), load_hardware(f"h100,per_node={per_node}")
    for axes in (["pipe"], REPLICA_AXES, ["data"], ["expert"], ["model"]):
        nodes = [{rank // per_node for rank in group} for group in mesh.groups(*axes)]
        group = Group.along(mesh, axes, hardware)
        assert [len(each) for each in nodes] == [group.nodes] * len(nodes), axes
        if group.nodes > 1:
            assert group.rivals == sum(0 in each for each in nodes), axes


@pytest.mark.parametrize("degrees", [{"data": 8, "model": 3}, {"data": 4, "model": 6}, {"data": 2, "expert": 3}])
@pytest.mark.parametrize("per_node", [4, 8])
def test_some_groups_lie_in_two_nodes(degrees, per_node):
    mesh, hardware = Mesh.create(**degrees), load_hardware(f"h100,per_node={per_node}")
    for axes in (["expert"], ["model"]):
        group, of_mesh = Group.along(mesh, axes, hardware), mesh.groups(*axes)
        assert group.nodes == max(len({rank // per_node for rank in each}) for each in of_mesh), axes


@pytest.mark.parametrize(
    ("stages", "micro_batches", "part"), [(1, 8, 0), (4, 1, 3 / 4), (4, 4, 3 / 7), (4, 12, 3 / 15), (8, 64, 7 / 71)]
)
def test_the_bubble(stages, micro_batches, part):
    assert bubble_fraction(stages, micro_batches) == part


def test_when_to_save():
    assert young_interval(20, 4 * 3600) == math.sqrt(2 * 20 * 14_400)
    assert daly_interval(20, 14_400) == pytest.approx(
        758.95 * (1 + math.sqrt(20 / 28_800) / 3 + 20 / 28_800 / 9) - 20, abs=0.05
    )
    assert daly_interval(50, 20) == 20
    # 1,000 devices of 50,000 hours each: 50 hours between failures of the job.
    found = reliability(100 * GB, 1000, 50_000, 2.0, asynchronous=False, restart=60)
    assert (found.mtbf, found.write, found.stall) == (180_000, 50, 50)
    assert found.interval == daly_interval(50, 180_000) and found.lost == (found.interval / 2 + 60) / 180_000
    assert reliability(100 * GB, 1000, 50_000, 2.0, asynchronous=True).stall == 10


def test_the_best_interval_is_the_best():
    """Against the cost that it minimises: save time per interval, and half an interval lost per failure."""
    delta, mtbf = 30.0, 20_000.0

    def cost(tau):
        return delta / (tau + delta) + (tau / 2) / mtbf

    best = daly_interval(delta, mtbf)
    assert cost(best) < min(cost(best * 1.2), cost(best / 1.2))
