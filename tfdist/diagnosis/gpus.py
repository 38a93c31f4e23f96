"""Checks GPUs: are they seen, do driver, TensorFlow's build and cuDNN suit them, is their memory free?"""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.diagnosis.findings import Finding, fine, warning, wrong

_QUERY = ("name", "driver_version", "compute_cap", "memory.total", "memory.used")
_SECONDS = 30.0  # a driver that hangs does not answer at all
_UNKNOWN = (0, 0)  # as a compute capability: drivers too old to tell
_LEAST_DRIVER = 525  # for CUDA 12: https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/#cuda-driver
# Older versions have no kernel for the fused convolution that XLA in TensorFlow 2.21 makes, and fail with "Autotuner
# could not find any supported configs": https://github.com/aws/deep-learning-containers/pull/6417 and 6418.
_LEAST_CUDNN = (9, 24)
_LAST_CUDNN_OF_VOLTA = (9, 10)  # later ones have no convolutions for compute capability 7.0, the V100


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi describes it. Units: MiB."""

    name: str
    driver: str
    capability: tuple[int, int]
    memory: int
    used: int


@dataclasses.dataclass(frozen=True)
class Build:
    """The build of TensorFlow, and the GPUs and cuDNN that it found, as reported by the trial (trial.py)."""

    cuda: str = ""  # "": a build for CPUs
    capabilities: tuple[str, ...] = ()  # "sm_80": kernels; "compute_90": kernels plus code that the driver compiles
    devices: int = 0  # GPUs that TensorFlow sees
    cudnn: str = ""  # the version that TensorFlow loaded; "": none

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Build:
        capabilities = tuple(map(str, fields["capabilities"]))
        return cls(str(fields["cuda"]), capabilities, int(fields["devices"]), str(fields["cudnn"]))


def read_gpus(run: Callable[..., subprocess.CompletedProcess] = subprocess.run) -> list[Gpu] | Finding:
    """Returns the GPUs, [] if there is no NVIDIA driver, or a finding if the driver does not work."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        answer = run(command, capture_output=True, text=True, timeout=_SECONDS)
    except FileNotFoundError:
        return []
    except subprocess.TimeoutExpired:
        return wrong(
            "GPUs", f"nvidia-smi did not answer within {_SECONDS:g} s: the driver hangs.", "reboot the machine."
        )
    except OSError as error:
        return wrong("GPUs", f"nvidia-smi cannot be run ({error.strerror}).", "reinstall the driver.")
    if answer.returncode:
        words = (answer.stdout + answer.stderr).strip().splitlines()
        return wrong("GPUs", f"nvidia-smi reports: {words[0] if words else 'nothing'}", "load or reinstall the driver.")
    return [_parse(line) for line in answer.stdout.splitlines() if line.count(",") == len(_QUERY) - 1]


def _parse(line: str) -> Gpu:
    name, driver, capability, memory, used = (cell.strip() for cell in line.split(","))
    major, minor = map(int, capability.split(".")) if re.fullmatch(r"\d+\.\d+", capability) else _UNKNOWN
    amounts = [int(amount) if amount.isdecimal() else 0 for amount in (memory, used)]
    return Gpu(name, driver, (major, minor), *amounts)


def gpus(found: Sequence[Gpu], build: Build, cudnn: str, visible: str | None) -> list[Finding]:
    """Returns the findings about GPUs. cudnn: the version of the cuDNN package, "" if there is none; it counts if no
    cuDNN was loaded. visible: CUDA_VISIBLE_DEVICES."""
    if not found:
        return [fine("GPUs", "none here: training runs on the CPU")]
    names = ", ".join(sorted({f"{gpu.name} ({gpu.memory / 1024:.0f} GiB)" for gpu in found}))
    findings = [_seen(found, build, visible) or fine("GPUs", f"{len(found)} x {names}, driver {found[0].driver}")]
    if len({(gpu.name, gpu.memory) for gpu in found}) > 1:
        findings.append(
            warning(
                "GPUs",
                f"they differ: {names}.",
                "choose identical ones by CUDA_VISIBLE_DEVICES: the slowest sets the pace.",
            )
        )
    findings += [finding for gpu in dict.fromkeys(found) for finding in _of_one(gpu, build)]
    return findings + ([_cudnn(found, build.cudnn or cudnn)] if build.cuda else [])


def _seen(found: Sequence[Gpu], build: Build, visible: str | None) -> Finding | None:
    if not build.cuda:
        return wrong(
            "GPUs",
            f"{len(found)} were found, but this TensorFlow is a build for CPUs.",
            'pip install "tensorflow[and-cuda]~=2.21.0" in place of tensorflow-cpu.',
        )
    if build.devices:
        return None
    if visible is not None and visible.strip() in ("", "-1"):
        return wrong("GPUs", f"CUDA_VISIBLE_DEVICES={visible!r} hides all.", "unset it.")
    return wrong(
        "GPUs",
        f"{len(found)} were found, but TensorFlow sees none: it does not find CUDA's libraries, or they do not match.",
        'pip install "tensorflow[and-cuda]~=2.21.0"; python -c "import tensorflow" shows which library is missing.',
    )


def _of_one(gpu: Gpu, build: Build) -> list[Finding]:
    findings = []
    if (driver := re.match(r"\d+", gpu.driver)) and int(driver[0]) < _LEAST_DRIVER:
        findings.append(
            wrong(
                f"driver of {gpu.name}",
                f"{gpu.driver} is too old for CUDA {build.cuda or '12'}.",
                f"install driver {_LEAST_DRIVER} or newer.",
            )
        )
    known = gpu.capability != _UNKNOWN
    if known and build.capabilities and (finding := _capability(gpu, build.capabilities)):
        findings.append(finding)
    if gpu.memory and gpu.used > 0.1 * gpu.memory:
        findings.append(
            warning(
                f"memory of {gpu.name}",
                f"{gpu.used:,} of {gpu.memory:,} MiB are in use.",
                "end what nvidia-smi lists, or choose another GPU by CUDA_VISIBLE_DEVICES.",
            )
        )
    return findings


def _capability(gpu: Gpu, capabilities: Sequence[str]) -> Finding | None:
    """Kernels run on GPUs with the same major number and the same or a higher minor number; code for the driver's
    compiler runs on all later GPUs (CUDA C++ Programming Guide, "Binary Compatibility", "PTX Compatibility")."""
    compiled = [_version(each) for each in capabilities]  # "compute_90": kernels, and code for later GPUs
    if any(major == gpu.capability[0] and minor <= gpu.capability[1] for major, minor in compiled):
        return None
    name, number = f"compute capability of {gpu.name}", ".".join(map(str, gpu.capability))
    if gpu.capability < min(compiled):
        return wrong(
            name, f"{number}, but TensorFlow has {', '.join(capabilities)}: it cannot run there.", "use a newer GPU."
        )
    if gpu.capability[0] >= 12:  # others have tried this with 2.21: CUDA_ERROR_INVALID_HANDLE and the like
        return wrong(
            name,
            (
                f"{number}, but TensorFlow has {', '.join(capabilities)}, and the code that drivers compile from it"
                " fails there."
            ),
            "use TensorFlow built for it (NVIDIA's container, or from source).",
        )
    return warning(
        name,
        f"{number}, but TensorFlow has {', '.join(capabilities)}: the driver compiles at the first start (minutes).",
        "set CUDA_CACHE_PATH to a persistent folder, and CUDA_CACHE_MAXSIZE=4294967296.",
    )


def _version(capability: str) -> tuple[int, int]:
    digits = capability.rpartition("_")[2].rstrip("af")
    return int(digits[:-1]), int(digits[-1])


def _cudnn(found: Sequence[Gpu], cudnn: str) -> Finding:
    if not cudnn:
        return warning(
            "cuDNN",
            "none was loaded, and none is installed as a package; its version is not known.",
            f"check that it is {_LEAST_CUDNN[0]}.{_LEAST_CUDNN[1]} or newer.",
        )
    version = tuple(int(part) for part in re.findall(r"\d+", cudnn)[:2])
    if any(gpu.capability == (7, 0) for gpu in found) and version > _LAST_CUDNN_OF_VOLTA:
        return wrong(
            "cuDNN",
            f"{cudnn} has no convolutions for the V100.",
            'pip install "nvidia-cudnn-cu12<9.11", without --jit_compile.',
        )
    if version < _LEAST_CUDNN and not any(gpu.capability == (7, 0) for gpu in found):
        return warning(
            "cuDNN",
            f"{cudnn}: convolutions are known to fail under XLA (--jit_compile) with this TensorFlow; check whether"
            " those tried here are right (arithmetic).",
            f'pip install -U "nvidia-cudnn-cu12>={_LEAST_CUDNN[0]}.{_LEAST_CUDNN[1]}".',
        )
    return fine("cuDNN", cudnn)
