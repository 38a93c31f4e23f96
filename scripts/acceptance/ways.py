"""python scripts/acceptance/ways.py OUT [--rehearse]: images per second of a convolutional network, with
BatchNormalization as one operation or several, with XLA or without. `--jit_tune` chooses by the same measurement.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from scripts.acceptance.training import IMAGES, LARGE_IMAGES, fail, records, train, write_rows

LARGE = (
    *LARGE_IMAGES,
    "--model=resnet50",
    "--global_batch=128",
    "--precision=bfloat16",
    "--steps=40",
    "--log_every=10",
)
SMALL = (*IMAGES, "--model=cnn", "--global_batch=16", "--steps=8", "--log_every=2")


def main(out: Path, rehearse: bool) -> None:
    rows = []
    for fused in (True, False):
        for jit in (False, True):
            name = f"{'one operation' if fused else 'several'}{', XLA' if jit else ''}"
            flags = [*(SMALL if rehearse else LARGE), "--strategy=one_device", "--optimizer=momentum", "--nosave_final"]
            flags += [
                "--save_minutes=0",
                f"--{'' if fused else 'no'}fused_batchnorm",
                f"--{'' if jit else 'no'}jit_compile",
            ]
            folder = out / name.replace(", ", "-").replace(" ", "-")
            if code := train(flags, folder):
                rows.append({"BatchNormalization": name, "images a second": f"ended with exit code {code}"})
                continue
            rates = [each["perf/samples_per_s"] for each in records(folder, "train")][1:]
            rows.append({"BatchNormalization": name, "images a second": statistics.median(rates)})
            rows[-1] |= {"slowest": min(rates), "fastest": max(rates), "bar": statistics.median(rates)}
            write_rows(out, rows)
    write_rows(out, rows)
    measured = [row for row in rows if "bar" in row]
    if len(measured) < len(rows):
        fail(f"{len(rows) - len(measured)} of {len(rows)} ways ended with an error")
    best = max(measured, key=lambda row: row["bar"])
    print(f"fastest: {best['BatchNormalization']}, {best['bar']:,.0f} images a second")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--rehearse" in sys.argv)
