"""The options of a cluster: its workers, the strategy, how a model is spread over them, parameter servers."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.config.options import option
from tfdist.control.time_limit import MOST_SECONDS


@dataclass(frozen=True)
class ClusterConfig:
    """How workers find each other, and the threads of each."""

    startup_timeout: float = option(300.0, "Seconds to wait for every peer to appear.", least=1, most=MOST_SECONDS)
    heartbeat_timeout: float = option(
        10.0, "Seconds of silence after which a peer is considered dead.", least=1, most=MOST_SECONDS
    )
    job_token_file: str = option(
        "",
        "File (mode 0600) with the secret that the workers of a job share; without it, TFDIST_JOB_TOKEN in the"
        " environment, which tfdist.launch sets.",
    )
    step_timeout: float = option(
        600.0,
        "Seconds that one call of the training function (at most 100 steps) may take before the run is considered"
        " stuck. 0: no limit.",
        least=0,
        most=MOST_SECONDS,
    )
    first_step_timeout: float = option(
        1800.0, "The same for the first call, which also traces and compiles.", least=0, most=MOST_SECONDS
    )
    eval_timeout: float = option(3600.0, "The same for one evaluation.", least=0, most=MOST_SECONDS)
    save_timeout: float = option(
        1800.0, "The same for one save, as far as training waits for it, and for restoring.", least=0, most=MOST_SECONDS
    )
    grace_period: float = option(
        30.0,
        "Seconds that the platform gives between SIGTERM and SIGKILL: within it all is saved, or the process reports"
        " that it is not.",
        least=1,
        most=MOST_SECONDS,
    )
    preemption_notice: str = option(
        "none",
        "Where to ask whether this machine is about to be taken away, in addition to SIGTERM. gce: Google Compute"
        " Engine's metadata server.",
        choices=("none", "gce"),
    )
    straggler_factor: float = option(
        1.5, "A worker that computes this many times as long as the others is reported. 0: none.", least=0
    )
    intra_op_threads: int = option(
        0, "Threads within one TensorFlow operation. 0: TensorFlow decides.", least=0, most=4096
    )
    inter_op_threads: int = option(
        0, "Operations that run at the same time. 0: TensorFlow decides.", least=0, most=4096
    )
    soft_placement: bool = option(
        True,
        "On GPUs: operations that no GPU can run are run on the host. --nosoft_placement: one for which a GPU was asked"
        " ends the run.",
    )


@dataclass(frozen=True)
class StrategyConfig:
    """Which Runtime, and how it communicates."""

    strategy: str = option(
        "auto",
        "auto: parameter_server if TF_CONFIG lists ps, multi_worker if it lists several workers, horovod under"
        " horovodrun or Open MPI's mpirun, mirrored if there are several local GPUs, else one_device. sockets: plain"
        " processes over TCP, without tf.distribute; one device each. mesh: see --mesh. package.module:NAME: your own"
        " (examples/own_runtime.py).",
        key=True,
    )
    virtual_devices: int = option(
        0, "With --strategy=mirrored: this many CPU devices instead of the local GPUs.", least=0
    )
    communication: str = option(
        "auto",
        "How gradients travel between workers. socket: our own ring over TCP (CPU); ring: TensorFlow's, over gRPC;"
        " nccl: NVIDIA's. auto: nccl on GPUs; on the CPU socket, with shared memory between neighbors on one host.",
        choices=("auto", "socket", "ring", "nccl"),
    )
    pack_mb: float = option(
        1.0,
        "Gradients are reduced in packs of about this many MB, so that the first packs travel while the backward pass"
        " is running. 0: one pack per tensor.",
        least=0,
    )
    collective_timeout: float = option(
        1800.0,
        "Seconds after which a collective that does not end is an error. Must exceed the longest save or evaluation. 0:"
        " never.",
        least=0,
        most=MOST_SECONDS,
    )
    horovod_fusion_mb: float = option(
        64.0,
        "With --strategy=horovod: gradients are reduced in groups of about this many MB. 0: one by one, as"
        " --deterministic does over three and more workers.",
        least=0,
    )
    horovod_cycle_ms: float = option(
        1.0, "With --strategy=horovod: milliseconds between two checks for gradients that are ready.", least=0
    )
    horovod_compression: str = option(
        "none",
        "With --strategy=horovod: the type that gradients are sent in. fp16: half the bytes.",
        choices=("none", "fp16"),
    )


@dataclass(frozen=True)
class ParallelConfig:
    """--strategy=mesh: how models larger than a device are spread over workers."""

    mesh: str = option(
        "",
        "Axes over all workers: pipe, data, expert, model, for example data=2,model=2. data, if left out, takes the"
        " workers that remain.",
        key=True,
    )
    zero: int = option(
        0,
        "What the data axis shards instead of replicating. 1: optimizer state; 2: gradients too; 3: parameters too.",
        least=0,
        key=True,
    )
    pipe_schedule: str = option(
        "1f1b",
        "Order of a pipeline's work. gpipe: all micro-batches forward, then all backward; 1f1b: in turn, which keeps"
        " fewer.",
        choices=("gpipe", "1f1b"),
    )
    pipe_chunks: int = option(
        1,
        "Parts of the model on each stage of the pipeline. More than 1: interleaved, a smaller bubble for more"
        " traffic.",
        least=1,
    )
    pipe_cut: str = option(
        "",
        "Blocks with which the parts of the pipeline after the first begin, for example block_02,block_05. Empty:"
        " balanced by parameters.",
    )
    sequence_parallel: bool = option(
        False,
        "Between the layers that are spread over the model axis, each worker has only its share of the positions.",
    )
    offload: str = option(
        "none", "Keep optimizer state and master weights in host memory.", choices=("none", "optimizer")
    )
    recompute: str = option(
        "none",
        "Activations that are recomputed in the backward pass instead of kept.",
        choices=("none", "block", "attention"),
    )
    compression: str = option(
        "none",
        "How gradients travel between workers: all on a mesh, bf16 also on multi_worker, mirrored and sockets. int8,"
        " topk and powersgd carry their error to the next step.",
        choices=("none", "fp16", "bf16", "int8", "topk", "powersgd"),
        identity=True,
    )
    compression_after: int = option(
        1000,
        "With --compression=topk or powersgd: steps at the beginning in which gradients travel whole.",
        identity=True,
        least=0,
    )
    all_reduce: str = option(
        "flat",
        "How the sum over workers of a mesh is made. hierarchical: within each host first, then across hosts.",
        choices=("flat", "hierarchical"),
    )
    workers_per_host: int = option(
        0,
        "With --all_reduce=hierarchical: so many consecutive workers count as one host. 0: hosts are taken from the"
        " workers' addresses.",
        least=0,
    )


@dataclass(frozen=True)
class ParameterServerConfig:
    """--strategy=parameter_server: how updates reach the weights, and how old they may be."""

    ps_mode: str = option(
        "async",
        "async: each worker's gradient is an update of its own; sync: one update a step, from all workers.",
        choices=("async", "sync"),
    )
    max_staleness: int = option(
        -1,
        "async: a gradient of weights that are more than this many updates old is dropped, and its batch is repeated."
        " -1: none.",
        least=-1,
    )
    staleness_scaling: bool = option(
        False,
        "async: divide the learning rate of an update by 1 + its staleness (Zhang et al. 2016, arXiv:1511.05950).",
    )
    backup_workers: int = option(
        0,
        "sync: this many workers more than the parts of a step: they repeat the slowest parts, and the first result"
        " counts.",
        least=0,
    )
    ps_piece_kb: float = option(
        256.0,
        "A variable is cut into pieces, one per parameter server, if these have at least this many KB. 0: never.",
        least=0,
    )
