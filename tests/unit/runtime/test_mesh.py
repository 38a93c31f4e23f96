"""The arithmetic of the mesh."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.config.mesh_degrees import AXES
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.mesh import Mesh

MESHES = st.tuples(*[st.integers(1, 4)] * len(AXES)).map(Mesh)


@settings(max_examples=50, deadline=None)
@given(MESHES, st.sets(st.sampled_from(AXES)))
def test_groups_divide_the_ranks(mesh, axes):
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert len(group) == mesh.degree(*axes) and list(group) == sorted(group)
        others = {tuple(value for axis, value in mesh.coordinates(rank).items() if axis not in axes) for rank in group}
        assert len(others) == 1
        assert all(mesh.group(rank, *axes) == group and group[mesh.index(rank, *axes)] == rank for rank in group)
    assert all(mesh.rank(mesh.coordinates(rank)) == rank for rank in range(mesh.size))


def test_model_is_innermost():
    mesh = Mesh.parse("model=2,pipe=2,data=2", 8)
    assert mesh.coordinates(5) == {"pipe": 1, "data": 0, "expert": 0, "model": 1}
    assert mesh.group(5, "model") == (4, 5) and mesh.group(5, "data") == (5, 7) and mesh.group(5, "pipe") == (1, 5)
    assert mesh.group(5, "pipe", "data") == (1, 3, 5, 7) and mesh.group(5) == (5,)
    assert mesh.describe() == "pipe=2,data=2,model=2" and mesh.replicas == 2


def test_data_takes_what_remains():
    assert Mesh.parse("", 3) == Mesh.create(data=3)
    assert Mesh.parse("model=2", 6) == Mesh.create(data=3, model=2)
    assert Mesh.parse("model=2, pipe=2", 4) == Mesh.create(model=2, pipe=2)


@pytest.mark.parametrize(
    "text, size, words",
    [
        ("data=2,model=2", 3, ["--mesh=data=2,model=2", "needs 4", "are 3", "data=3"]),
        ("data=2,model=2", 6, ["needs 4", "are 6", "data=3,model=2"]),
        ("model=4", 6, ["multiple of 4", "are 6", "start 8", "data=3,model=2"]),
        ("model=2", 1, ["multiple of 2", "is 1"]),
        ("modle=2", 2, ["'modle=2'", "model"]),
        ("data=0", 2, ["data", "'0'"]),
        ("data=2,data=2", 4, ["data twice"]),
        ("data", 2, ["'data'"]),
        (",", 2, ["--mesh=,", "axis=degree"]),
    ],
)
def test_messages(text, size, words):
    with pytest.raises(ConfigError) as error:
        Mesh.parse(text, size)
    assert all(word in str(error.value) for word in words), error.value
