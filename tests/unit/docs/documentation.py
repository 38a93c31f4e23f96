"""Finds errors in those parts of the documentation that can be checked: commands, flags, files, links.

README, CONTRIBUTING, CHANGELOG and docs/ are Markdown: their commands are in fenced blocks without a language (or with
that of a shell) and in code spans. examples/, flags/, scripts/ and the modules of the commands have theirs in comments
and docstrings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.unit.docs.commands import (
    command_problems,
    file_problems,
    is_flag,
    is_placeholder,
    train_problems,
    value_problems,
)
from tfdist.__main__ import COMMANDS

SHELLS = ("", "bash", "sh", "console", "shell")


class Place(NamedTuple):
    """A line of a file."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Block(NamedTuple):
    """A fenced block. `run`: the comment before it, which asks to run it, or ("run: NAME") to write it to that file."""

    place: Place
    language: str
    text: str
    run: str


def pages(root: Path) -> list[Path]:
    """Returns the Markdown files for users and contributors."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def problems(root: Path) -> list[str]:
    """Returns everything that is wrong, one line each."""
    anchors = {path.resolve(): set(_anchors(path)) for path in pages(root)}
    found: list[str] = []
    for page in pages(root):
        for place, command in _page_commands(page):
            found += (f"{place}: {wrong}" for wrong in command_problems(command, root))
        found += _link_problems(page, anchors)
        found += _span_problems(page, root)
        found += _python_problems(page)
    for file in (*_sources(root),):
        for place, command in _source_commands(file):
            found += (f"{place}: {wrong}" for wrong in command_problems(command, root))
    for file in sorted((root / "flags").glob("*.flags")):
        found += (f"{file}: {wrong}" for wrong in train_problems([f"--flagfile={file}"]))
    return found


# Where commands are.


def blocks(page: Path) -> list[Block]:
    """Returns the fenced blocks of a page."""
    found, run, lines = [], "", page.read_text().splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        fence = re.match(r"(`{3,})\s*(\S*)", line)
        if fence:
            end = next(n for n in range(number + 1, len(lines)) if lines[n].startswith(fence.group(1)))
            text = "\n".join(lines[number + 1 : end])
            found.append(Block(Place(page, number + 2), fence.group(2), text, run))
            number, run = end, ""
        elif comment := re.match(r"<!-- (run.*?) -->", line):
            run = comment.group(1)
        elif line.strip():
            run = ""
        number += 1
    return found


def shell_lines(text: str) -> list[tuple[int, str]]:
    """Returns (line, command) for the commands of a block; lines continued by a backslash are joined."""
    found: list[tuple[int, str]] = []
    continued = False
    for number, line in enumerate(text.splitlines()):
        if continued:
            found[-1] = (found[-1][0], found[-1][1] + " " + line.strip())
        elif line.strip() and not line.lstrip().startswith("#"):
            found.append((number, line.strip().removeprefix("$ ")))
        else:
            continue
        continued = line.rstrip().endswith("\\")
        if continued:
            found[-1] = (found[-1][0], found[-1][1].rstrip().removesuffix("\\"))
    return found


def _page_commands(page: Path) -> Iterator[tuple[Place, str]]:
    for block in blocks(page):
        if block.language in SHELLS:
            for offset, command in shell_lines(block.text):
                yield Place(page, block.place.line + offset), command
    for place, span in _spans(page):
        if re.match(r"(python|bash|horovodrun|mpirun) \S|tfdist [a-z]+( -|$)|bench_\w+\.py\b", span):
            yield place, span


def _spans(page: Path) -> Iterator[tuple[Place, str]]:
    """Yields code in backticks outside of fenced blocks."""
    text = re.sub(
        r"^(`{3,}).*?^\1", lambda fenced: "\n" * fenced.group().count("\n"), page.read_text(), flags=re.M | re.S
    )
    for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
        yield Place(page, text.count("\n", 0, match.start()) + 1), " ".join(match.group(1).split())


def _sources(root: Path) -> list[Path]:
    """Returns the files whose comments and docstrings hold commands."""
    modules = [root / "tfdist" / f"{name}.py" for name in COMMANDS]
    others = [path for folder in ("examples", "flags", "scripts") for path in (root / folder).glob("*")]
    return [path for path in (*modules, *sorted(others)) if path.is_file() and path.suffix in (".py", ".sh", ".flags")]


def _source_commands(file: Path) -> Iterator[tuple[Place, str]]:
    """Yields the commands in the first comment or docstring and, for a shell script, all calls of tfdist."""
    text = file.read_text()
    if file.suffix == ".py":
        head = ast.get_docstring(ast.parse(text), clean=False) or ""
    else:
        head = "\n".join(line.lstrip("# ") if line.startswith("#") else "" for line in text.splitlines())
    for offset, line in shell_lines(head):
        match = re.search(
            r"(?:^|: +|`)((?:TF_CONFIG=\S+ )?(?:python|bash|source|tfdist|sbatch|horovodrun|mpirun) [^`]+)", line
        )
        if match and re.search(r"-m [\w.]+( |$)|\.py|\.sh|\.sbatch|tfdist [a-z]+( -|$)", match.group(1)):
            yield Place(file, offset + 1), re.split(r" {3,}|\s>$|(?<=[\w\]]): ", match.group(1))[0]
    for offset, line in shell_lines(text) if file.suffix == ".sh" else ():
        if line.startswith("python -m tfdist."):
            yield Place(file, offset + 1), re.sub(r"(\S*=)?(\"[^\"]*\$[^\"]*\"|\S*\$\S*)", "", line)


# Code spans: flags and files.


def _span_problems(page: Path, root: Path) -> Iterator[str]:
    for place, span in _spans(page):
        if re.match(r"--?[a-z]", span) and not span.startswith("-m"):
            for word in span.split():
                if word.startswith("--") and word != "--" and not is_flag(word):
                    yield f"{place}: {word.partition('=')[0]} is a flag of no command"
            for word in span.split():
                yield from (f"{place}: {wrong}" for wrong in value_problems(word))
        elif re.fullmatch(r"(tests|scripts|tfdist|docs|flags|examples)/[\w./-]+", span) and not is_placeholder(span):
            yield from (f"{place}: {wrong}" for wrong in file_problems(span, root))


# Links.


def _anchors(page: Path) -> Iterator[str]:
    """Yields the anchors of the headings, as GitHub and MyST make them."""
    seen: dict[str, int] = {}
    fenced = False
    for line in page.read_text().splitlines():
        fenced ^= line.startswith("```")
        if (match := re.match(r"#+ (.*)", line)) and not fenced:
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", match.group(1)).strip().lower()
            slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            yield slug if slug not in seen else f"{slug}-{seen[slug]}"
            seen[slug] = seen.get(slug, 0) + 1


def _link_problems(page: Path, anchors: dict[Path, set[str]]) -> Iterator[str]:
    text = re.sub(
        r"^(`{3,}).*?^\1", lambda fenced: "\n" * fenced.group().count("\n"), page.read_text(), flags=re.M | re.S
    )
    text = re.sub(r"`[^`\n]+`", lambda span: "x" * len(span.group()), text)
    for match in re.finditer(r"\]\(([^)\s]+)\)", text):
        place = Place(page, text.count("\n", 0, match.start()) + 1)
        target, _, anchor = match.group(1).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / target).resolve() if target else page.resolve()
        if not file.exists():
            yield f"{place}: the link {match.group(1)} leads nowhere: there is no {target}"
        elif anchor and anchor not in _of_included(file, anchors):
            yield f"{place}: the link {match.group(1)} leads nowhere: {file.name} has no such heading"


def _of_included(file: Path, anchors: dict[Path, set[str]]) -> set[str]:
    found = set(anchors.get(file, ()))
    for included in re.findall(r"^```\{include\} (\S+)", file.read_text(), flags=re.M):
        found |= anchors.get((file.parent / included).resolve(), set())
    return found


def _python_problems(page: Path) -> Iterator[str]:
    for block in blocks(page):
        if block.language == "python" and "# before" not in block.text:
            try:
                compile(block.text, str(page), "exec")
            except SyntaxError as error:
                yield f"{block.place}: this is no Python: {error}"
