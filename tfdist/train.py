"""python -m tfdist.train: trains a Keras 3 model, as one worker of the cluster that TF_CONFIG describes.

Without TF_CONFIG it is the only worker. `python -m tfdist.launch --workers=N -- FLAGS` starts N of them on this
machine.
"""

from __future__ import annotations

import os
import sys

from tfdist import flags
from tfdist.artifacts.status import is_finished, stored_status
from tfdist.config import MOST_PORT, Config
from tfdist.config.strategies import check_strategy, strategy_or_undecided
from tfdist.control import exit_codes, versions
from tfdist.control.amounts_text import counted
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.control.membership import VARIABLE
from tfdist.control.preflight import Preflight
from tfdist.control.processes import STANDBY_VARIABLE, wait_as_standby
from tfdist.control.resolvers import cluster_to_join
from tfdist.control.token import with_token
from tfdist.data.augmentation_names import AUGMENTATIONS
from tfdist.data.batch_plan import check_given, plan_batch
from tfdist.data.sources.source_names import SOURCES
from tfdist.models.model_names import MODELS
from tfdist.planner import memory_check
from tfdist.plugins import check_name
from tfdist.runtime.factory import replicas_of, resolve_strategy
from tfdist.telemetry.tracker_names import TRACKERS, names_in
from tfdist.training.objective_names import OBJECTIVES

USAGE = (
    (__doc__ or "")
    + """
  python -m tfdist.train --flagfile=flags/digits_cnn.flags
  python -m tfdist.train --source=digits --model=cnn --global_batch=64 --epochs=10 --run_dir=runs/first
"""
)


def main(argv: list[str]) -> int:
    if STANDBY_VARIABLE in os.environ:  # a standby of the launcher: imports now, works when it is needed
        versions.quiet()
        versions.prefer_cublas()
        versions.import_keras()

        argv = wait_as_standby(sys.stdin)
    config = flags.parse(argv, usage=USAGE).config.validate()
    try:
        return _run(config, argv)
    except SystemExit as end:  # else the run would end as if all were well, or with a code that means something else
        raise ConfigError(
            f"Your own code ended the program before the run was over (sys.exit({end.code!r})): let it raise an"
            " exception that says what is wrong."
        ) from end


def _run(config: Config, argv: list[str]) -> int:
    _check_early(config)
    if config.run.dry_run:
        print(dry_run(config, cluster_to_join(os.environ)))
        return 0
    config = config.with_absolute_folders()
    cluster = with_token(cluster_to_join(os.environ), os.environ, config.cluster.job_token_file)
    _check_ports(config.telemetry.prometheus_port, cluster)
    versions.check()
    versions.quiet()
    versions.prefer_cublas()
    if cluster.role == "evaluator":
        from tfdist.run.follower import follow

        return follow(config)
    strategy = strategy_or_undecided(resolve_strategy(config, cluster, gpus=lambda: 0))  # counting starts TensorFlow
    if strategy.parameter_servers:
        if cluster.role in ("worker", "ps"):  # these need nothing of the rest, not even Keras
            from tfdist.runtime import parameter_server

            run_dir, folder = config.run.run_dir, config.run.folder
            before = stored_status(run_dir, folder)
            return parameter_server.serve(config, cluster, lambda: is_finished(run_dir, folder, before))
        from tfdist.run import parameter_server_run

        return parameter_server_run.run(config, cluster, flags.main_command(argv))
    if cluster.role == "ps":
        raise ConfigError(
            f"This process is a parameter server according to TF_CONFIG, but --strategy={config.strategy.strategy}: use"
            " --strategy=parameter_server."
        )
    memory_check.check_by_formula(config, cluster)
    if VARIABLE in os.environ:  # tfdist.launch --elastic announces the peers, repeatedly
        versions.import_keras()
        from tfdist.run import elastic

        return elastic.run(config, flags.main_command(argv), cluster.secret)
    # Peers are awaited while TensorFlow is imported.
    with Preflight(cluster, config.cluster.startup_timeout) as preflight:
        versions.import_keras()
        from tfdist.run import session
    return session.run(session.Start(config, cluster, flags.main_command(argv), began=preflight.began))


def _check_early(config: Config) -> None:
    """Checks everything that does not need TensorFlow, whose import takes seconds. Raises ConfigError."""
    config.check_used()
    check_given(config.batch)
    check_strategy(config.strategy.strategy)
    check_name("model", config.model.model, MODELS)
    check_name("source", config.data.source, SOURCES)
    check_name("augment", config.data.augment, AUGMENTATIONS)
    check_name("objective", config.model.objective, {"auto": "", **OBJECTIVES})
    for tracker in names_in(config.telemetry.trackers):
        check_name("trackers", tracker, TRACKERS)


def _check_ports(first: int, cluster: Cluster) -> None:
    """Checks that each worker of a machine has a port for Prometheus; the same result on all. Raises ConfigError."""
    if first and first + cluster.most_local_rank > MOST_PORT:
        raise ConfigError(
            f"--prometheus_port={first} leaves no port for local rank {cluster.most_local_rank}, which would be"
            f" {first + cluster.most_local_rank}: choose one of at most {MOST_PORT - cluster.most_local_rank}."
        )


def dry_run(config: Config, cluster: Cluster) -> str:
    """The resolved configuration and the batch arithmetic, as text; imports no TensorFlow."""
    local = config.strategy.virtual_devices or 1
    is_mesh = strategy_or_undecided(config.strategy.strategy).mesh
    replicas = replicas_of(config, cluster.size, local)
    number = replicas if is_mesh else local
    counting = f"{counted(number, 'replica')} {'of the mesh' if is_mesh else 'per worker'}"
    lines = [line for line in flags.as_arguments(config) if line != "--dry_run"]
    lines += ["", f"cluster: {cluster.describe()}", f"configuration digest: {config.digest()}"]
    try:
        plan = plan_batch(config.batch, replicas)
    except ConfigError as error:
        raise ConfigError(f"{error} (Counting {counting}.)") from None
    lines.append(f"{plan.describe()} (counting {counting})")
    return "\n".join(lines)


if __name__ == "__main__":
    exit_codes.run_command(main, sys.argv[1:])
