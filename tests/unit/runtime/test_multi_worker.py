"""The runtime of tf.distribute's multi-worker strategy."""

import json

from tensorflow.python.distribute import collective_all_reduce_strategy

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.runtime.multi_worker import MultiWorker


def test_a_worker_that_is_alone_opens_no_port(monkeypatch):
    cluster = Cluster.of_workers(["127.0.0.1:2222"], 0)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster.spec, "task": {"type": "worker", "index": 0}}))
    runtime = MultiWorker.create(Config(), cluster)
    [device] = runtime.strategy.extended.worker_devices
    assert "/job:localhost/" in device, "TensorFlow's server has been started, on all interfaces"


def test_a_worker_that_is_alone_has_all_its_gpus(monkeypatch):
    monkeypatch.setattr(collective_all_reduce_strategy.context, "num_gpus", lambda: 2)
    extended = MultiWorker.create(Config(), Cluster()).strategy.extended
    found = extended._initialize_local_devices(extended._cluster_resolver, worker_device="")
    assert found == (("/device:GPU:0", "/device:GPU:1"), "GPU")
