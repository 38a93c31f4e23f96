"""A run folder as seen in its logs: series, events, flags, goodput, and the facts that a reader wants first."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tfdist.control.amounts_text import counted, long_time, short_time, with_prefix
from tfdist.telemetry.goodput import Goodput, account, seconds_of
from tfdist.telemetry.jsonl import read_jsonl, steady_values
from tfdist.telemetry.plot import series_of

_RANK_FILE = re.compile(r"^rank-(\d+)\.jsonl$")


class RunLog:
    """The content of RUN_DIR/logs and RUN_DIR/flags.txt. name: what the run is called next to others."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name or folder.resolve().name
        self.records = list(read_jsonl(folder / "logs" / "rank-0.jsonl"))
        self.series = series_of(self.records)  # name -> {step: value}; of repeated steps only the last value

    @cached_property
    def goodput(self) -> Goodput:
        return account(self.records)

    @cached_property
    def flags(self) -> dict[str, str]:
        """Flag -> value as text, from flags.txt; empty if there is none."""
        try:
            lines = (self.folder / "flags.txt").read_text(encoding="utf-8").splitlines()
        except OSError:
            return {}
        found = {}
        for line in lines:
            if line.startswith("--"):
                name, equals, value = line[2:].partition("=")
                found[name if equals or not name.startswith("no") else name[2:]] = (
                    value if equals else str(not name.startswith("no")).lower()
                )
        return found

    @cached_property
    def workers(self) -> dict[int, int]:
        """attempt -> its number of workers; attempts whose start is not in the log are left out."""
        return {record["attempt"]: record["values"].get("workers", 0) for record in self.of_kind("start")}

    def steady_rate(self, workers: int) -> float:
        """Returns the median of the steady samples per second of the attempts that were not made by another number of
        workers; 0 if there is none."""
        records = [record for record in self.records if self.workers.get(record["attempt"], workers) == workers]
        rates = steady_values(records, "perf/samples_per_s")
        return statistics.median(rates) if rates else 0.0

    @cached_property
    def phases(self) -> dict[int, dict[str, float]]:
        """rank -> phase -> mean seconds per step, from the "phases" events of all ranks; ranks without any are
        left out.
        """
        return self._phase_means("phase/")

    @cached_property
    def overlaps(self) -> dict[int, dict[str, float]]:
        """rank -> phase -> mean seconds per step that are hidden behind other phases; see `phases`."""
        return self._phase_means("overlap/")

    def _phase_means(self, prefix: str) -> dict[int, dict[str, float]]:
        found = {}
        for rank, records in self._ranks():
            phases = [record["values"] for record in records if record["kind"] == "phases"]
            steps = sum(values.get("phase_steps", 1) for values in phases)
            names = dict.fromkeys(
                name for values in phases for name in values if name.startswith(prefix) and name.endswith("_s")
            )
            if names:
                found[rank] = {
                    name.removeprefix(prefix).removesuffix("_s"): (
                        sum(float(values.get(name, 0.0)) * values.get("phase_steps", 1) for values in phases) / steps
                    )
                    for name in names
                }
        return found

    @property
    def verdict(self) -> str:
        """The last verdict in the log; "" if there is none."""
        verdicts = self.of_kind("verdict")
        return str(verdicts[-1]["values"]["message"]) if verdicts else ""

    @cached_property
    def memory(self) -> dict[str, dict[int, float]]:
        """ "rank K: NAME" -> {step: value}, from the values memory/NAME of all events."""
        found: dict[str, dict[int, float]] = {}
        for rank, records in self._ranks():
            for record in records:
                for name, value in record["values"].items():
                    if name.startswith("memory/") and isinstance(value, (int, float)):
                        found.setdefault(f"rank {rank}: {name.removeprefix('memory/')}", {})[record["step"]] = float(
                            value
                        )
        return found

    def _ranks(self) -> Iterator[tuple[int, Sequence[Mapping[str, Any]]]]:
        files = {
            int(match.group(1)): path
            for path in (self.folder / "logs").iterdir()
            if (match := _RANK_FILE.match(path.name))
        }
        for rank, path in sorted(files.items()):
            yield rank, self.records if rank == 0 else list(read_jsonl(path))

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] in kinds]

    def timed(self, *kinds: str) -> list[tuple[float, dict[str, Any]]]:
        """Returns (seconds since the lifetime began, record) for the events of these kinds."""
        begin = self.goodput.spans[0].begin if self.goodput.spans else 0.0
        return [(seconds_of(record) - begin, record) for record in self.of_kind(*kinds)]

    def step_seconds(self) -> list[tuple[float, int]]:
        """Returns (seconds per step, steps) for every interval between two train events, without each attempt's first
        interval, which includes tracing.
        """
        found, attempt, step = [], None, 0
        for record in self.of_kind("train"):
            speed = record["values"].get("perf/steps_per_s")
            if record["attempt"] == attempt and record["step"] > step and isinstance(speed, (int, float)) and speed > 0:
                found.append((1 / speed, record["step"] - step))
            attempt, step = record["attempt"], record["step"]
        return found

    def facts(self) -> dict[str, str]:
        """Returns the run in a few rows, name -> text; "" where the log has no value."""
        goodput, starts = self.goodput, self.of_kind("start")
        values = starts[-1]["values"] if starts else {}
        workers = list(dict.fromkeys(str(record["values"].get("workers", "")) for record in starts))
        times = self.step_seconds()
        samples = self._typical("perf/samples_per_s")
        tokens = self._typical("perf/tokens_per_s") or (
            samples * int(self.flags["sequence_length"])
            if self.flags.get("source") == "text" and "sequence_length" in self.flags
            else 0.0
        )
        flops, mfu = self._typical("perf/model_flops_per_s"), self._typical("perf/mfu")
        last = self.records[-1]["step"] if self.records else 0
        efficiency = self._typical("perf/scaling_efficiency")
        return {
            "verdict": self.verdict,
            "state": (
                f"{goodput.state} at step {last:,}"
                + (
                    f", {goodput.unsaved_steps:,} steps in no snapshot"
                    if goodput.unsaved_steps and goodput.state != "finished"
                    else ""
                )
            ),
            "wall time": long_time(goodput.wall_s),
            "goodput": f"{100 * goodput.fraction:.1f} %",
            "attempts": (
                f"{len({record['attempt'] for record in self.records})}, {counted(len(goodput.restarts), 'restart')}"
            ),
            "lost steps": f"{goodput.lost_steps:,}",
            "workers": " → ".join(workers),
            "parameters": f"{values['parameters']:,}" if "parameters" in values else "",
            "training loss": self._last("train/loss"),
            "evaluation": ", ".join(
                f"{name.removeprefix('eval/')} {self._last(name)}"
                for name in self.series
                if name.startswith("eval/") and name != "eval/samples"
            ),
            "samples/s": f"{samples:,.0f}" if samples else "",
            "tokens/s": f"{tokens:,.0f}" if tokens else "",
            "step time": f"{short_time(quantile(times, 0.5))} median, {short_time(quantile(times, 0.95))} at 95 %"
            if times
            else "",
            "model FLOP/s": with_prefix(flops),
            "MFU": f"{100 * mfu:.1f} %" if mfu else "",
            "scaling efficiency": f"{100 * efficiency:.0f} % against one worker" if efficiency else "",
            "configuration": str(values.get("config_digest", "")),
            "run id": str(self.records[-1].get("run_id", "")) if self.records else "",
        }

    def _typical(self, name: str) -> float:
        """Returns the median over the train events; 0 if none has the value."""
        return statistics.median(self.series[name].values()) if self.series.get(name) else 0.0

    def _last(self, name: str) -> str:
        points = self.series.get(name)
        return f"{points[max(points)]:.4g}" if points else ""


def quantile(weighted: Sequence[tuple[float, int]], share: float) -> float:
    """Returns the smallest value at or below which `share` of the weight lies. weighted: (value, weight), not empty."""
    left = share * sum(weight for _, weight in weighted)
    for value, weight in sorted(weighted):
        left -= weight
        if left <= 0:
            return value
    return max(weighted)[0]
