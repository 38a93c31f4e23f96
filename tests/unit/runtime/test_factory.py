"""The registry of strategies, and which of them a configuration means."""

import ast
import sys
from pathlib import Path

import pytest

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.control.strategies import STRATEGIES, asked_for, strategy_named
from tfdist.runtime.factory import resolve_strategy

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
    assert not asked_for("nccl").several_workers and not asked_for("auto").compression
    with pytest.raises(ConfigError, match="--strategy=nccl is not one of auto, one_device, mirrored, multi_worker"):
        strategy_named("nccl")
