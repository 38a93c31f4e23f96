"""What would run on a GPU? Prints a table, without needing a GPU. tests/gpu/graph_audit.py describes the checks.

    python scripts/audit_gpu.py                    every combination of tests/gpu/combinations.py, one process per kind
    python scripts/audit_gpu.py --only=cnn         combinations whose name contains a word
    python scripts/audit_gpu.py --meshes=2,4       also all meshes of tests/parity, and tfdist.fit, with 2 and 4 workers
    python scripts/audit_gpu.py --xla              how XLA lowers the models for GPUs, instead of the table
    python scripts/audit_gpu.py --out=FILE         also write the table to a file

Exit code 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.e2e.job import ENVIRONMENT  # noqa: E402
from tests.gpu.graph_audit import Audit, summary  # noqa: E402
from tests.gpu.launch_order import problems  # noqa: E402
from tests.gpu.mesh_reports import of_fits, of_meshes  # noqa: E402


def main() -> int:
    options = _options()
    if options.child:
        return _child(options.only, options.child)
    if options.xla:
        return _xla(options.only)
    from tests.gpu.combinations import COMBINATIONS

    names = [name for name in COMBINATIONS if options.only in name]
    alone = [name for name in names if "several devices" in name]  # several devices can be made only once in a process
    found: dict[str, Audit] = {}
    with tempfile.TemporaryDirectory(prefix="tfdist-audit-") as folder:
        for number, group in enumerate([[name for name in names if name not in alone], *([name] for name in alone)]):
            if group:
                found |= _in_a_process(group, Path(folder) / f"{number}.json")
        orders: list[str] = []
        for workers in options.meshes:
            more, wrong = _meshes(workers, Path(folder))
            found |= more
            orders += wrong
    table = summary(found.items())
    table += f"\n\n{len(found)} combinations, {sum(audit.operations for audit in found.values())} operations."
    if options.meshes:
        table += f" Collectives: {'; '.join(orders) or 'one order suits all ranks of every mesh'}."
    print(table)
    if options.out:
        Path(options.out).write_text(table + "\n")
    return int(bool(orders) or any(audit.findings for audit in found.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--meshes", default="", help="numbers of workers, for example 2,4")
    parser.add_argument("--xla", action="store_true", help="lower the models of the table for GPUs by XLA")
    parser.add_argument("--out", default="", help="a file for the table")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.meshes = [int(number) for number in options.meshes.split(",") if number]
    return options


def _in_a_process(names: list[str], file: Path) -> dict[str, Audit]:
    subprocess.run(
        [sys.executable, __file__, f"--child={file}", f"--only={json.dumps(names)}"], env=ENVIRONMENT, check=True
    )
    return {name: Audit.from_dict(report) for name, report in json.loads(file.read_text()).items()}


def _child(names: str, file: str) -> int:
    import dataclasses

    from tests.gpu.combinations import COMBINATIONS, of_training

    found = {}
    for number, name in enumerate(json.loads(names), 1):
        found[name] = dataclasses.asdict(of_training(COMBINATIONS[name]))
        print(f"{number}: {name}: {len(found[name]['findings'])} wrong", file=sys.stderr, flush=True)
    Path(file).write_text(json.dumps(found))
    return 0


def _xla(only: str) -> int:
    from tests.gpu.combinations import MODELS, PRECISIONS
    from tests.gpu.xla_lowering import lowered

    failed = 0
    print("| what | operations of HLO | matrix products and convolutions |\n|---|---|---|")
    for model, precision in itertools.product(MODELS, PRECISIONS):
        name = f"{model}, {precision}"
        if only in name:
            try:
                found = lowered((*MODELS[model], f"--precision={precision}"))
                print(f"| {name} | {sum(found.values())} | {found['dot'] + found['convolution']} |", flush=True)
            except Exception as error:  # noqa: BLE001 - whatever TensorFlow raises is the finding
                failed += 1
                print(f"| {name} | not lowered: {str(error).splitlines()[0][:200]} | |", flush=True)
    return int(failed > 0)


def _meshes(workers: int, folder: Path) -> tuple[dict[str, Audit], list[str]]:
    """Returns (the audit of each mesh, what is wrong with the order of its collectives)."""
    out = folder / f"meshes-{workers}"
    out.mkdir()
    fits = folder / f"fits-{workers}"
    fits.mkdir()
    reports = of_meshes(workers, out) | of_fits(workers, fits)
    wrong = [f"{row}: {each}" for row, report in reports.items() for each in problems(report.launches)]
    return {f"{row}, {workers} workers": report.audits[0] for row, report in reports.items()}, wrong


if __name__ == "__main__":
    sys.exit(main())
