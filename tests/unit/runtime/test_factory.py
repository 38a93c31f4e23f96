"""The registry of strategies, and which of them a configuration means."""

import ast
import sys
from pathlib import Path

import pytest

from tfdist.config import Config
from tfdist.config.strategies import STRATEGIES, Strategy, check_strategy, strategy_named, strategy_or_undecided
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.factory import create_runtime, resolve_strategy

SERVERS = Cluster(size=2, spec={"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]})


@pytest.mark.parametrize(
    ("options", "cluster", "gpus", "expected"),
    [
        ({}, Cluster(), 0, "one_device"),
        ({}, Cluster(), 2, "mirrored"),
        ({"virtual_devices": 2}, Cluster(), 0, "mirrored"),
        ({}, Cluster(size=2), 8, "multi_worker"),
        ({}, Cluster(size=2, started_by="mpirun"), 0, "horovod"),
        ({}, SERVERS, 0, "parameter_server"),
        ({"strategy": "mesh"}, SERVERS, 0, "mesh"),
    ],
)
def test_what_auto_means(options, cluster, gpus, expected):
    assert resolve_strategy(Config().replace(**options), cluster, lambda: gpus) == expected


def test_gpus_are_counted_only_where_they_matter():
    """To ask TensorFlow for them starts it."""

    def gpus():
        raise AssertionError

    assert resolve_strategy(Config(), Cluster(size=2), gpus) == "multi_worker"


def test_every_entry_names_a_class():
    for strategy in STRATEGIES.values():
        module, _, name = strategy.runtime.partition(":")
        if module in sys.modules:
            assert hasattr(sys.modules[module], name), strategy
        else:
            tree = ast.parse(Path(module.replace(".", "/") + ".py").read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}, strategy


def test_an_unknown_name_can_do_nothing_and_is_refused():
    assert not strategy_or_undecided("nccl").several_workers and not strategy_or_undecided("auto").compression
    with pytest.raises(ConfigError, match="--strategy=nccl is not one of auto, one_device, mirrored, multi_worker"):
        strategy_named("nccl")


OWN = """
from tfdist.config.strategies import Strategy
from tfdist.runtime.single_replica import SingleReplica


class Half(SingleReplica):
    @classmethod
    def create(cls, config, cluster):
        return cls()


class Unnamed(Half):
    def scope(self):
        pass

    all_reduce = gather_row = all_gather = broadcast = barrier = close = scope


class Failing(Unnamed):
    @classmethod
    def create(cls, config, cluster):
        raise ValueError("no such thing")


class Empty:
    pass


HALF, UNNAMED, FAILING, EMPTY, NOWHERE = (
    Strategy(f"own_strategies:{name}", compression=("bf16",)) for name in "Half Unnamed Failing Empty Nowhere".split()
)
THREE = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_strategies", raising=False)
    (tmp_path / "own_strategies.py").write_text(OWN)
    return lambda name: f"{tmp_path}/own_strategies.py:{name}"


def test_an_entry_of_ones_own(own):
    found = strategy_named(own("HALF"))
    assert (
        isinstance(found, Strategy) and found is strategy_or_undecided(own("HALF")) and found.compression == ("bf16",)
    )
    for name, words in (
        (
            own("THREE"),
            'is not an entry of the registry: write THREE = tfdist.config.strategies.Strategy("module:Class")',
        ),
        (own("FOUR"), "is not an entry of the registry"),
        (own("HALF").replace("own_", "other_"), "there is no Python file"),
        ("nowhere_at_all:HALF", "there is no module 'nowhere_at_all'"),
    ):
        with pytest.raises(ConfigError) as raised:
            check_strategy(name)
        assert words in str(raised.value) and f"--strategy={name}" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "HALF",
            "Half lacks all_gather, all_reduce, barrier, broadcast, close, gather_row, scope, which tfdist/runtime",
        ),
        ("UNNAMED", "Unnamed lacks first_replica, name, rank, replicas, size, which"),
        ("FAILING", "in create: ValueError: no such thing"),
        ("EMPTY", "Empty lacks all_gather"),
        ("NOWHERE", "the module own_strategies has no class 'Nowhere'"),
    ],
)
def test_a_runtime_of_ones_own_that_is_not_complete(own, name, words):
    with pytest.raises(ConfigError) as raised:
        create_runtime(Config().replace(strategy=own(name)), Cluster(), None)
    assert words in str(raised.value) and own(name) in str(raised.value)


LONE = """
class Lone(Unnamed):
    name, rank, size, first_replica, replicas = "lone", 0, 1, 0, 1


LONE, FORGETFUL = Strategy("own_strategies:Lone", several_workers=False), Strategy("own_strategies:Lone")
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LONE", "trains in one process, but TF_CONFIG lists 2 workers"),
        ("FORGETFUL", "rank 0 of 1, but this is rank 1 of"),
    ],
)
def test_a_runtime_of_one_process_is_not_given_several(own, name, words):
    """Else each of them would be the chief."""
    path = Path(own(name).partition(":")[0])
    path.write_text(OWN + LONE)
    config = Config().replace(strategy=own(name))
    with pytest.raises(ConfigError) as raised:
        create_runtime(config, Cluster.of_workers(["127.0.0.1:1", "127.0.0.1:2"], 1), None)
    assert words in str(raised.value) and own(name) in str(raised.value)
    assert create_runtime(config, Cluster(), None).name == "lone"


def test_an_entry_that_imports_tensorflow_too_early(own, monkeypatch):
    """What tfdist sets before TensorFlow is imported would come too late."""
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    path = Path(own("HALF").partition(":")[0])
    path.write_text("import sys; sys.modules['tensorflow'] = sys\n" + OWN)
    with pytest.raises(ConfigError, match="its file imports TensorFlow, before tfdist has set it up"):
        strategy_named(own("HALF"))
