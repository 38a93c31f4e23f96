"""The options that define the computation: batch, data, model, precision, optimizer, learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.config.optimizers import OPTIMIZERS
from tfdist.config.options import LARGEST_FLOAT32, option


@dataclass(frozen=True)
class BatchConfig:
    """global batch = micro-batch x accumulation x replicas. Give any two; the third follows."""

    global_batch: int = option(
        0,
        "Samples per optimizer step over all workers. 0: follows from the others.",
        identity=True,
        least=0,
        key=True,
    )
    micro_batch: int = option(
        0,
        "Samples per replica in one forward pass; beside --global_batch, at most. 0: follows from the others.",
        least=0,
        key=True,
    )
    accumulation: int = option(0, "Micro-batches per optimizer step. 0: follows from the others.", least=0)


@dataclass(frozen=True)
class DataConfig:
    """The training data, and its order."""

    source: str = option(
        "digits", "Data source: a registered name or package.module:function.", identity=True, key=True
    )
    source_args: str = option("", "Options of the source, key=value,key=value.", identity=True, key=True)
    data_dir: str = option(
        "",
        "Where the source finds its files, if it needs any: a folder; or a URL, such as s3://BUCKET/FOLDER, whose files"
        " are copied to --cache_dir.",
        key=True,
    )
    cache_gb: float = option(
        0.0, "Gigabytes that copies of data from object stores may take in --cache_dir. 0: no limit.", least=0
    )
    cache_data: bool = option(
        True,
        "Keep copies of the data of an object store in --cache_dir. --nocache_data: records of TFRecord files are read"
        " at random by byte ranges, when they are needed, and again in each epoch.",
    )
    sequence_length: int = option(128, "Tokens per sample of a text source.", identity=True, least=1)
    shuffle: bool = option(True, "Shuffle the samples again in each epoch.", identity=True)
    augment: str = option(
        "none", "Augmentation of training samples: none, a registered name or package.module:function.", identity=True
    )
    eval_batch: int = option(0, "Samples per replica in one evaluation step. 0: the micro-batch.", least=0)
    eval_samples: int = option(0, "Evaluate on the first N samples only. 0: all.", least=0)
    reader_threads: int = option(0, "Batches fetched at the same time. 0: one per thread, at most 16.", least=0)


@dataclass(frozen=True)
class ModelConfig:
    """The model, its objective, and its compilation."""

    model: str = option(
        "cnn",
        "Model: a registered name or package.module:function returning a Keras 3 model.",
        identity=True,
        key=True,
    )
    model_args: str = option(
        "",
        "Options of the model, key=value,key=value, for example size=tiny,dropout=0.1.",
        identity=True,
        key=True,
    )
    objective: str = option(
        "auto",
        "Loss and metrics: auto, classification, next_token, regression or package.module:function.",
        identity=True,
    )
    label_smoothing: float = option(
        0.0, "Label smoothing of the classification objective, 0 to 1.", identity=True, least=0
    )
    sync_batchnorm: bool = option(True, "BatchNormalization takes its statistics over all replicas.", identity=True)
    row_mixing: str = option(
        "refuse",
        "What to do with your own model, objective or augmentation if its result for a row depends on other rows of its"
        " batch: refuse it, or replica: each replica mixes the rows of its micro-batch, and with several workers or"
        " replicas an evaluation also those that fill its last batch.",
        choices=("refuse", "replica"),
    )
    fused_batchnorm: bool = option(
        True,
        "BatchNormalization of images is one operation of TensorFlow, if its statistics are a replica's own.",
    )
    jit_compile: bool | None = option(
        None, "Compile the forward and backward pass with XLA; by default on GPUs, where possible, and not on CPUs."
    )
    jit_tune: bool = option(
        False,
        "Measure at the start whether --jit_compile and --nofused_batchnorm make steps faster, and set them"
        " accordingly; the run remembers the result.",
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Compute type, and the dynamic loss scale of float16 (Micikevicius et al. 2018, arXiv:1710.03740)."""

    precision: str = option(
        "float32",
        "Compute type; variables stay float32.",
        choices=("float32", "bfloat16", "float16"),
        identity=True,
        key=True,
    )
    loss_scale_initial: float = option(
        32768.0, "First loss scale of float16.", identity=True, least=1, most=LARGEST_FLOAT32
    )
    loss_scale_growth_steps: int = option(
        2000, "The loss scale doubles after this many steps without overflow.", identity=True, least=1
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """The update rule."""

    optimizer: str = option(
        "adamw",
        "Update rule. adamw is adam: both decay by --weight_decay.",
        choices=tuple(OPTIMIZERS),
        identity=True,
        key=True,
    )
    optimizer_args: str = option(
        "", "Options of the Keras optimizer, key=value,key=value, for example beta_2=0.95.", identity=True
    )
    weight_decay: float = option(
        0.0, "Decoupled weight decay per step, times the learning rate.", identity=True, least=0
    )
    weight_decay_exclude: str = option(
        "bias,gamma,beta",
        "Variables with one of these in their path (layer/kernel) are not decayed. bias, gamma and beta: in the"
        " variable's own name, the last of the path.",
        identity=True,
    )
    clip_norm: float = option(
        0.0, "Clip the reduced gradient to this global norm. 0: off.", identity=True, least=0, most=LARGEST_FLOAT32
    )
    ema: float = option(
        0.0,
        "Decay of an exponential moving average of the weights, used in evaluation and export. 0: off.",
        identity=True,
        least=0,
    )


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over the steps."""

    learning_rate: float = option(1e-3, "Peak learning rate.", identity=True, least=0, key=True)
    schedule: str = option(
        "constant",
        "Shape after the warm-up. wsd: warm-up, stable, linear decay.",
        choices=("constant", "linear", "cosine", "wsd"),
        identity=True,
        key=True,
    )
    warmup_steps: int = option(
        0, "Steps of linear warm-up: step k, from 1, has k / STEPS of the peak rate.", identity=True, least=0
    )
    decay_steps: int = option(0, "Step at which the decay ends. 0: the last step of the run.", identity=True, least=0)
    decay_fraction: float = option(0.1, "Fraction of --decay_steps in which wsd decays.", identity=True, least=0)
    min_learning_rate_ratio: float = option(
        0.0, "Learning rate at the end of the decay, as a fraction of the peak.", identity=True, least=0
    )
