"""python -m tfdist.report: one page about a run, or several runs side by side, from their folders.

  python -m tfdist.report runs/first                            runs/first/report.html
  python -m tfdist.report runs/first runs/second                runs/first/comparison.html
  python -m tfdist.report runs/first runs/second --out=two.html
  python -m tfdist.report runs/first --text                     goodput and the main facts on the terminal, no page

The page is one file that needs no network. It is made from logs/rank-*.jsonl and flags.txt alone, so it can be made
during the run, and again after it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.control import exit_codes
from tfdist.control.command_parser import CommandParser
from tfdist.control.exit_codes import ConfigError, ExitCode, UnsupportedError
from tfdist.control.own_files import written_whole
from tfdist.storage.reader_copy import ReadRun
from tfdist.telemetry.report_text import as_text
from tfdist.telemetry.run_log import RunLog


def main(argv: list[str]) -> int:
    options = report_parser().parse_args(argv)
    places = [ReadRun(place) for place in options.run_dirs]
    runs = read_runs(places)
    if options.text:
        print("\n\n".join(as_text(run) for run in runs))
    if options.out or not options.text:
        default = runs[0].folder / ("report.html" if len(runs) == 1 else "comparison.html")
        write_page(runs, Path(options.out) if options.out else default)
        if not options.out:
            places[0].send_back(lambda name: name == default.name)
    return ExitCode.OK


def read_runs(places: Sequence[ReadRun]) -> list[RunLog]:
    """The logs of runs, named by the parts in which their paths differ. Raises ConfigError."""
    paths, folders = [place.bring() for place in places], [place.place for place in places]
    names = [Path(folder).resolve().name for folder in folders]
    if len(set(names)) < len(names):
        resolved = [str(path.resolve()) for path in paths]
        shared = os.path.commonpath(resolved)
        names = [os.path.relpath(path, shared) for path in resolved]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"{folders[names.index(next(name for name in names if names.count(name) > 1))]} is given twice: name each"
            " run folder once."
        )
    runs = []
    for path, name in zip(paths, names, strict=True):
        log = path / "logs" / "rank-0.jsonl"
        if not log.is_file():
            raise ConfigError(f"{path} is not a run folder, it has no logs/rank-0.jsonl: give the --run_dir of a run.")
        runs.append(RunLog(path, name))
        if not runs[-1].records:
            raise ConfigError(
                f"{log} contains no event that this version can read: the run has not started yet, or its log"
                " is damaged."
            )
    return runs


def write_page(runs: Sequence[RunLog], out: Path) -> None:
    """Writes the page atomically. It may replace an older page, but no other file.

    Raises ConfigError, UnsupportedError.
    """
    if out.exists() and not _is_page(out):
        raise ConfigError(
            f"--out={out} already exists and is not a page of tfdist.report: give another name, or remove it."
        )
    try:
        from tfdist.telemetry.report_page import as_page

        page = as_page(runs)
    except ImportError as error:
        raise UnsupportedError(
            f"The plots need {error.name}, which is not installed: pip install {error.name}, or use --text."
        ) from None
    try:
        with written_whole(out) as file:
            file.write(page)
    except OSError as error:
        raise ConfigError(
            f"--out={out} cannot be written ({error.strerror}): give a file in a folder that exists."
        ) from None
    kept = ", ".join(f"in {run.name} {100 * run.goodput.fraction:.1f} %" for run in runs)
    print(
        f"tfdist: wrote {out} ({len(page) / 1e6:.1f} MB): {kept} of the time went into steps that were kept (goodput)."
    )


def _is_page(path: Path) -> bool:
    """Whether a file begins like the pages that this command writes."""
    try:
        with path.open("rb") as file:
            return b"<title>tfdist: " in file.read(400)
    except OSError:
        return False


def report_parser() -> CommandParser:
    """The parser of the command line."""
    parser = CommandParser(
        hint="write python -m tfdist.report RUN_DIR [RUN_DIR ...] [--out=FILE.html] [--text]",
        prog="python -m tfdist.report",
        description=__doc__,
    )
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="a run's folder")
    parser.add_argument(
        "--out",
        default="",
        metavar="FILE.html",
        help="the page (default report.html in the run's folder, or comparison.html in the first, unless --text)",
    )
    parser.add_argument("--text", action="store_true", help="print goodput and the main facts")
    return parser


if __name__ == "__main__":
    exit_codes.run_command(main, sys.argv[1:])
