"""What the documentation says is true: its commands parse, its files exist, its links lead somewhere."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tests.unit.docs.commands import command_problems
from tests.unit.docs.documentation import blocks, problems
from tfdist.flags import COMPONENTS

ROOT = Path(".").resolve()


def test_commands_files_and_links_are_true():
    found = problems(ROOT)
    assert not found, "\n".join(found)


def test_each_flag_is_in_the_documentation():
    pages = "".join(page.read_text() for page in [*ROOT.glob("docs/*.md"), ROOT / "README.md"])
    flags = [option.name for component in COMPONENTS.values() for option in dataclasses.fields(component)]
    assert [flag for flag in flags if not re.search(rf"--(no)?{flag}\b", pages)] == []


@pytest.mark.parametrize(
    "command, named",
    [
        ("python -m tfdist.train --global_bach=64", "global_bach"),
        ("python -m tfdist.train --precision=float8", "float8"),
        ("python -m tfdist.train --source=digitz", "digitz"),
        ("python -m tfdist.train --flagfile=flags/nothing.flags", "nothing.flags"),
        ("python -m tfdist.train --zero=1 --global_batch=8 --steps=3 --strategy=sockets", "zero"),
        ("tfdist trian --steps=3", "trian"),
        ("python -m tfdist.launch --worker=2 -- --flagfile=flags/digits_cnn.flags", "worker"),
        ("python -m tfdist.launch --workers=2 -- --flagfil=flags/digits_cnn.flags", "flagfil"),
        ("python -m tfdist.launch --workers=2 -- examples/nothing.py", "nothing.py"),
        ("python -m tfdist.plan --device=8 -- --flagfile=flags/gpt2_124m.flags", "device"),
        ("python -m tfdist.jobs slurm --node=4 -- --flagfile=flags/gpt2_124m.flags", "node"),
        ("python -m tfdist.jobs slrum --nodes=4", "slrum"),
        ("tfdist completion tcsh", "tcsh"),
        ("python -m tfdist.report runs/first --txt", "txt"),
        ("python -m tfdist.evaluate --run_dir=runs/first --at_stp=3", "at_stp"),
        ("python -m tfdist.comm --worker=2", "worker"),
        ("python scripts/fuzz.py --minute=10", "minute"),
        ("python scripts/bench_loop.py --workload=rnn", "rnn"),
        ("python scripts/nothing.py", "nothing.py"),
        ("bash scripts/nothing.sh", "nothing.sh"),
        ("python -m tests.fuzz.nothing", "tests.fuzz.nothing"),
        ("python -m pytest tests/nothing", "tests/nothing"),
        ("unshare -rn sh -c 'exec python -m tfdist.launch --worker=2'", "worker"),
        ("TF_CONFIG='{}' horovodrun -np 2 python -m tfdist.train --step=3", "step"),
        ("echo 3 && tfdits train", "tfdits"),
    ],
)
def test_a_wrong_command_is_found(command, named):
    (found,) = command_problems(command, ROOT)
    assert named in found


@pytest.mark.parametrize(
    "text, named",
    [
        ("Set `--global_bach=64`.", "--global_bach"),
        ("Set `--on_nan=ignore`.", "ignore"),
        ("See `tests/unit/test_nothing.py`.", "test_nothing.py"),
        ("See [there](nothing.md).", "nothing.md"),
        ("See [there](#not-a-heading).", "not-a-heading"),
        ("![picture](figures/nothing.png)", "nothing.png"),
        ("```\npython -m tfdist.train \\\n    --stps=3\n```", "stps"),
        ("```bash\npython -m tfdist.train --stps=3   # three\n```", "stps"),
        ("```python\nimport\n```", "no Python"),
        ("Say `python -m tfdist.train --stps=3`.", "stps"),
    ],
)
def test_a_wrong_page_is_found(tmp_path, text, named):
    (tmp_path / "README.md").write_text(f"# A heading\n\nSee [it](#a-heading).\n\n{text}\n")
    (found,) = problems(tmp_path)
    assert named in found


def test_wrong_lines_of_flag_files_and_docstrings_are_found(tmp_path):
    (tmp_path / "flags").mkdir()
    (tmp_path / "flags" / "a.flags").write_text("# A run.\n#   command:  python -m tfdist.train --stps=1\n--modl=cnn\n")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "b.py").write_text('"""Does it.\n\n    python scripts/c.py --fast   at once\n"""\n')
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "d.sh").write_text(
        'set -e\npython -m tfdist.train --epochs=1 \\\n  --run_dir="$1" --stpes=1 "$@"\n'
    )
    found = problems(tmp_path)
    assert [any(word in line for line in found) for word in ("stps", "modl", "c.py", "stpes")] == [True] * 4
    assert len(found) == 4


def test_readme_is_short_and_its_figures_have_dates():
    text = Path("README.md").read_text()
    assert len(text.splitlines()) <= 250
    peers = text[text.index("## Beside its peers") : text.index("## Where to read on")]
    assert "python scripts/bench_peers.py" in peers and "2026-" in peers


def test_every_page_begins_with_a_command_or_code():
    for page in Path("docs").glob("*.md"):
        if page.stem not in ("ARCHITECTURE", "contributing", "changelog"):
            text = page.read_text()
            assert blocks(page) and text.index("```") < 700, f"{page} does not begin with what solves its task"


def test_scripts_find_the_project_without_help_of_the_environment():
    """They are started as the docs say, from a checkout: Python looks beside the script only."""
    helped = []
    for script in sorted(Path("scripts").glob("*.py")):
        text = script.read_text()
        found = re.search(r"^(?:from|import) (?:tests|tfdist)\b", text, re.MULTILINE)
        before = text[: found.start()] if found else ""
        siblings = [Path("scripts", f"{name}.py") for name in re.findall(r"^from (\w+) import", before, re.MULTILINE)]
        ways = [before, *(sibling.read_text() for sibling in siblings if sibling.exists())]
        if found and not any("sys.path.insert(" in way for way in ways):
            helped.append(script.name)
    assert not helped
