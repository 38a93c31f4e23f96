"""What workers find out about each other before they begin, with rows in place of workers."""

import numpy as np
import pytest

from tests.unit.artifacts.test_run_identity import lose_status, snapshots
from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.run.agreement import _TOGETHER, _first_unlike, check_same_identity, check_same_options, identify


class Rows:
    """A runtime that has gathered the rows of all; the first call on each notes its own."""

    rank = 0

    def __init__(self):
        self.rows = []

    def all_gather(self, row):
        self.rows.append(row)
        return np.stack(self.rows)


class Two:
    """A runtime of two workers, of which the other has the flags of `first`."""

    rank = 1

    def __init__(self, first):
        self.first, self.sent = first, []

    def all_gather(self, row):
        """Its own and what the chief has sent, which was noted before."""
        if self.first is None:
            self.sent.append(row)
            return np.stack([row, row])
        return np.stack([self.first.pop(0), row])


def test_who_would_train_something_else_is_told_by_which_flags():
    chief, sums = Two(None), Rows()
    config = Config().replace(steps=3, seed=1, global_batch=8)
    check_same_identity(chief, config)
    identity = config.identity()
    _first_unlike(sums, identity, sorted(identity))
    second = Two([*chief.sent, *sums.rows])
    with pytest.raises(
        ConfigError, match=r"^Rank 1 has configuration .*same flags \(rank 1 has --global_batch=16, --seed=2\)\.$"
    ):
        check_same_identity(second, config.replace(seed=2, global_batch=16))


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 4},
        {"eval_every": 3},
        {"save_every": 7},
        {"log_every": 1},
        {"save_final": False},
        {"micro_batch": 8},
        {"accumulation": 2},
        {"eval_batch": 3},
        {"keep_best": "min:loss"},
        {"backup_dir": "x"},
        {"deterministic": True},
        {"jit_compile": True},
        {"pack_mb": 2.5},
        {"horovod_fusion_mb": 1.0},
    ],
)
def test_a_worker_that_would_do_other_things_between_steps_is_named(changes):
    """Their configuration is the same run's, so its digest does not tell; they would wait for each other for ever."""
    first, other = Config().replace(steps=3), Config().replace(**{"steps": 3, **changes})
    assert first.digest() == other.digest()
    runtime = Rows()
    check_same_options(runtime, first)
    check_same_options(runtime, first.replace(run_dir="elsewhere", progress="none"))
    with pytest.raises(ConfigError, match=rf"^Rank 2 has a different --{next(iter(changes))} than rank 0: give all"):
        check_same_options(runtime, other)


# Flags in which workers may differ, by why that changes no result.
FREE = {
    "places on each machine, and who waits for what how long": [
        *(
            "run_dir",
            "cache_dir",
            "store_timeout",
            "data_dir",
            "job_token_file",
            "startup_timeout",
            "heartbeat_timeout",
        ),
        *("collective_timeout", "step_timeout", "first_step_timeout", "eval_timeout", "save_timeout", "grace_period"),
        *("preemption_notice", "straggler_factor", "dry_run"),
    ],
    "how fast a worker computes, reads and writes": [
        *("intra_op_threads", "inter_op_threads", "soft_placement", "cache_gb", "cache_data", "reader_threads"),
        *("async_save", "horovod_cycle_ms"),
    ],
    "the chief alone decides": [
        *("save_minutes", "keep", "keep_every", "double_backup", "delete_backup", "resume", "allow_config_change"),
        *("ps_mode", "max_staleness", "staleness_scaling", "backup_workers", "ps_piece_kb"),
    ],
    "what is shown": [
        *("progress", "trackers", "peak_tflops", "scaling_baseline", "histograms_every", "prometheus_port"),
        *("opentelemetry", "profile_ranks", "plot"),
    ],
    "the runtimes compare it, or workers with other ones do not meet": ["strategy", "communication"],
    "in one process only": ["virtual_devices"],
}


def test_each_flag_is_compared_or_may_differ():
    """Whoever adds a flag says what happens where workers have other values of it."""
    config = Config().replace(steps=3)
    free = {name for names in FREE.values() for name in names}
    compared = {*_TOGETHER, *config.identity()}
    assert not free & compared
    assert set(config.flat()) == free | compared


def test_a_run_whose_status_is_lost_keeps_its_id(tmp_path):
    """Its own backup was taken for another run's."""

    class Alone:
        rank = 0

        def broadcast_object(self, value):
            return value

    new = identify(Alone(), tmp_path).run_id
    assert len(new) == 12
    snapshots(tmp_path, step_20=new)
    lose_status(tmp_path, "empty")
    assert identify(Alone(), tmp_path).run_id == new
