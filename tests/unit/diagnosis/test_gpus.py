"""What is wrong with GPUs is named, by what nvidia-smi and TensorFlow would say of them."""

import subprocess

import pytest

from tfdist.diagnosis.findings import Finding, State
from tfdist.diagnosis.gpus import Build, Gpu, gpus, read_gpus

H100 = Gpu("NVIDIA H100", "550.54.15", (9, 0), 81559, 4)
V100 = Gpu("Tesla V100", "535.1", (7, 0), 16160, 0)
BLACKWELL = Gpu("NVIDIA GeForce RTX 5090", "580.1", (12, 0), 32607, 0)
WHEEL = Build("12.5.1", ("sm_60", "sm_70", "sm_80", "sm_89", "compute_90"), 1)


def bad(*arguments):
    return [finding for finding in gpus(*arguments) if finding.state is not State.FINE]


@pytest.mark.parametrize(
    ("found", "build", "cudnn", "visible", "words"),
    [
        (
            [H100],
            WHEEL,
            "9.5.1.17",
            None,
            ["cuDNN: 9.5.1.17", "--jit_compile", 'pip install -U "nvidia-cudnn-cu12>=9.24"'],
        ),
        ([H100], Build(WHEEL.cuda, WHEEL.capabilities, 1, "9.10.2"), "9.24.0.43", None, ["cuDNN: 9.10.2"]),
        ([V100], WHEEL, "9.24.0.43", None, ["no convolutions for the V100", "<9.11"]),
        ([H100], WHEEL, "", None, ["cuDNN: none was loaded, and none is installed as a package"]),
        ([H100], Build(), "9.24.0.43", None, ["a build for CPUs", "tensorflow[and-cuda]"]),
        ([H100], Build("12.5.1", WHEEL.capabilities, 0), "9.24.0.43", "", ["CUDA_VISIBLE_DEVICES='' hides all"]),
        ([H100], Build("12.5.1", WHEEL.capabilities, 0), "9.24.0.43", "-1", ["CUDA_VISIBLE_DEVICES='-1' hides all"]),
        ([H100], Build("12.5.1", WHEEL.capabilities, 0), "9.24.0.43", "1", ["TensorFlow sees none"]),
        ([H100], Build("12.5.1", WHEEL.capabilities, 0), "9.24.0.43", None, ["TensorFlow sees none"]),
        ([BLACKWELL], WHEEL, "9.24.0.43", None, ["12.0", "fails there"]),
        ([Gpu("B200", "570.1", (10, 0), 1, 0)], WHEEL, "9.24.0.43", None, ["10.0", "compiles at the first start"]),
        ([Gpu("Tesla K80", "470.1", (3, 7), 1, 0)], WHEEL, "9.24.0.43", None, ["470.1 is too old for CUDA 12.5.1"]),
        ([H100, V100], WHEEL, "9.10.1", None, ["they differ", "NVIDIA H100 (80 GiB), Tesla V100 (16 GiB)"]),
        ([Gpu("NVIDIA H100", "550.1", (9, 0), 81559, 40000)], WHEEL, "9.24", None, ["40,000 of 81,559 MiB are in use"]),
    ],
)
def test_what_is_wrong(found, build, cudnn, visible, words):
    said = "\n".join(map(str, bad(found, build, cudnn, visible)))
    assert all(word in said for word in words), said


def test_what_is_well():
    a100 = Gpu("NVIDIA A100", "550.54.15", (8, 0), 81559, 4)
    assert bad([a100, a100], WHEEL, "9.24.0.43", None) == [] and bad([], Build(), "", None) == []
    (unknown,) = read_gpus(answer("NVIDIA A100, 550.54.15, [N/A], 81559, 4\n"))
    assert bad([unknown], WHEEL, "9.24.0.43", None) == []  # a driver that does not tell the compute capability
    assert bad([H100], WHEEL, "9.24.0.43", None) == []  # "compute_90" of the wheel is also kernels for 9.0
    (found,) = bad([Gpu("B200", "580.1", (10, 0), 1, 0)], WHEEL, "9.24.0.43", None)  # compiled from the code for 9.0
    assert found.state is State.WARNING and "minutes" in found.what
    (found,) = bad([H100], WHEEL, "9.19.0", None)  # an H200 trained ResNet-50 under XLA with it
    assert found.state is State.WARNING


def answer(text, code=0):
    return lambda command, **_: subprocess.CompletedProcess(command, code, text, "")


def test_what_nvidia_smi_says():
    line = "NVIDIA H100 80GB HBM3, 550.54.15, 9.0, 81559, 4\n"
    assert read_gpus(answer(2 * line)) == 2 * [Gpu("NVIDIA H100 80GB HBM3", "550.54.15", (9, 0), 81559, 4)]
    assert read_gpus(answer("NVIDIA GB10, 580.1, 12.1, [N/A], [N/A]\n")) == [Gpu("NVIDIA GB10", "580.1", (12, 1), 0, 0)]
    found = read_gpus(answer("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9))
    assert isinstance(found, Finding) and found.state is State.WRONG and "couldn't communicate" in found.what

    def hangs(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    def absent(*_, **__):
        raise FileNotFoundError

    assert read_gpus(absent) == [] and "the driver hangs" in str(read_gpus(hangs))
