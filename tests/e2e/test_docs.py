"""The site builds without a warning, all of it, and the blocks of the pages that are marked as runnable run."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.browser import needs_browser, open_page
from tests.e2e.job import ENVIRONMENT
from tests.unit.docs.documentation import Block, blocks, pages, shell_lines

pytestmark = pytest.mark.slow
ROOT = Path(".").resolve()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site. Warnings (a link without a target, a page in no table of contents) are errors."""
    pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [
            *f"{sys.executable} -m sphinx -W -n --keep-going -q -b html -d".split(),
            out / "doctrees",
            "docs",
            out / "html",
        ],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return out / "html"


def test_the_site_has_every_page_flag_and_public_function(site):
    import tfdist
    from tfdist.config import iter_options

    for page in Path("docs").glob("*.md"):
        assert (site / f"{page.stem}.html").is_file(), page
    flags, api = (site / "flags.html").read_text(), (site / "api.html").read_text()
    missing = [field.name for _, field in iter_options() if f'id="cmdoption-train-{field.name}"' not in flags]
    assert not missing
    for command in (
        "launch-workers",
        "plan-devices",
        "jobs-slurm-nodes",
        "report-out",
        "comm-runtimes",
        "evaluate-follow",
    ):
        assert f'id="cmdoption-{command}"' in flags, command
    for name in tfdist.__all__:
        assert f'id="tfdist.{name}"' in api, name


@needs_browser
@pytest.mark.parametrize("width", [1400, 390])
def test_no_page_is_wider_than_its_window(site, width):
    with open_page(width=width) as page:
        for file in sorted(site.glob("*.html")):
            page.goto(file.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width, file.name


def runnable() -> dict[str, list[Block]]:
    """Page -> its blocks that are run, in their order: a page tells one story."""
    found = {str(page.relative_to(ROOT)): [block for block in blocks(page) if block.run] for page in pages(ROOT)}
    return {page: marked for page, marked in found.items() if marked}


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> tuple[Path, set[str]]:
    """The folder of all pages, and the commands that have been run there: of two pages with the same one, the second
    finds what it left.
    """
    folder = tmp_path_factory.mktemp("story")
    (folder / "flags").symlink_to(ROOT / "flags")
    return folder, set()


@pytest.mark.parametrize("page", runnable())
def test_blocks_that_are_marked_run(page, story):
    """The first command as users start it, by `bash`, which starts no process warm (tests/warm_start). The others warm;
    e2e/test_package starts a launcher, its workers and a report as users do.
    """
    folder, done_before = story
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for block in runnable()[page]:
        if block.run.startswith("run: "):
            (folder / block.run.removeprefix("run: ")).write_text(block.text)
            continue
        for _, command in shell_lines(block.text):
            words = shlex.split(command, comments=True)
            if (text := " ".join(words)) in done_before:
                continue
            assert words[0] == "python", f"{block.place}: not a command that the test can start warm"
            done = subprocess.run(
                [sys.executable, *words[1:]] if done_before else ["bash", "-c", command],
                cwd=folder,
                env={**ENVIRONMENT, "PATH": path},
                capture_output=True,
                text=True,
                timeout=200,
            )
            done_before.add(text)
            assert done.returncode == 0, f"{block.place}: {command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def test_something_is_marked():
    assert {"README.md", "docs/quickstart.md"} <= set(runnable()) and shutil.which("bash")
