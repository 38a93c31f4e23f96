"""Unpacks the pieces made by scripts/pack_for_gpu.py, on a machine without a network.

    python3 unpack.py PIECE... [--to=FOLDER] [--cuda=FOLDER,FOLDER]
    . FOLDER/env

Pieces may come in any order and in several calls; a piece that is already unpacked is skipped. After the last one, the
script links the CUDA libraries of the machine, writes FOLDER/env (to be sourced in a shell) and checks that all
libraries open. Run it again without pieces to repeat these steps. --cuda: folders with CUDA libraries; by default the
nvidia-* packages beside the Python that runs this script (so use the Python that has PyTorch), and /usr/local/cuda.

Prerequisites: Linux on x86-64, any Python from 3.8 on with lzma, 2 GB of disk. It imports only the standard library.
"""

from __future__ import annotations  # makes Python 3.8 accept list[str]

import argparse
import glob
import json
import lzma
import os
import struct
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

MAGIC = b"TFDPIECE"
# TensorFlow 2.21 opens the left names; the first right name that exists is used. CUDA 13's libraries have worked.
NAMES = {
    "libcublas.so.12": ("libcublas.so.12", "libcublas.so.13"),
    "libcublasLt.so.12": ("libcublasLt.so.12", "libcublasLt.so.13"),
    "libcufft.so.11": ("libcufft.so.11", "libcufft.so.12"),
    "libcusolver.so.11": ("libcusolver.so.11", "libcusolver.so.12"),
    "libcusparse.so.12": ("libcusparse.so.12",),
    "libnvJitLink.so.12": ("libnvJitLink.so.12", "libnvJitLink.so.13"),
    "libcudnn.so.9": ("libcudnn.so.9",),
    "libnccl.so.2": ("libnccl.so.2",),
}
CARRIED = ("libcudart.so.12", "libcupti.so.12")  # CUDA 13's do not work: their functions have other arguments
OPENED = ("libcuda.so.1", *CARRIED, *(name for name in NAMES if "nvJitLink" not in name))
ENV = """# Made by unpack.py: source it in a shell.
export PATH="{to}/bin:{to}/cuda/bin:$PATH"
export LD_LIBRARY_PATH="{to}/cudalib:{to}/lib{driver}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
export XLA_FLAGS="--xla_gpu_cuda_data_dir={to}/cuda${{XLA_FLAGS:+ $XLA_FLAGS}}"
export CUDA_MODULE_LOADING=LAZY
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV
"""
# Where NVIDIA's container runtimes put the driver of the host.
DRIVERS = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib")


class Stream(NamedTuple):
    """Compressed bytes in a piece, and where they go. parts: a list of (number of the file, offset, length)."""

    piece: str
    offset: int
    size: int
    crc: int
    parts: list


class Piece(NamedTuple):
    path: str
    index: dict
    streams: list[Stream]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", metavar="PIECE")
    parser.add_argument("--to", default=os.path.expanduser("~/tfdist-gpu"), help="default: %(default)s")
    parser.add_argument("--cuda", default="", help="folders with the libraries of CUDA")
    given = parser.parse_args(arguments)
    to = os.path.abspath(given.to)
    if any(mark in to for mark in ' :"$'):
        raise SystemExit(f"unpack: --to={given.to}: a space, ':', '\"' or '$' would end a path in env: choose another.")
    unpack(given.pieces, to)
    missing = missing_pieces(to)
    if missing and not given.pieces:
        raise SystemExit(f"unpack: --to={given.to} still lacks {missing}: add those pieces, too.")
    if missing:
        print(f"unpack: {to} still lacks {missing}", flush=True)
        return
    link_libraries(to, given.cuda.split(",") if given.cuda else default_folders())
    write_env(to)
    check(to)


# Pieces


def read_piece(path: str) -> Piece:
    """Reads the index of a piece, and checks that the piece is complete."""
    try:
        with open(path, "rb") as file:
            head = file.read(len(MAGIC) + 4)
            if not head.startswith(MAGIC) or len(head) < len(MAGIC) + 4:
                raise SystemExit(f"unpack: {path} is not a piece of pack_for_gpu, or is truncated: copy it again.")
            (length,) = struct.unpack("<I", head[len(MAGIC) :])
            index = json.loads(lzma.decompress(file.read(length)))
            size = os.fstat(file.fileno()).st_size
    except (lzma.LZMAError, EOFError):
        raise SystemExit(f"unpack: {path} is truncated or was changed: copy it again.") from None
    except OSError as error:
        raise SystemExit(f"unpack: {path} cannot be read ({error.strerror}): name a piece.") from None
    streams, offset = [], len(head) + length
    for entry in index["streams"]:
        streams.append(Stream(path, offset, entry["size"], entry["crc"], entry["parts"]))
        offset += entry["size"]
    if size != offset:
        raise SystemExit(f"unpack: {path} has {size:,} bytes instead of {offset:,}: copy it again.")
    return Piece(path, index, streams)


def unpack(paths: list[str], to: str) -> None:
    """Writes the files. A piece is marked as unpacked once all of it is written."""
    started = time.time()
    pieces = [read_piece(path) for path in paths]
    builds = {piece.index["build"] for piece in pieces} | {name.split("-")[1] for name in marks(to)}
    if len(builds) > 1:
        raise SystemExit(
            f"unpack: --to={to}: these pieces do not belong together; use those of one folder, and an empty folder for"
            " --to."
        )
    os.makedirs(to, exist_ok=True)
    pieces = [piece for piece in pieces if mark(piece) not in marks(to)]
    for piece in pieces[:1]:  # all have the same lists of files and links
        make_files(piece.index, to)
    streams = sorted((stream for piece in pieces for stream in piece.streams), key=lambda stream: -stream.size)
    files = pieces[0].index["files"] if pieces else []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # lzma and zlib release the GIL
        for count, _ in enumerate(pool.map(lambda stream: write(stream, files, to), streams), 1):
            print(f"\runpack: {count} of {len(streams)}", end="", file=sys.stderr, flush=True)
    for piece in pieces:
        open(os.path.join(to, mark(piece)), "w").close()
    print(f"\runpack: {len(pieces)} new pieces in {time.time() - started:.1f} s", file=sys.stderr, flush=True)


def mark(piece: Piece) -> str:
    return ".piece-{build}-{piece}-{pieces}".format(**piece.index)


def marks(to: str) -> list[str]:
    return [os.path.basename(path) for path in glob.glob(os.path.join(glob.escape(to), ".piece-*"))]


def missing_pieces(to: str) -> str:
    """Returns the names of the missing pieces; "" if all are there."""
    there = [name.split("-") for name in marks(to)]
    if not there:
        return "all pieces"
    numbers = {int(words[2]) for words in there}
    return ", ".join(f"piece{number}" for number in range(int(there[0][3])) if number not in numbers)


def make_files(index: dict, to: str) -> None:
    """Creates all files in their final size, and the links."""
    for name, size, mode in index["files"]:
        path = os.path.join(to, name)
        if not os.path.exists(path) or os.path.getsize(path) != size:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.truncate(size)
            os.chmod(path, mode | 0o200)
    for name, target in index["links"]:
        link(target, os.path.join(to, name))


def link(target: str, path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(path):
        os.unlink(path)
    if not os.path.exists(path):
        os.symlink(target, path)


def write(stream: Stream, files: list, to: str) -> None:
    with open(stream.piece, "rb") as file:
        file.seek(stream.offset)
        packed = file.read(stream.size)
    try:
        data = lzma.decompress(packed)
    except lzma.LZMAError:
        data = b""
    if zlib.crc32(data) != stream.crc:
        raise SystemExit(f"unpack: {stream.piece} was corrupted on the way (a CRC is wrong): copy it again.")
    at = 0
    for number, offset, length in stream.parts:
        with open(os.path.join(to, files[number][0]), "r+b") as file:
            file.seek(offset)
            file.write(memoryview(data)[at : at + length])
        at += length


# The machine


def default_folders() -> list[str]:
    beside = [os.path.join(folder, "nvidia") for folder in sys.path if folder.endswith("-packages")]
    return [*beside, "/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"]


def link_libraries(to: str, folders: list[str]) -> None:
    """Links all CUDA libraries in TO/cudalib, by their own names (they load each other) and by TensorFlow's names."""
    found = {name: os.path.join(to, "cuda", "lib", name) for name in CARRIED}
    for folder in folders:
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "**", "lib*.so.*"), recursive=True)):
            name = os.path.basename(path)
            if not name.startswith(("libcuda.so", "libnvidia-ml")):  # stubs of the driver
                found.setdefault(name, os.path.realpath(path))
    for name, others in NAMES.items():
        taken = next((other for other in others if other in found), None)
        if taken:
            found[name] = found[taken]
    for old in glob.glob(os.path.join(glob.escape(to), "cudalib", "*")):
        os.unlink(old)
    for name, target in found.items():
        link(target, os.path.join(to, "cudalib", name))
    known = subprocess.run("ldconfig -p || /sbin/ldconfig -p", shell=True, stdout=subprocess.PIPE).stdout.decode()
    for path in glob.glob(os.path.join(glob.escape(to), "extra", "*")):  # Python needs these; the system may lack them
        name = os.path.basename(path)
        if name + " " not in known:
            link(path, os.path.join(to, "lib", name))


def write_env(to: str) -> None:
    driver = "".join(f":{folder}" for folder in DRIVERS if os.path.isdir(folder))
    path = os.path.join(to, "env")
    with open(path + ".tmp", "w") as file:
        file.write(ENV.format(to=to, driver=driver))
    os.replace(path + ".tmp", path)


def check(to: str) -> None:
    """Compiles Python's files, and opens each library as TensorFlow will."""
    code = (
        "import compileall, ctypes, sys\n"
        f"compileall.compile_dir({to!r} + '/lib', quiet=2, workers=0)\n"
        f"for name in {OPENED!r}:\n"
        "    try: ctypes.CDLL(name)\n"
        "    except OSError as error: print(f'  {name}: {error}')\n"
    )
    command = ["sh", "-c", f'. "{to}/env"; exec python -c "$0"', code]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = done.stdout.decode(errors="replace")
    if done.returncode:
        raise SystemExit(
            f"unpack: {to}/bin/python does not start here: is this system older than the one that packed?"
            f"\n{said[-2000:]}"
        )
    if said:
        raise SystemExit(
            f"unpack: these libraries do not open; set where they are with --cuda=FOLDER:\n{said.rstrip()}"
        )
    print(f"unpack: all {len(OPENED)} libraries open. Now: . {to}/env", flush=True)


if __name__ == "__main__":
    main()
