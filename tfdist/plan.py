"""python -m tfdist.plan: what a run needs and how long it takes, before anyone books GPUs.

  python -m tfdist.plan --devices=64 --hardware=h100 -- --flagfile=flags/gpt2_124m.flags
  python -m tfdist.plan --devices=8 --hardware=a100,per_node=4,network=ethernet-100 --mesh=data=4,model=2 -- FLAGS
  python -m tfdist.plan --devices=3 --hardware=cpu --calibrate=runs/one --calibrate=runs/two -- FLAGS

Flags before `--` are the planner's own; those after it are the run's. Memory, communication, time, scaling and the best
interval between snapshots come from formulas. A model without a formula is built without allocating memory, and counted
(takes seconds). Exit code 0 if a layout fits, 2 if none does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

from tfdist import flags
from tfdist.config import Config, parse_args
from tfdist.control import exit_codes, optional_packages
from tfdist.control.command_parser import CommandParser, check_least, split_at_dashes
from tfdist.control.exit_codes import ConfigError, ExitCode, TfdistError
from tfdist.data.sources.source_facts import DIGITS_TO_TRAIN, SYNTHETIC
from tfdist.planner import estimate, formulas, plan_text, search, shapes
from tfdist.planner.calibrate import calibrate, read_run
from tfdist.planner.communication import ALGORITHMS
from tfdist.planner.estimate import Plan
from tfdist.planner.hardware import DEVICES, Hardware, load_hardware
from tfdist.planner.shapes import ModelShape

_COUNTING_SECONDS = 600


def main(argv: list[str]) -> int:
    own_argv, train = split_at_dashes(argv)
    options = _parse(own_argv)
    if options.plot:
        optional_packages.pyplot("--plot")  # fail before the work
    config = flags.parse(train, usage="Flags of the run:", before=plan_parser()).config
    steps = config.run.steps
    if not steps and not config.run.epochs:
        config = config.replace(steps=1)  # most questions do not depend on the number of steps
    config.validate()
    model = model_shape(config, train, options.input_shape, options.outputs)
    hardware = load_hardware(options.hardware)
    if config.precision.precision == "bfloat16" and not hardware.bfloat16:
        raise ConfigError(
            f"--precision=bfloat16, but --hardware={hardware.name} has no bfloat16: use --precision=float16."
        )
    if options.calibrate:
        runs = [read_run(folder) for folder in options.calibrate]
        hardware = calibrate(
            hardware,
            runs,
            lambda other: model_shape(other, flags.as_arguments(other), options.input_shape, options.outputs),
        )
    plan = Plan(
        config=config,
        model=model,
        hardware=hardware,
        devices=options.devices,
        samples=_samples(config, options, model, steps),
        steps=steps,
        algorithm=options.algorithm,
        calibrated=bool(options.calibrate),
    )
    wish = search.Wish(
        mesh=search.parse_mesh(options.mesh, options.devices),
        zero=None if options.zero == "auto" else int(options.zero),
        recompute={"auto": None, "none": False, "blocks": True}[options.recompute],
    )
    proposals = search.search(plan, wish)
    best = proposals[0].estimate
    if options.json:
        text = json.dumps(estimate.as_json(plan, proposals), indent=1)
        _write(Path(options.json), text + "\n") if options.json != "-" else print(text)
    if options.json != "-":
        print(plan_text.as_text(plan, proposals))
    if options.plot:
        try:
            plan_text.draw(plan, best, Path(options.plot))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--plot={options.plot} cannot be written ({error}): give a file that ends in .png, in a folder that"
                " exists."
            ) from None
    return ExitCode.OK if best.fits(hardware) else ExitCode.CONFIG


def model_shape(config: Config, train: list[str], input_shape: str, outputs: int) -> ModelShape:
    """The model of the flags `train`, by formula if there is one, otherwise counted. Raises TfdistError subclasses."""
    sample = shapes.sample_of(config, input_shape, outputs)
    found = formulas.shape_of(config, sample) if sample else None
    if found:
        return found
    source = []
    if sample:  # replaces a source that is not available here
        size = (
            f"vocab={sample.outputs}"
            if sample.is_text
            else f"shape=({','.join(map(str, sample.shape))},),classes={sample.outputs}"
        )
        source = [
            "--source=synthetic",
            f"--source_args=task={'text' if sample.is_text else 'image'},{size}",
            *([f"--sequence_length={sample.shape[0]}"] if sample.is_text else []),
        ]
    command = [sys.executable, "-m", "tfdist.training.model_cost", *train, *source]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_COUNTING_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--model={config.model.model} was not counted within {_COUNTING_SECONDS} s: plan a smaller model of the"
            f" same kind, or see what takes so long with {shlex.join(command)}."
        ) from None
    if result.returncode:
        said = next(
            (
                line.removeprefix("tfdist: error: ")
                for line in reversed(result.stderr.splitlines())
                if line.startswith("tfdist: error: ")
            ),
            "",
        )
        code = result.returncode if result.returncode in set(ExitCode) else ExitCode.INTERNAL
        error = type("CountingError", (TfdistError,), {"exit_code": ExitCode(code)})
        raise error(
            said.rpartition(" (exit code")[0]
            or f"The model could not be counted: {' '.join(command)} reports {result.stderr[-500:]}"
        )
    return shapes.from_json(json.loads(result.stdout.splitlines()[-1]), sample)


def _samples(config: Config, options: argparse.Namespace, model: ModelShape, steps: int) -> float:
    """The samples to train on, as far as --tokens, --samples or --epochs tell. steps: those of the run, if given, which
    tell it without --samples."""
    if options.tokens and model.tokens == 1:
        raise ConfigError(
            f"--tokens={options.tokens:g}, but the samples of --source={config.data.source} are no sequences of tokens"
            " (x one vector of integers), as far as the planner can see: give --samples instead."
        )
    if options.tokens:
        return options.tokens / model.tokens
    if options.samples and not steps:
        return options.samples * (config.run.epochs or 1)
    synthetic = {**SYNTHETIC, **parse_args("source_args", config.data.source_args)}
    known = {"digits": DIGITS_TO_TRAIN, "synthetic": synthetic["samples"]}
    return config.run.epochs * known.get(config.data.source, 0)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--json={path} cannot be written ({error.strerror}): give a file in a folder that exists, or - for the"
            " terminal."
        ) from None


def _parse(argv: list[str]) -> argparse.Namespace:
    options = plan_parser().parse_args(argv)
    for name, least in (("devices", 1), ("outputs", 0), ("tokens", 0), ("samples", 0)):
        check_least(name, getattr(options, name), least)
    if math.isinf(options.tokens):
        raise ConfigError(f"--tokens={options.tokens} is not a number of tokens: write one, such as 1e12.")
    return options


def plan_parser() -> CommandParser:
    """The parser of the flags before `--`."""
    parser = CommandParser(
        hint=(
            "the planner's own flags go before `--`, the run's after it; `python -m tfdist.plan --help` lists the"
            " first, `python -m tfdist.train --help` the second"
        ),
        prog="python -m tfdist.plan",
        description=__doc__,
        usage="%(prog)s [flags] -- <flags of tfdist.train>",
    )
    _plan_flags(parser)
    _run_flags(parser)
    return parser


def _plan_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags about the question."""
    parser.add_argument("--devices", type=int, default=8, help="GPUs in all (default 8)")
    parser.add_argument(
        "--hardware",
        default="h100",
        help=(
            f"one of {', '.join(DEVICES)}, with changes as in h100,per_node=4,network=ethernet-100; or your own as"
            f" key=value,... or a .json file. Keys: {', '.join(field.name for field in dataclasses.fields(Hardware))},"
            " network"
        ),
    )
    parser.add_argument(
        "--mesh", default="auto", help="auto: find the best; or as tfdist.train takes it, for example pipe=2,model=4"
    )
    parser.add_argument(
        "--zero", default="auto", choices=("auto", "0", "1", "2", "3"), help="ZeRO stage (default auto)"
    )
    parser.add_argument(
        "--recompute",
        default="auto",
        choices=("auto", "none", "blocks"),
        help="compute blocks again in the backward pass (default auto)",
    )
    parser.add_argument(
        "--algorithm",
        default="auto",
        choices=("auto", *ALGORITHMS),
        help="of the gradient all-reduce (default auto: the fastest)",
    )


def _run_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags about known facts of the run, and about the output."""
    parser.add_argument(
        "--tokens", type=float, default=0, help="tokens to train on in all, for example 1e12 (default: from --steps)"
    )
    parser.add_argument(
        "--samples",
        type=float,
        default=0,
        help="samples of an epoch, for a run without --steps, if not known before the source is opened",
    )
    parser.add_argument(
        "--input_shape", default="", help="of a sample's x, if not known before the source is opened: 224,224,3 or 1024"
    )
    parser.add_argument("--outputs", type=int, default=0, help="classes or tokens, likewise")
    parser.add_argument(
        "--calibrate",
        action="append",
        default=[],
        metavar="RUN_DIR",
        help=(
            "calibrate with a finished run's folder; may be given several times, with runs of other sizes and"
            " worker counts"
        ),
    )
    parser.add_argument(
        "--json",
        default="",
        metavar="FILE",
        help="also write the plan as JSON; - for the terminal, with nothing else there",
    )
    parser.add_argument("--plot", default="", metavar="FILE.png", help="also draw it")


if __name__ == "__main__":
    exit_codes.run_command(main, sys.argv[1:])
