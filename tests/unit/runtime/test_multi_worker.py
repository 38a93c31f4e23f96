"""The runtime of tf.distribute's multi-worker strategy."""

import json

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.runtime.multi_worker import MultiWorker


def test_a_worker_that_is_alone_opens_no_port(monkeypatch):
    cluster = Cluster.of_workers(["127.0.0.1:2222"], 0)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster.spec, "task": {"type": "worker", "index": 0}}))
    runtime = MultiWorker.create(Config(), cluster)
    [device] = runtime.strategy.extended.worker_devices
    assert "/job:localhost/" in device, "TensorFlow's server has been started, on all interfaces"
