"""A plan as text and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tfdist.control import optional_packages
from tfdist.planner import estimate as figures
from tfdist.planner.estimate import Estimate, Plan, Proposal
from tfdist.planner.pipeline import bubble_fraction
from tfdist.planner.time import DAY

_BLUE, _ORANGE = "#1f5fa8", "#d9730d"


def gigabytes(size: float) -> str:
    """Formats bytes in the unit that reads best."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 1000 * scale else f"{size / scale:,.0f} {unit}"
    return f"{size / 1e3:.3g} kB"


def duration(seconds: float) -> str:
    """Formats seconds in the unit that reads best."""
    for unit, scale in (("days", DAY), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= 1.5 * scale or unit == "ms":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError


def as_text(plan: Plan, proposals: Sequence[Proposal]) -> str:
    """Returns the whole plan, for a terminal."""
    model, hardware, best = plan.model, plan.hardware, proposals[0].estimate
    lines = [
        f"model: {model.name}, {model.parameters:,} parameters, {3 * model.flops / 1e9:,.4g} GFLOP a sample and step"
        + (f", {model.tokens} tokens a sample" if model.tokens > 1 else "")
        + f" (from its {model.source})",
        (
            f"hardware: {plan.devices} x {hardware.name}, {hardware.memory_gb:g} GB,"
            f" {hardware.tflops(plan.config.precision.precision):g} TFLOP/s in {plan.config.precision.precision},"
            f" {hardware.per_node} in a node, {hardware.link_gbs:g} GB/s between them, {hardware.node_gbs:g} GB/s out"
            " of a node"
        ),
        (
            f"{'measured' if plan.calibrated else 'assumed'}: {hardware.efficiency:.0%} of the peak reached,"
            f" communication hidden behind {hardware.overlap:.0%} of the backward pass, {hardware.step_ms:.3g} ms fixed"
            " a step"
        ),
    ]
    if uncounted := [part.name for part in model.parts if not part.is_counted]:
        lines.append(
            f"not counted: what {', '.join(uncounted)} computes in a loop, or with shapes that the graph does not tell,"
            " so operations, times and activations are too low. Keras' recurrent layers have no loop with unroll=True."
        )
    for number, proposal in enumerate(proposals, 1):
        found = proposal.estimate
        fits, layout = found.fits(hardware), found.layout.describe()
        lines += ["", f"{number}. {layout}" if fits else layout, f"   {proposal.reason}"]
        if fits:
            lines.append(
                f"   step {duration(found.step.total)}, {_rate(plan, found)}, MFU {found.mfu:.1%}"
                + (f", {found.days:,.3g} days for all of it" if found.days else "")
            )
    lines += ["", *_memory(plan, best), "", *_time(plan, best), "", *_scaling(plan, best), "", *_saving(best)]
    return "\n".join(lines)


def _rate(plan: Plan, found: Estimate) -> str:
    rate = found.samples_per_s
    return f"{rate:,.4g} samples/s" if plan.model.tokens == 1 else f"{rate * plan.model.tokens:,.4g} tokens/s"


def _memory(plan: Plan, best: Estimate) -> list[str]:
    table = figures.zero_table(plan, best.layout)
    names = list(table[0].items())
    lines = ["memory of the fullest device", f"  {'':<18}" + "".join(f"{'ZeRO-' + str(zero):>10}" for zero in range(4))]
    for name in names:
        values = [each.items()[name] for each in table]
        if any(values):
            lines.append(f"  {name:<18}" + "".join(f"{gigabytes(value):>10}" for value in values))
    lines.append(
        f"  {'peak':<18}"
        + "".join(f"{gigabytes(each.peak):>10}" for each in table)
        + "  (gradients grow while activations go)"
    )
    if plan.model.blocks:
        held = figures.recompute_table(plan, best.layout)
        lines.append(f"  activations {gigabytes(held['kept'])}, with recompute {gigabytes(held['recomputed'])}")
    return lines


def _time(plan: Plan, best: Estimate) -> list[str]:
    step, layout = best.step, best.layout
    names = {
        "compute": step.compute,
        "bubble": step.bubble,
        "traffic in the model": step.tensor,
        "gradients, not hidden": step.exposed,
        "update": step.update,
        "fixed": step.fixed,
    }
    lines = [f"time of a step: {duration(step.total)}"] + [
        f"  {name:<22}{duration(seconds):>10}  {seconds / step.total:6.1%}"
        for name, seconds in names.items()
        if seconds
    ]
    if layout.pipe > 1:
        lines.append(
            f"  bubble of {layout.pipe} stages and {layout.micro_batches} micro-batches:"
            f" {bubble_fraction(layout.pipe, layout.micro_batches, plan.config.parallel.pipe_chunks):.1%}"
        )
    table = figures.communication_table(plan, layout)
    if table:
        lines.append(
            f"  gradients travel for {duration(step.gradients)} ({step.algorithm}); one all-reduce of them in float32:"
        )
        for name, times in table.items():
            lines.append(
                f"    {name}: "
                + ", ".join(
                    f"{algorithm.replace('_', '-')} {duration(seconds)}" for algorithm, seconds in times.items()
                )
            )
    return lines


def _scaling(plan: Plan, best: Estimate) -> list[str]:
    rows = figures.scaling(plan, best.layout)
    return [
        "scaling with the same work on each replica",
        "  devices     " + "".join(f"{row['devices']:>8}" for row in rows),
        "  efficiency  " + "".join(f"{row['efficiency']:>8.0%}" for row in rows),
    ]


def _saving(best: Estimate) -> list[str]:
    found = best.reliability
    return [
        (
            f"snapshots of {gigabytes(found.checkpoint)}: training waits {duration(found.stall)} for each,"
            f" {duration(found.write)} until it is written"
        ),
        (
            f"failures: one in {duration(found.mtbf)}; save every {duration(found.interval)} (Daly; Young:"
            f" {duration(found.young)}): {found.saving:.2%} of the time for saves, {found.lost:.2%} for work lost and"
            f" starting again; --save_minutes={max(1.0, found.interval / 60):.0f}"
        ),
    ]


def draw(plan: Plan, best: Estimate, picture: Path) -> None:
    """Draws memory by ZeRO stage, the parts of a step, and scaling, as a PNG."""
    pyplot = optional_packages.pyplot("--plot")
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.5), dpi=100)
    table = figures.zero_table(plan, best.layout)
    base = [0.0] * 4
    for name in table[0].items():
        values = [each.items()[name] / 1e9 for each in table]
        if any(values):
            left.bar(range(4), values, bottom=base, label=name)
            base = [a + b for a, b in zip(base, values, strict=True)]
    left.axhline(plan.hardware.memory_gb, color="black", linestyle="--", linewidth=1)
    left.set(
        xticks=range(4),
        xticklabels=[f"ZeRO-{zero}" for zero in range(4)],
        ylabel="GB on the fullest device",
        title=f"memory ({plan.hardware.name}: {plan.hardware.memory_gb:g} GB)",
    )
    left.legend(fontsize=8)
    step = best.step
    names = {
        "compute": step.compute,
        "bubble": step.bubble,
        "model traffic": step.tensor,
        "gradients": step.exposed,
        "update": step.update,
        "fixed": step.fixed,
    }
    middle.barh(list(names), [seconds * 1e3 for seconds in names.values()], color=_BLUE)
    middle.invert_yaxis()
    middle.set(xlabel="ms", title=f"a step: {duration(step.total)}")
    rows = figures.scaling(plan, best.layout)
    right.plot([row["devices"] for row in rows], [row["efficiency"] * 100 for row in rows], marker="o", color=_ORANGE)
    right.set(
        xscale="log", xlabel="devices", ylabel="efficiency (%)", ylim=(0, 105), title="scaling, the same work on each"
    )
    right.set_xscale("log", base=2)
    figure.suptitle(f"{plan.model.name}, {plan.model.parameters:,} parameters, {best.layout.describe()}")
    figure.tight_layout()
    figure.savefig(picture)
    pyplot.close(figure)
