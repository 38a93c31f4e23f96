"""The configuration: one frozen dataclass per component, a field for each flag.

options.py declares fields; cluster_options.py, training_options.py and run_options.py hold the components;
configuration.py combines them; checks.py holds the checks across fields. No TensorFlow import: `--help` and `--dry_run`
must answer at once.
"""

from tfdist.config.cluster_options import ClusterConfig, ParallelConfig, ParameterServerConfig, StrategyConfig
from tfdist.config.configuration import COMPONENTS, Config, iter_options
from tfdist.config.options import check_option, check_utf8, is_switch, option, parse_args, parse_profile_steps
from tfdist.config.run_options import (
    MOST_PORT,
    CheckpointConfig,
    ExportConfig,
    LoopConfig,
    RunConfig,
    TelemetryConfig,
)
from tfdist.config.training_options import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
)

__all__ = [
    "COMPONENTS",
    "MOST_PORT",
    "BatchConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "ExportConfig",
    "LoopConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ParameterServerConfig",
    "PrecisionConfig",
    "RunConfig",
    "ScheduleConfig",
    "StrategyConfig",
    "TelemetryConfig",
    "check_option",
    "check_utf8",
    "is_switch",
    "iter_options",
    "option",
    "parse_args",
    "parse_profile_steps",
]
