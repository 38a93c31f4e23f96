"""Packs Python, TensorFlow and tfdist for a GPU machine without a network, into files of a limited size.

    python scripts/pack_for_gpu.py --out=FOLDER [--capability=9.0] [--piece_mb=58] [--also=scikit-learn,pytest]
                                   [--exclude=NAME,NAME] [--jobs=2]

Carry FOLDER/unpack.py and FOLDER/piece* to the machine and run there, with the Python that has PyTorch:

    python3 unpack.py piece* --to=/opt/tfdist && . /opt/tfdist/env && python -m tfdist.doctor

It packs the virtual environment that it runs in: its Python, the packages that tfdist needs (--also: add others;
--exclude: leave these out), and tfdist itself. TensorFlow's wheel has machine code for five kinds of GPUs. Only the
code for --capability is kept (see nvidia-smi --query-gpu=compute_cap; 8.0 A100, 8.9 L4, 9.0 H100 and H200), and debug
names are removed: 1.7 GB shrink to about four pieces. cuDNN, cuBLAS, NCCL and the like are not packed: unpack.py links
those of the machine, CUDA 13's under the names of CUDA 12. The small libraries that must be of CUDA 12 are taken from
wheels in FOLDER/wheels, which pip downloads if they are missing. A second call resumes where the first was stopped;
FOLDER/work may be deleted.

Prerequisites: Linux on x86-64; an environment with requirements.txt whose Python comes from pyenv, uv, conda or the
like (not from the system in /usr); pip, or the three wheels; 3 GB of disk and 1 GB of memory for each of --jobs. On the
other machine: a C library no older than here, a driver for CUDA 12 or 13, libraries of CUDA 13 and cuDNN 9, a Python
with lzma.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_pack import unpack
from gpu_pack.fatbin import trim
from gpu_pack.pieces import LONGEST, MIB, File, is_library, packed_streams, write_pieces

try:
    from packaging.requirements import Requirement  # required by TensorFlow
except ModuleNotFoundError:
    raise SystemExit(
        f"pack_for_gpu: {sys.executable} has no TensorFlow: run this script with the Python of the environment"
        " to be packed."
    ) from None

REPOSITORY = Path(__file__).resolve().parents[1]
BASE = Path(sys.base_prefix).resolve()
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"lib/{VERSION}/site-packages"
WANTED = ("tensorflow", "keras", "absl-py", "google-crc32c", "numpy", "rich", "tensorboard")  # as in pyproject.toml
# Dependencies of these packages that no training needs.
EXCLUDED = "libclang,tensorboard-data-server,pillow,setuptools,wheel"
NOT_OF_PYTHON = re.compile(
    r"(^|/)(__pycache__|tests?|idlelib|tkinter|turtledemo|ensurepip|lib2to3|pydoc_data|config-[^/]*|site-packages)/"
    r"|(^|/)_(tkinter|test)[^/]*\.so$|\.a$"
)
NOT_OF_PACKAGES = re.compile(
    r"(^|/)__pycache__/|^\.\.|\.(pyi|a|h|hpp|pxd|map)$|^tensorflow/(include|xla_aot)"
    r"|^(numpy|h5py|psutil|scipy|sklearn)/(.*/)?tests/|^keras/.*_test\.py$|^tensorboard/webfiles\.zip$"
)
OF_EVERY_SYSTEM = re.compile(r"lib(c|m|dl|pthread|resolv|rt|util)\.so|ld-linux|linux-vdso")
# TensorFlow 2.21 has trained with these versions. Destination of a file -> its path in the wheel.
WHEELS = {
    "nvidia-cuda-runtime-cu12==12.9.79": {"cuda/lib/libcudart.so.12": "nvidia/cuda_runtime/lib/libcudart.so.12"},
    "nvidia-cuda-cupti-cu12==12.8.90": {"cuda/lib/libcupti.so.12": "nvidia/cuda_cupti/lib/libcupti.so.12"},
    "nvidia-cuda-nvcc-cu12==12.9.86": {
        "cuda/bin/ptxas": "nvidia/cuda_nvcc/bin/ptxas",
        "cuda/nvvm/libdevice/libdevice.10.bc": "nvidia/cuda_nvcc/nvvm/libdevice/libdevice.10.bc",
    },
}


@dataclass(frozen=True)
class Options:
    out: Path
    architecture: int  # 90 for --capability=9.0
    piece: int  # bytes
    packages: tuple[str, ...]
    exclude: frozenset[str]
    jobs: int

    @property
    def work(self) -> Path:
        return self.out / "work"


def main() -> None:
    options = read_options()
    options.work.mkdir(parents=True, exist_ok=True)
    files, links = python_files(options)
    files += package_files(options)
    files += [File(f"{SITE}/{path.relative_to(REPOSITORY)}", path) for path in own_files()]
    files += cuda_files(options)
    size = sum(file.path.stat().st_size for file in files)
    say(f"{len(files)} files, {size / 1e6:,.0f} MB; compressing takes tens of minutes of a core")
    streams = packed_streams(files, options.work / "streams", min(LONGEST, options.piece - 2 * MIB), options.jobs)
    pieces = write_pieces(options.out, files, links, streams, options.piece)
    shutil.copyfile(unpack.__file__, options.out / "unpack.py")
    for piece in pieces:
        say(f"{piece}: {piece.stat().st_size / 1e6:.1f} MB")
    say(f"copy these and {options.out / 'unpack.py'} to the other machine; there: python3 unpack.py piece*")


def say(text: str) -> None:
    print(f"pack_for_gpu: {text}", flush=True)


def read_options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for the pieces")
    parser.add_argument("--capability", default="9.0", help="compute capability of the GPU (default 9.0)")
    parser.add_argument("--piece_mb", type=int, default=58, help="largest size of a piece in MiB (default 58)")
    parser.add_argument("--also", default="", help="further packages of this environment, with what they need")
    parser.add_argument("--exclude", default=EXCLUDED, help="packages to leave out (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="streams compressed at a time")
    given = parser.parse_args()
    if not re.fullmatch(r"\d+\.\d", given.capability):
        raise SystemExit(
            f"pack_for_gpu: --capability={given.capability} is not like 9.0: see nvidia-smi"
            " --query-gpu=compute_cap --format=csv."
        )
    if given.piece_mb < 8:
        raise SystemExit(f"pack_for_gpu: --piece_mb={given.piece_mb}: the index alone has 1 MiB: use 8 or more.")
    if given.jobs < 1:
        raise SystemExit(f"pack_for_gpu: --jobs={given.jobs}: use 1 or more.")
    if str(BASE) == "/usr":
        raise SystemExit(
            f"pack_for_gpu: {sys.executable} belongs to the system's Python, which works in /usr only: run this script"
            " in an environment of a Python of pyenv, uv or conda."
        )
    also = tuple(name for name in given.also.split(",") if name)
    return Options(
        out=Path(given.out).resolve(),
        architecture=int(given.capability.replace(".", "")),
        piece=given.piece_mb * MIB,
        packages=WANTED + also,
        exclude=frozenset(normal(name) for name in given.exclude.split(",")),
        jobs=given.jobs,
    )


# Python


def python_files(options: Options) -> tuple[list[File], dict[str, str]]:
    """Returns the interpreter, its standard library and the shared libraries that these open; and the links."""
    program = Path(sys.executable).resolve()
    found = {f"bin/{VERSION}": program}
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*")):
        name = path.relative_to(library).as_posix()
        if path.is_file() and not NOT_OF_PYTHON.search(name):
            found[f"lib/{VERSION}/{name}"] = path
    for path in opened_libraries([path for path in found.values() if path == program or path.suffix == ".so"]):
        is_pythons = path.resolve().is_relative_to(BASE)
        found[f"{'lib' if is_pythons else 'extra'}/{path.name}"] = path.resolve()
    files = [File(name, stripped(name, path, options.work)) for name, path in found.items()]
    return files, {f"bin/{name}": VERSION for name in ("python", "python3")}


def opened_libraries(programs: list[Path]) -> list[Path]:
    """Returns the libraries that the dynamic linker opens for these programs, except the C library."""
    done = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True)
    found = dict(re.findall(r"(\S+) => (/\S+) \(", done.stdout))
    return [Path(path).with_name(name) for name, path in sorted(found.items()) if not OF_EVERY_SYSTEM.match(name)]


def stripped(name: str, path: Path, work: Path) -> Path:
    """Returns a copy without debug names if the system has `strip`; `path` itself if there is nothing to do."""
    if not shutil.which("strip") or (".so" not in name and not name.startswith("bin/")):
        return path
    copy = work / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["strip", "--strip-unneeded", "-o", str(copy), str(path)], capture_output=True)
    return path if done.returncode else copy


# Packages


def normal(name: str) -> str:
    """Normalizes a package name as in PEP 503."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def distributions(options: Options) -> Iterator[importlib.metadata.Distribution]:
    """Yields the wanted packages and all packages that they require."""
    waiting, seen = list(options.packages), set(options.exclude)
    while waiting:
        name = normal(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise SystemExit(
                f"pack_for_gpu: {sys.prefix} has no package {name}: pip install {name}, or leave it out"
                f" with --exclude={','.join(sorted(options.exclude))},{name}."
            ) from None
        yield distribution
        required = [Requirement(text) for text in distribution.requires or []]
        waiting += [each.name for each in required if not each.marker or each.marker.evaluate({"extra": ""})]


def package_files(options: Options) -> list[File]:
    found: list[File] = []
    for distribution in distributions(options):
        for each in distribution.files or []:
            path = Path(str(distribution.locate_file(each)))
            if not NOT_OF_PACKAGES.search(each.as_posix()) and path.is_file():
                found.append(File(f"{SITE}/{each.as_posix()}", path))
    return [of_one_gpu(file, options) if is_tensorflows(file) else file for file in found]


def is_tensorflows(file: File) -> bool:
    return file.name.startswith(f"{SITE}/tensorflow/") and is_library(file.path)


def of_one_gpu(file: File, options: Options) -> File:
    """Returns a copy of the library with code for one GPU only, and without debug names."""
    copy = options.work / file.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    temporary = copy.with_name(copy.name + ".tmp")
    shutil.copyfile(file.path, temporary)
    shutil.copymode(file.path, temporary)
    done = trim(temporary, options.architecture)
    temporary.rename(copy)
    capability = f"{options.architecture / 10:.1f}"
    had = ", ".join(f"{each / 10:.1f}" for each in sorted(done.architectures))
    if done.size:
        say(f"{file.path.name}: code for {capability} is {done.needed / 1e6:.0f} of {done.size / 1e6:.0f} MB ({had})")
    if done.size and not done.needed:
        raise SystemExit(f"pack_for_gpu: --capability={capability}: {file.path} has code for {had} only.")
    if file.path.name.startswith("libtensorflow_cc.") and not done.size:
        raise SystemExit(f"pack_for_gpu: {file.path} has no code for GPUs: pip install tensorflow, not tensorflow-cpu.")
    return File(file.name, copy, layout=file.path)


def own_files() -> list[Path]:
    """Returns the files of tfdist itself."""
    paths = sorted((REPOSITORY / "tfdist").rglob("*"))
    return [path for path in paths if path.is_file() and path.parent.name != "__pycache__"]


# CUDA


def cuda_files(options: Options) -> list[File]:
    """Extracts the small files of CUDA 12 from their wheels."""
    found = []
    for requirement, members in WHEELS.items():
        wheel = wheel_of(requirement, options.out / "wheels")
        with zipfile.ZipFile(wheel) as opened:
            for name, member in members.items():
                path = options.work / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(opened.read(member))
                path.chmod(0o755)
                found.append(File(name, path))
    return found


def wheel_of(requirement: str, folder: Path) -> Path:
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        say(f"downloading {requirement}")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", requirement]
        if subprocess.run([*command, "--dest", str(folder)]).returncode or not list(folder.glob(pattern)):
            raise SystemExit(f"pack_for_gpu: pip could not download {requirement}: put its wheel into {folder}.")
    return next(folder.glob(pattern))


if __name__ == "__main__":
    main()
