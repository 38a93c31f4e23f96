"""The command line: turns the options of config/ into absl flags, reads flag files, writes the resolved options.

Only the commands import this. Intentional differences from plain absl:
- The command line always wins over flag files, wherever `--flagfile` stands (absl: the last one by position).
- A nested flag file is looked up next to the file that names it, then in the working directory.
- Quotes around a value in a flag file, and a comment behind a value, are refused (absl: part of the value).
- `--help` shows only the most used flags, by component; `--helpfull` shows all.
No TensorFlow import: `--help` and `--dry_run` must answer at once.
"""

from __future__ import annotations

import dataclasses
import platform
import re
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tfdist.control import optional_packages

optional_packages.end_without_packages()  # before the first import of a third-party package

from absl import flags as absl_flags  # noqa: E402

from tfdist import __version__  # noqa: E402
from tfdist.config import COMPONENTS, Config, check_option, check_utf8, is_switch  # noqa: E402
from tfdist.control.command_parser import CommandParser  # noqa: E402
from tfdist.control.exit_codes import ConfigError  # noqa: E402
from tfdist.control.own_files import written_whole  # noqa: E402
from tfdist.control.terminal import as_line  # noqa: E402

FLAGS_FILE = "flags.txt"
_WRITTEN = "# Written by tfdist"  # in such files, values are taken literally
_MOST_BYTES = 2**20  # limit for a flag file; a device has no end


# What is meant -> what users of Keras, PyTorch, Hugging Face or the launcher type for it.
OTHER_NAMES = {
    "--global_batch (samples of a step, of all workers together)": ("batch_size", "batch"),
    "--learning_rate": ("lr",),
    "--sequence_length": ("seq_len", "seq_length", "max_length"),
    "--accumulation": ("gradient_accumulation_steps", "grad_accum"),
    "--clip_norm": ("max_grad_norm", "clipnorm"),
    "--precision": ("dtype", "mixed_precision", "amp", "fp16", "bf16"),
    "--run_dir": ("output_dir", "log_dir", "logdir"),
    "--source": ("dataset",),
    "`python -m tfdist.launch --workers=2 -- FLAGS`": ("workers", "num_workers", "nproc_per_node"),
    "CUDA_VISIBLE_DEVICES (a worker uses all GPUs that it sees)": ("gpus", "gpu", "num_gpus"),
}
_MEANT = {name: meant for meant, names in OTHER_NAMES.items() for name in names}


class Parsed(NamedTuple):
    """The result of parsing a command line."""

    config: Config
    command: Any  # the command's own options, an instance of the dataclass given to `parse`


def parse(
    argv: list[str], *, usage: str = "", command: type | None = None, before: CommandParser | None = None
) -> Parsed:
    """Parses the arguments of a command (without the program's name).

    Args:
      argv: arguments, for example ["--flagfile=flags/digits_cnn.flags", "--steps=30"].
      usage: text shown above the flags by --help.
      command: a frozen dataclass of `config.option()` fields with the command's own flags, or None.
      before: if the command's own flags stand before `--`, and `argv` is what follows it: the parser of its own flags.

    Returns: the Config (not yet validated) and the command's own options (each within its limits).
    Raises: ConfigError with a sentence; SystemExit(0) for --help and --version.
    """
    components = {**({"command": command} if command else {}), **COMPONENTS}
    if asked := asked_help(argv):
        print(help_text(usage, components, full=asked == "full"))
        raise SystemExit(0)
    if "--version" in argv:
        print(f"tfdist {__version__}")
        raise SystemExit(0)
    for arg in argv:
        check_utf8(arg)
    values = _define(components)
    try:
        rest = values(["tfdist", *expand_flagfiles(argv)])[1:]
    except (absl_flags.Error, ValueError) as error:  # ValueError: from a switch, "--noshuffle=maybe does not take ..."
        raise error if isinstance(error, ConfigError) else ConfigError(as_line(_sentence(error, before))) from None
    if rest:
        raise ConfigError(f"{rest[0]!r} is not a flag: every argument has the form --name=value.")
    for field in dataclasses.fields(command) if command else ():
        check_option(field, values[field.name].value)
    options = command(**{f.name: values[f.name].value for f in dataclasses.fields(command)}) if command else None
    return Parsed(
        Config.from_flat(
            {f.name: values[f.name].value for kind in COMPONENTS.values() for f in dataclasses.fields(kind)}
        ),
        options,
    )


def asked_help(argv: list[str]) -> Literal["", "key", "full"]:
    """Returns the help that a command line asks for: the most used flags, all flags, or none."""
    if "--helpfull" in argv:
        return "full"
    return "key" if {"--help", "-h", "-help", "--helpshort"} & set(argv) else ""


def expand_flagfiles(argv: list[str]) -> list[str]:
    """Replaces every --flagfile by the file's flags, placed before all other flags so that the command line wins."""
    from_files: list[str] = []
    others: list[str] = []
    arguments = iter(argv)
    for arg in arguments:
        if arg in ("--flagfile", "-flagfile"):
            path = next(arguments, None)
            if path is None:
                raise ConfigError("--flagfile is given without a file: write --flagfile=PATH.")
            from_files += _read_flagfile(Path(path), ())
        elif arg.startswith(("--flagfile=", "-flagfile=")):
            from_files += _read_flagfile(Path(arg.partition("=")[2]), ())
        else:
            others.append(arg)
    return from_files + others


def _read_flagfile(path: Path, including: tuple[Path, ...]) -> list[str]:
    if including and not path.is_absolute() and (including[-1].parent / path).exists():
        path = including[-1].parent / path
    if path.resolve() in including:
        raise ConfigError(f"--flagfile={path} includes itself: remove that line.")
    try:
        with path.open("rb") as file:  # maybe a pipe
            found = file.read(_MOST_BYTES + 1)
        if len(found) > _MOST_BYTES:
            raise ConfigError(
                f"--flagfile={path} is longer than {_MOST_BYTES} bytes: name a file of flags, one per line."
            )
        lines = found.decode("utf-8-sig").splitlines()  # an editor may have added a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ConfigError(f"--flagfile={path} cannot be read ({reason}): check the path.") from None
    arguments, is_ours = [], bool(lines) and lines[0].startswith(_WRITTEN)
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith(("#", "//")):
            continue
        if not re.match(r"--?[A-Za-z]", line):
            raise ConfigError(
                f"{path}, line {number}: {line!r} is not a flag; write --name=value, or # before a comment."
            )
        name, equals, value = line.lstrip("-").partition("=")
        if re.search(r"\s#", value) and not is_ours:
            raise ConfigError(f"{path}, line {number}: {line!r}: a comment must be on its own line.")
        if re.fullmatch(r"(['\"]).*\1", value) and not is_ours:
            raise ConfigError(f"{path}, line {number}: {line!r}: quotes would be part of the value; leave them out.")
        if name == "flagfile":
            if not equals:
                raise ConfigError(f"{path}, line {number}: write --flagfile=PATH.")
            arguments += _read_flagfile(Path(value), (*including, path.resolve()))
        else:
            arguments.append(line)
    return arguments


def write_flagfile(config: Config, path: Path, command: str) -> None:
    """Writes all resolved flags as a flag file that reproduces the run. Atomic: temporary name, flush, rename."""
    lines = [
        (
            f"{_WRITTEN} at the start of the run; `python -m tfdist.train --flagfile={FLAGS_FILE}"
            " --run_dir=ELSEWHERE` repeats it."
        ),
        f"# Configuration digest {config.digest()}. Python {platform.python_version()}, "
        + ", ".join(f"{name} {version}" for name, version in package_versions().items()),
    ]
    if command:
        lines.append(f"# Command: {command}")
    for component, kind in COMPONENTS.items():
        lines += ["", f"# {component}"]
        for field in dataclasses.fields(kind):
            if field.name == "dry_run":
                continue
            if (value := getattr(getattr(config, component), field.name)) is not None:
                lines.append(format_flag(field.name, value))
    with written_whole(path, flushed=True) as file:
        file.write("\n".join(lines) + "\n")


def as_arguments(config: Config) -> list[str]:
    """Returns the command line that gives this configuration."""
    return [format_flag(name, value) for name, value in config.flat().items() if value is not None]


def format_flag(name: str, value: Any) -> str:
    """Formats a flag as on a command line; None: a switch that is not set."""
    if value is None:
        return f"--[no]{name}"
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    return f"--{name}={value!r}" if isinstance(value, float) else f"--{name}={value}"


def package_versions() -> dict[str, str | None]:
    """Returns the installed versions of the numerical packages; None: unknown. Imports none of them."""
    return {name: _version(name) or _version(f"{name}-cpu") for name in ("tensorflow", "keras", "numpy")}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def help_text(usage: str, components: dict[str, type], *, full: bool) -> str:
    """Returns the flags by component, with defaults and allowed values: all, or the most used and a command's own."""
    lines = [
        usage.strip(),
        "",
        "  --flagfile=PATH",
        "        Read flags from a file, one per line; # starts a comment. The command line overrides it.",
    ]
    for component, kind in components.items():
        shown = [
            field for field in dataclasses.fields(kind) if full or field.metadata["key"] or component not in COMPONENTS
        ]
        if shown:
            lines += ["", (kind.__doc__ or "").strip().splitlines()[0]]
        for field in shown:
            default = format_flag(field.name, field.default)
            allowed = f" One of: {', '.join(field.metadata['choices'])}." if field.metadata["choices"] else ""
            lines.append(f"  {default}")
            lines += textwrap.wrap(
                field.metadata["help"] + allowed, 100, initial_indent=" " * 8, subsequent_indent=" " * 8
            )
    if not full:
        lines += ["", "These are the flags that people use first: --helpfull shows all."]
    return "\n".join(lines)


def _define(components: dict[str, type]) -> absl_flags.FlagValues:
    values = absl_flags.FlagValues()
    makers = {
        bool: absl_flags.DEFINE_bool,
        int: absl_flags.DEFINE_integer,
        float: absl_flags.DEFINE_float,
        str: absl_flags.DEFINE_string,
    }
    for kind in components.values():
        for field in dataclasses.fields(kind):
            makers[bool if is_switch(field) else type(field.default)](
                field.name, field.default, field.metadata["help"], flag_values=values
            )
    return values


def _sentence(error: Exception, before: CommandParser | None) -> str:
    """Rewrites absl's message in our form: the flag, its value, the fix."""
    text = str(error)
    unknown = re.match(r"Unknown command line flag '([^']*)'\.?(.*)", text, re.DOTALL)
    if unknown and before and f"--{unknown.group(1)}" in [flag.name for flag in before.flags()]:
        return f"--{unknown.group(1)} is a flag of {before.prog}: put it before `--`."
    if unknown:
        name, near = unknown.group(1), unknown.group(2).strip().replace(" ?", "?")
        hint = f"Did you mean {_MEANT[name]}?" if name in _MEANT else near or "`--help` lists them."
        return f"--{name} is not a flag of this command. {hint}"
    illegal = re.match(r"flag --(\w+)=(.*?): (.*)", text, re.DOTALL)
    if illegal:
        name, value, reason = illegal.groups()
        wanted = (
            "a whole number"
            if "int()" in reason or "integer" in reason
            else "a number"
            if "float" in reason
            else "true or false"
            if "boolean" in reason
            else ""
        )
        return f"--{name}={value} is not {wanted}." if wanted else f"--{name}={value}: {reason.strip()}."
    switch = re.match(r"--no(\w+)=.* does not take an argument", text, re.DOTALL)
    if switch:
        name = switch.group(1)
        return f"{text.partition(' ')[0]} is a switch that takes no value: write --no{name} alone, or --{name}."
    missing = re.match(r"Missing value for flag --?(\w+)", text)
    if missing:
        return f"--{missing.group(1)} is given without a value: write --{missing.group(1)}=VALUE."
    return text.splitlines()[0]


def main_command(argv: list[str]) -> str:
    """Returns the command as typed, for logs and the flag file's header."""
    return " ".join(["python", "-m", f"tfdist.{Path(sys.argv[0]).stem}", *argv])
