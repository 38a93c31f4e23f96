"""How the parts of a run are put together: what --epochs becomes."""

import pytest
import tensorflow as tf

from tfdist.build import resolve
from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.sources.split import Split

COUNTED = tf.data.Dataset.range(100).map(lambda number: (tf.cast(number, tf.float32), number))
REFUSED = "^--epochs=2 does not work with --source=mine:data, which is read as a stream: use --steps"


@pytest.mark.parametrize(
    ("stream", "example"),
    [
        (COUNTED, ", for example --steps=7 for 2 passes over its 100 samples"),
        (COUNTED.filter(lambda x, y: y >= 0), ""),  # of unknown length
        (COUNTED.repeat(), ""),
    ],
)
def test_passes_over_a_stream_are_refused_with_the_steps_that_make_them(stream, example):
    split = Split("train", None, COUNTED.element_spec, stream=lambda shard, shards: stream)
    config = Config().replace(source="mine:data", epochs=2.0, global_batch=32)
    with pytest.raises(ConfigError, match=f"{REFUSED}{example}[.]$"):
        resolve(config, BatchPlan(32, 1, 1), split)
    assert resolve(config.replace(steps=7, epochs=0.0), BatchPlan(32, 1, 1), split).run.steps == 7
