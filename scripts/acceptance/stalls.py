"""python scripts/acceptance/stalls.py OUT [--rehearse]: how long steps wait for data and for snapshots."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from scripts.acceptance.training import IMAGES, LARGE_IMAGES, TEXT, TRANSFORMER, records, train_well, write_rows

GPT2 = ("--source=synthetic", "--source_args=task=text,vocab=50257", "--sequence_length=1024", "--objective=next_token")
LARGE = {
    "gpt2": (*GPT2, "--model=transformer", "--model_args=size=gpt2", "--global_batch=16", "--precision=bfloat16"),
    "resnet50": (*LARGE_IMAGES, "--model=resnet50", "--global_batch=128", "--precision=bfloat16"),
}
SMALL = {
    "transformer": (*TEXT, *TRANSFORMER, "--global_batch=16"),
    "cnn": (*IMAGES, "--model=cnn", "--global_batch=16"),
}


def main(out: Path, rehearse: bool) -> None:
    rows = []
    for name, flags in (SMALL if rehearse else LARGE).items():
        run = (*flags, "--steps=40", "--log_every=5", "--save_every=10", "--phase_every=5", "--strategy=one_device")
        train_well(run, out / name)
        step = 1 / statistics.median(each["perf/steps_per_s"] for each in records(out / name, "train")[1:])
        waits = [each["phase/data_wait_s"] for each in records(out / name, "phases")]  # of a step
        stalls = [each["pause/saving_s"] for each in records(out / name, "train") if each.get("pause/saving_s")]
        saves = records(out / name, "save")
        rows.append({"model": name, "step, ms": 1e3 * step, "waits for data, ms": 1e3 * statistics.median(waits)})
        rows[-1] |= {
            "snapshot, MB": saves[-1]["save/bytes"] / 1e6,
            "training waits for it, ms": 1e3 * statistics.median(stalls) if stalls else 0.0,
            "written in the background in, s": statistics.median(each["save/write_s"] for each in saves),
            "bar": 1e3 * statistics.median(stalls) if stalls else 0.0,
        }
        write_rows(out, rows)
    worst = max(rows, key=lambda row: row["bar"])
    print(
        f"the longest wait for a snapshot: {worst['model']}, {worst['bar']:.0f} ms for {worst['snapshot, MB']:.0f} MB"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--rehearse" in sys.argv)
