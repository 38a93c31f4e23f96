"""Finds errors in the commands that the documentation shows: in the program, files, flags and their values.

Words in capitals (FOLDER, RUN_DIR/flags.txt, N), "..." and what belongs to mine.py or script.py, which a reader writes,
are placeholders and are accepted.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib import util
from pathlib import Path

from tfdist import completion, flags
from tfdist.__main__ import COMMANDS, MODULES
from tfdist.comm import CommOptions
from tfdist.completion import parsers_before_dashes
from tfdist.config import Config, check_option, iter_options
from tfdist.config.strategies import check_strategy
from tfdist.control.command_parser import split_at_dashes
from tfdist.control.exit_codes import TfdistError
from tfdist.data.sources.source_names import SOURCES
from tfdist.doctor import DoctorOptions
from tfdist.models.model_names import MODELS
from tfdist.plugins import check_name
from tfdist.run.snapshot_evaluation import EvaluateOptions

# Programs of other projects; their arguments are not checked here.
OTHER_PROGRAMS = (
    *("apt-get", "dmesg", "docker", "echo", "eval", "git", "horovodrun", "ip", "kubectl"),
    *("mpirun", "pip", "pre-commit", "ray", "sbatch", "scancel", "source", "tensorboard", "ulimit", "unshare"),
)
OTHER_FLAGS = {"--full", "--host-discovery-script", "--working-dir", "--no-build-isolation", "--signal", "--dist"}
READERS_OWN = ("mine", "package", "script.py", "mine.py", "./mine.py")


def command_problems(command: str, root: Path) -> Iterator[str]:
    """Yields what is wrong with a shell command line, in sentences."""
    try:
        line = shlex.split(command, comments=True)
    except ValueError as error:
        yield f"{command!r} cannot be read: {error}"
        return
    for words in _simple_commands(line):
        for wrong in _simple_problems(words, root):
            yield f"`{' '.join(words)}`: {wrong}"


def _simple_commands(words: list[str]) -> Iterator[list[str]]:
    """Yields the commands between ; && |, without variables before them and redirections after them."""
    current: list[str] = []
    for word in [*words, ";"]:
        if word in (";", "&&", "|", "||", "&") or word.endswith(";"):
            current += [word[:-1]] if len(word) > 1 and word.endswith(";") else []
            while current and re.match(r"[A-Z_]+=", current[0]):
                current = current[1:]
            for mark in (">", "2>&1", "2>"):
                current = current[: current.index(mark)] if mark in current else current
            if current:
                yield [word for word in current if word != "..."]
            current = []
        else:
            current.append(word)


def _simple_problems(words: list[str], root: Path) -> Iterator[str]:
    at = next((n for n, word in enumerate(words) if re.search(r"(^|/)python3?$", word) or word == "tfdist"), None)
    inner = next((word for word in words if " -m tfdist" in word), None)
    if inner:  # sh -c '...'
        yield from command_problems(inner.replace("exec ", ""), root)
    elif at is not None:
        yield from _python_command_problems(words[at:], root)
    elif words[0] == "bash":
        yield from file_problems(words[1], root)
        script = root / words[1]
        text = script.read_text() if script.is_file() else ""
        accepts_all = '"$@"' in text
        for word in words[2:]:
            if word.startswith("--") and word.partition("=")[0] not in text and not (accepts_all and is_flag(word)):
                yield f"{words[1]} does not know {word}"
    elif re.fullmatch(r"bench_\w+\.py", words[0]):
        yield from _script_problems(f"scripts/{words[0]}", words[1:], root)
    elif words[0] not in OTHER_PROGRAMS:
        yield f"{words[0]!r} is not a program that the documentation uses"


def _python_command_problems(words: list[str], root: Path) -> Iterator[str]:
    if words[0] == "tfdist":
        name, arguments = words[1], words[2:]
        if name in COMMANDS:
            yield from _tfdist_problems(MODULES.get(name, name), arguments, root)
        elif name not in ("--help", "--version") and not is_placeholder(name):
            yield f"tfdist has no command {name!r}"
    elif words[1] == "-m":
        module, arguments = words[2], words[3:]
        if module.startswith("tfdist.") and module.removeprefix("tfdist.") in COMMANDS:
            yield from _tfdist_problems(module.removeprefix("tfdist."), arguments, root)
        elif module.startswith(("tfdist", "tests")) and not is_placeholder(module.rpartition(".")[2]):
            if not any((root / module.replace(".", "/")).with_suffix(end).exists() for end in (".py", "")):
                yield f"there is no module {module}"
        elif module in ("pytest", "sphinx"):
            paths = [word for word in arguments if re.match(r"(tests|docs|scripts)\b", word)]
            for path in paths:
                yield from file_problems(path.partition("::")[0], root)
        elif not module.startswith(("tfdist", "tests")) and util.find_spec(module) is None:
            yield f"there is no module {module}"
    elif words[1].endswith(".py"):
        yield from _script_problems(words[1], words[2:], root)


def _script_problems(script: str, arguments: list[str], root: Path) -> Iterator[str]:
    if script in READERS_OWN:
        return
    yield from file_problems(script, root)
    known = _script_flags(root / script) if (root / script).is_file() else {}
    for word in arguments:
        if word == "--":
            return
        name, equals, value = word.partition("=")
        if word.startswith("--") and known and name not in (*known, "--help"):
            yield f"{script} does not know {name}"
        elif equals and known.get(name) and not is_placeholder(value) and value not in known[name]:
            yield f"{word}: {script} takes {', '.join(known[name])}"


@cache
def _script_flags(script: Path) -> dict[str, tuple[str, ...]]:
    """Returns the flags that a script declares with argparse, and their choices if these are literals. The script is
    read, not run.
    """
    text = script.read_text()
    for module in re.findall(r"from (tests\.\w+\.command) import main", text):  # the parser is in that module
        text += Path(*script.parts[:-2], *module.split(".")).with_suffix(".py").read_text()
    found: dict[str, tuple[str, ...]] = {}
    tree = ast.parse(text.replace("from __future__ import annotations", ""))
    constants = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            choices = next((keyword.value for keyword in node.keywords if keyword.arg == "choices"), None)
            choices = constants.get(choices.id) if isinstance(choices, ast.Name) else choices
            elements = getattr(choices, "elts", getattr(choices, "keys", []))
            values = [element.value for element in elements if isinstance(element, ast.Constant)]
            for name in node.args:
                if isinstance(name, ast.Constant):
                    found[name.value] = tuple(map(str, values))
                elif isinstance(name, ast.JoinedStr):
                    found[".*"] = ()
    return {} if ".*" in found else found


def _tfdist_problems(name: str, arguments: list[str], root: Path) -> Iterator[str]:
    own, rest = split_at_dashes([word for word in arguments if not _stands_for_another(word)])
    if {"--help", "--helpfull", "--version"} & set(own):
        return
    if name == "train":
        yield from train_problems(own)
    elif name in ("evaluate", "comm", "doctor"):
        yield from train_problems(own, command=name)
    elif name == "completion":
        yield from (f"{shell} is no shell that tfdist completes for" for shell in own if shell not in completion.SHELLS)
    elif name == "script":
        yield from file_problems(own[0], root) if own and own[0] not in READERS_OWN else ()
    else:
        try:
            kind = [own.pop(0)] if name == "jobs" and own else []
            parsers_before_dashes()[" ".join([name, *kind])].parse_args(own)
        except KeyError:
            yield from (f"tfdist.{name} makes no {word}" for word in kind)
        except TfdistError as error:
            if "required" not in str(error):  # the command is a fragment, or a placeholder stands for the flag
                yield str(error)
        if rest and rest[0].endswith(".py"):
            yield from file_problems(rest[0], root) if rest[0] not in READERS_OWN else ()
        elif rest[:1] == ["-m"]:
            yield from _python_command_problems(["python", *rest], root) if rest[1:] else ()
        else:
            yield from train_problems(rest)


def train_problems(arguments: list[str], command: str = "") -> Iterator[str]:
    """Yields what is wrong with training flags: unknown ones, forbidden values and, if the run is complete, forbidden
    combinations.
    """
    kind = {"evaluate": EvaluateOptions, "comm": CommOptions, "doctor": DoctorOptions}.get(command)
    try:
        config = flags.parse(arguments, command=kind).config
        _check(config)
        complete = (config.run.steps or config.run.epochs) and (config.batch.global_batch or config.batch.micro_batch)
        if complete and not command:
            config.validate()
    except (TfdistError, SystemExit) as error:
        yield str(error)


def _check(config: Config) -> None:
    values = config.flat()
    for _, field in iter_options():
        check_option(field, values[field.name])
    if not _is_readers_own(config.strategy.strategy):
        check_strategy(config.strategy.strategy)
    for name, value, known in (("source", config.data.source, SOURCES), ("model", config.model.model, MODELS)):
        if not _is_readers_own(value):
            check_name(name, value, known)


def _is_readers_own(value: str) -> bool:
    return value.partition(":")[0].partition(".")[0] in READERS_OWN or value.startswith("./mine.py")


def is_flag(word: str) -> bool:
    name = word.partition("=")[0]
    return name in _all_flags() or name in OTHER_FLAGS


@cache
def _all_flags() -> set[str]:
    """Returns the flags of all commands and scripts."""
    names = {"--help", "--helpfull", "--version", "--flagfile"}
    for _, field in iter_options():
        names |= {f"--{field.name}", f"--no{field.name}"}
    for kind in (EvaluateOptions, CommOptions, DoctorOptions):
        names |= {f"--{no}{field.name}" for field in dataclasses.fields(kind) for no in ("", "no")}
    for parser in parsers_before_dashes().values():
        names |= {flag.name for flag in parser.flags()}
    for script in (*Path("scripts").glob("*.py"), Path("scripts/acceptance/run.py")):
        names |= set(_script_flags(script.resolve()))
    for script in Path("scripts").glob("*.sh"):
        names |= set(re.findall(r"--[a-z_]+", script.read_text()))
    return names


def value_problems(word: str) -> Iterator[str]:
    """Yields an error for a value that no command's flag of this name may have."""
    name, equals, values = word.partition("=")
    field = next((field for _, field in iter_options() if f"--{field.name}" == name), None)
    if not equals or field is None or ".." in values or is_placeholder(values) or name == "--mesh":
        return
    for value in values.split("|"):
        yield from train_problems([f"{name}={value}"]) if name not in _also_others() else ()


@cache
def _also_others() -> set[str]:
    """Returns the flags of other commands, which may use the name of a training flag for something else."""
    return {flag.name for parser in parsers_before_dashes().values() for flag in parser.flags()}


def _stands_for_another(word: str) -> bool:
    return word[0] == "[" or is_placeholder(word.partition("=")[2] if word.startswith("--") else word)


def file_problems(path: str, root: Path) -> Iterator[str]:
    if not is_placeholder(path) and "*" not in path and not (root / path).exists():
        yield f"there is no {path}"


def is_placeholder(text: str) -> bool:
    return bool(re.match(r"[A-Z][A-Z_]*\b(?!=)", text)) or "..." in text or text in ("FLAGS",) or "/FOLDER" in text
