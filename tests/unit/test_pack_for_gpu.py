"""What scripts/pack_for_gpu.py carries to a GPU machine: the code of one GPU; pieces that come back as they were."""

import importlib
import random
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path("scripts").resolve()
PTX, CUBIN = 1, 2
START = 64 + 56  # of what is behind the headers of a library


@pytest.fixture
def part(monkeypatch):
    """Imports a module of scripts/."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


def container(entries, kept=None):
    """Of (kind, architecture), or what is left of it if only `kept` stay: as long as before."""
    made, left = (
        b"".join(
            struct.pack("<HHIQQHHI", kind, 0x0101, 64, 40, 40, 0, 1, which) + bytes(32) + code(kind, which)
            for kind, which in some
        )
        for some in (entries, kept or entries)
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(left)) + left.ljust(len(made), b"\0")


def code(kind, architecture):
    return f"{kind}-{architecture}".encode().ljust(40, b"c")


def library(gpu_code, symbols=b"s" * 100):
    """An ELF file with one segment, GPU code, and symbols that are not loaded."""
    names = b"\0.nv_fatbin\0.symtab\0.names\0"
    bodies = [(1, 1, 2, gpu_code), (12, 2, 0, symbols), (20, 3, 0, names)]  # name, type, flags, bytes
    table, data, at = bytes(64), b"", START
    for name, kind, flags, body in bodies:
        table += struct.pack("<IIQQQQIIQQ", name, kind, flags, 0, at, len(body), 0, 0, 1, 0)
        data, at = data + body, at + len(body)
    head = b"\x7fELF\2\1\1".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, at, 0, 64, 56, 1, 64, len(bodies) + 1, len(bodies)
    )
    segment = struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, START + len(gpu_code), 0, 4096)
    return head + segment + data + table


KEPT = [  # what a container has, for which architecture, and what stays of it
    ([(CUBIN, 80), (CUBIN, 90), (PTX, 90)], 90, [(CUBIN, 90)]),
    ([(PTX, 90), (CUBIN, 60), (CUBIN, 80), (CUBIN, 89)], 89, [(CUBIN, 89)]),
    ([(PTX, 70), (PTX, 80), (PTX, 100), (CUBIN, 80)], 90, [(PTX, 80)]),
    ([(CUBIN, 80), (CUBIN, 89), (PTX, 70)], 86, [(CUBIN, 80), (PTX, 70)]),
    ([(CUBIN, 100)], 90, []),
]


@pytest.mark.parametrize("entries, architecture, kept", KEPT)
def test_code_of_other_gpus_becomes_zeros(part, tmp_path, entries, architecture, kept):
    fatbin, file = part("gpu_pack.fatbin"), tmp_path / "lib.so"
    own, other = (CUBIN, architecture), (CUBIN, 20)
    by_chance = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 40)
    file.write_bytes(library(by_chance + container(entries) + bytes(24) + container([own, other])))
    trimmed = fatbin.trim(file, architecture)
    expected = by_chance + container(entries, kept) + bytes(24) + container([own, other], [own])
    assert file.read_bytes()[START:] == expected
    assert (trimmed.size, trimmed.needed) == (104 * (len(entries) + 2), 104 * (len(kept) + 1))
    assert trimmed.architectures == {each for _, each in [*entries, own, other]}


def test_symbols_go_and_a_second_look_finds_nothing_to_do(part, tmp_path):
    fatbin, file = part("gpu_pack.fatbin"), tmp_path / "lib.so"
    file.write_bytes(library(container([(CUBIN, 90)])))
    fatbin.trim(file, 90)
    once = file.read_bytes()
    assert b"ssss" not in once and fatbin.sections(once) == []
    assert fatbin.trim(file, 90).size == 0 and file.read_bytes() == once


@pytest.fixture
def packed(part, tmp_path):
    """Two pieces of a few files, and what they hold."""
    pieces = part("gpu_pack.pieces")
    contents = {
        "bin/tool": b"#!/bin/sh\n",
        "lib/a.txt": b"alpha" * 50_000,
        "lib/empty.txt": b"",
        "lib/b.so": library(random.Random(1).randbytes(700_000), b"s" * 700_000),
    }
    files = []
    for name, data in contents.items():
        path = tmp_path / "from" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        files.append(pieces.File(name, path))
    files[0].path.chmod(0o755)
    streams = pieces.packed_streams(files, tmp_path / "streams", 1 << 19, jobs=2)
    limit = pieces.INDEX + sum(stream.size for stream in streams) * 2 // 3
    made = pieces.write_pieces(tmp_path, files, {"bin/other": "tool"}, streams, limit)
    assert [path.name for path in made] == ["piece0", "piece1"] and not list(tmp_path.glob("*.tmp"))
    return made, contents


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_pieces_come_back_in_any_order(part, tmp_path, packed, order):
    unpack, (made, contents) = part("gpu_pack.unpack"), packed
    to = tmp_path / "to"
    assert unpack.missing_pieces(str(to)) == "all pieces"
    unpack.unpack([str(made[order[0]])], str(to))
    assert unpack.missing_pieces(str(to)) == f"piece{order[1]}"
    unpack.unpack([str(path) for path in made], str(to))
    assert not unpack.missing_pieces(str(to))
    assert {name: (to / name).read_bytes() for name in contents} == contents
    assert (to / "bin/tool").stat().st_mode & 0o111 and (to / "bin/other").readlink() == Path("tool")


def test_what_is_wrong_with_a_piece_is_one_sentence(part, tmp_path, packed):
    unpack, (made, _) = part("gpu_pack.unpack"), packed
    whole = made[0].read_bytes()
    for data, words in (
        (whole[:-1], f"has {len(whole) - 1:,} bytes instead of {len(whole):,}"),
        (whole[:40], "is truncated"),
        (whole[:9], "is truncated"),
        (b"", "is not a piece"),
        (whole[:-40] + bytes(40), "was corrupted"),
    ):
        made[0].write_bytes(data)
        with pytest.raises(SystemExit, match=f"^unpack: {re.escape(str(made[0]))} .*{words}.*copy it again.$"):
            unpack.unpack([str(made[0])], str(tmp_path / "to"))
    with pytest.raises(SystemExit, match="nothing cannot be read"):
        unpack.unpack([str(tmp_path / "nothing")], str(tmp_path / "to"))
    (tmp_path / "to").mkdir(exist_ok=True)
    (tmp_path / "to" / ".piece-another-0-2").touch()
    with pytest.raises(SystemExit, match="do not belong together"):
        unpack.unpack([str(made[1])], str(tmp_path / "to"))


def test_libraries_of_cuda_13_get_the_names_of_cuda_12(part, tmp_path):
    unpack, to, cuda = part("gpu_pack.unpack"), tmp_path / "to", tmp_path / "nvidia"
    for name in (
        "cu13/lib/libcublas.so.13",
        "cu13/lib/libcufft.so.12",
        "cudnn/lib/libcudnn.so.9",
        "stubs/libcuda.so.1",
    ):
        (cuda / name).parent.mkdir(parents=True, exist_ok=True)
        (cuda / name).touch()
    for _ in range(2):
        unpack.link_libraries(str(to), [str(cuda)])
    links = {path.name: path.readlink().name for path in (to / "cudalib").iterdir()}
    own = {name: name for name in ("libcublas.so.13", "libcufft.so.12", "libcudnn.so.9", *unpack.CARRIED)}
    assert links == {**own, "libcublas.so.12": "libcublas.so.13", "libcufft.so.11": "libcufft.so.12"}
    unpack.write_env(str(to))
    assert (
        f'--xla_gpu_cuda_data_dir={to}/cuda"'
        in subprocess.run(
            ["sh", "-c", f'unset XLA_FLAGS; . {to}/env; env | sed "s/$/\\"/"'], capture_output=True, text=True
        ).stdout
    )


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--capability=H200", "is not like 9.0"),
        ("--piece_mb=1", "use 8 or more"),
        ("--jobs=0", "use 1 or more"),
    ],
)
def test_a_wrong_flag_is_one_sentence(part, monkeypatch, tmp_path, flag, words):
    script = part("pack_for_gpu")
    monkeypatch.setattr(sys, "argv", ["pack_for_gpu.py", f"--out={tmp_path}", flag])
    with pytest.raises(SystemExit, match=f"^pack_for_gpu: {flag}.*{words}.*\\.$"):
        script.read_options()
