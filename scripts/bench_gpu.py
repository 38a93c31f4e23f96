"""GPT-2 124M and ResNet-50 on one GPU, in bfloat16: compares tfdist with the PyTorch and JAX on the machine.

    python scripts/bench_gpu.py [--models=gpt2,resnet50] [--engines=tfdist,tfdist-no-xla,torch,torch-compile,jax]
    [--windows=5] [--rehearse]
                                [--tfdist_python=PATH] [--torch_python=PATH] [--jax_python=PATH] [--out=runs/gpu]

Prints samples (tokens or images) per second, median (smallest to largest) of the windows after two warm-up windows, and
their share of the GPU's peak (MFU; FLOPs by formula, see MODELS; the peak of dense bf16 by the GPU's name, or
--peak_tflops). If a Python lacks the package of an engine, the engine is left out, and the reason is printed. Writes
OUT/gpu.md and OUT/gpu.json. --rehearse: tiny models on the CPU, tfdist alone, to check that this script works.

Prerequisites: one NVIDIA GPU with its driver; for each engine a Python with its package. The Pythons may differ.
tfdist: requirements.txt and TensorFlow's CUDA libraries (pip install "tensorflow[and-cuda]~=2.21.0"). XLA needs ptxas
and libdevice; these libraries bring them, or an installed CUDA (XLA_FLAGS=--xla_gpu_cuda_data_dir=/usr/local/cuda).
torch: PyTorch, and torchvision for ResNet-50. jax: JAX with CUDA, and Optax.
No network is needed: no data or weights are downloaded.

On a GPU machine without a network: pip download its wheels on another machine (--platform manylinux_2_28_x86_64
--only-binary=:all: --python-version 3.12), carry them over, and pip install --no-index --find-links=FOLDER there.
TensorFlow 2.21 opens CUDA 12 and cuDNN 9 by name. If the machine has only libraries of CUDA 13, carry the
nvidia-*-cu12 wheels over, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PEERS = REPOSITORY / "scripts" / "peers"
WARM_UP = 2
LONGEST = 900  # seconds for one engine and model, compilation included

# units: per sample; flops: of training, per unit. GPT-2: 6 N + 12 L D T per token with N = 124,439,808 (PaLM, Chowdhery
# et al. 2022, arXiv:2204.02311, appendix B). ResNet-50: 3 x 2 x 4.09e9 per image of 224 x 224.
MODELS = {
    "gpt2": {
        "batch": 32,
        "steps": 10,
        "units": 1024,
        "unit": "tokens",
        "parameters": 124_439_808,
        "flops": 6 * 124_439_808 + 12 * 12 * 768 * 1024,
    },
    "resnet50": {
        "batch": 256,
        "steps": 10,
        "units": 1,
        "unit": "images",
        "parameters": 25_557_032,
        "flops": 3 * 2 * 4.09e9,
    },
}
PARAMETER_TOLERANCE = 0.005  # Keras' ResNet-50 has biases in its convolutions, 0.3 % more parameters
ENGINES = {
    "tfdist": "tfdist",
    "tfdist-no-xla": "tfdist",
    "torch": "torch",
    "torch-compile": "torch",
    "jax": "jax",
}  # -> which Python
MODULES = {"tfdist": ("tensorflow", "keras"), "torch": ("torch",), "jax": ("jax", "optax")}
# Dense bf16 TFLOP/s from the vendor's data sheets; the first name that the GPU's name contains applies.
PEAKS = {
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "GH200": 989.4,
    "GB200": 2500.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX 4090": 165.2,
}
TFDIST = {
    "gpt2": [
        "--model=transformer",
        "--model_args=size=gpt2",
        "--source=synthetic",
        "--source_args=task=text,vocab=50257,fixed=True",
        "--sequence_length=1024",
        "--objective=next_token",
        "--optimizer=adamw",
        "--weight_decay=0.1",
    ],
    "resnet50": [
        "--model=resnet50",
        "--source=synthetic",
        "--source_args=task=image,fixed=True",
        "--optimizer=momentum",
    ],
}


REHEARSED = {
    "tiny transformer": {
        "batch": 4,
        "steps": 2,
        "units": 32,
        "unit": "tokens",
        "parameters": 121_344,
        "flops": 6 * 121_344 + 12 * 2 * 64 * 32,
    },
}
REHEARSED_FLAGS = {
    "tiny transformer": [
        "--model=transformer",
        "--model_args=layers=2,width=64,heads=4",
        "--source=synthetic",
        "--source_args=task=text,vocab=300,fixed=True",
        "--sequence_length=32",
        "--objective=next_token",
        "--optimizer=adamw",
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--windows", type=int, default=5, help="measured windows (default 5)")
    parser.add_argument("--batch", type=int, default=0, help="samples per step (default 32 sequences, 256 images)")
    parser.add_argument(
        "--peak_tflops", type=float, default=0.0, help="of this GPU in dense bf16, if its name is not known"
    )
    parser.add_argument("--out", default="runs/gpu")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU, tfdist alone")
    for kind in MODULES:
        parser.add_argument(
            f"--{kind}_python",
            default=sys.executable,
            help=f"the Python with {' and '.join(MODULES[kind])} (default: this one)",
        )
    arguments = parser.parse_args()
    if arguments.rehearse:
        arguments.models, arguments.engines, arguments.peak_tflops = ",".join(REHEARSED), "tfdist,tfdist-no-xla", 1.0
        MODELS.update(REHEARSED)
        TFDIST.update(REHEARSED_FLAGS)
    gpu = "rehearsal on the CPU" if arguments.rehearse else gpu_name()
    if not gpu:
        raise SystemExit(
            "bench_gpu: this machine shows no NVIDIA GPU (nvidia-smi is missing or lists none): run it on a machine"
            " that has one."
        )
    peak = arguments.peak_tflops or next((value for name, value in PEAKS.items() if name in gpu), 0.0)
    out = Path(arguments.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for model in chosen(arguments.models, MODELS, "models"):
        for engine in chosen(arguments.engines, ENGINES, "engines"):
            result = {"model": model, "engine": engine, "gpu": gpu, **measure(model, engine, arguments, out)}
            results.append(result)
            print(f"{model}, {engine}: {result.get('error') or figures(result, peak)}", file=sys.stderr, flush=True)
            (out / "gpu.json").write_text(json.dumps(results, indent=1))
            (out / "found.json").write_text(json.dumps([row(result, peak) for result in results]))
    text = table(results, gpu, peak)
    (out / "gpu.md").write_text(text)
    print(text)
    raise SystemExit(all("error" in result for result in results))


def gpu_name() -> str:
    """Returns the name of the first GPU; "" if there is none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else ""


def chosen(names: str, known: dict, flag: str) -> list[str]:
    for name in names.split(","):
        if name not in known:
            raise SystemExit(f"bench_gpu: --{flag}={names}: {name!r} is not one of {', '.join(known)}.")
    return names.split(",")


def measure(model: str, engine: str, arguments: argparse.Namespace, out: Path) -> dict:
    """Returns {"rates": units per second of each window, "parameters", "batch", "startup_s"}, or {"error": reason}."""
    kind = ENGINES[engine]
    python = getattr(arguments, f"{kind}_python")
    modules = (*MODULES[kind], "torchvision") if (kind, model) == ("torch", "resnet50") else MODULES[kind]
    probe = subprocess.run(
        [
            python,
            "-c",
            f"import importlib.util as u, sys; sys.exit(next((m for m in {modules!r} if not u.find_spec(m)), 0))",
        ],
        capture_output=True,
        text=True,
    )
    if probe.returncode:
        return {
            "error": (
                f"left out: {python} has no package {probe.stderr.strip() or modules}; name a Python that has it with"
                f" --{kind}_python"
            )
        }
    folder = out / f"{model}-{engine}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    batch, steps, windows = (
        arguments.batch or MODELS[model]["batch"],
        MODELS[model]["steps"],
        arguments.windows + WARM_UP,
    )
    environment = {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}:{PEERS}",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
    }
    environment.pop("TF_CONFIG", None)
    if kind == "tfdist":
        command = [
            python,
            "-m",
            "tfdist.train",
            *TFDIST[model],
            "--precision=bfloat16",
            "--strategy=one_device",
            f"--micro_batch={batch}",
            "--accumulation=1",
            f"--steps={windows * steps}",
            f"--log_every={steps}",
            "--eval_every=-1",
            "--save_minutes=0",
            "--nosave_final",
            "--export=none",
            "--noplot",
            "--progress=none",
            "--trackers=none",
            f"--run_dir={folder / 'run'}",
            *(["--nojit_compile"] if engine == "tfdist-no-xla" else []),
        ]
    else:
        command = [
            python,
            str(PEERS / f"gpu_{kind}.py"),
            model,
            str(batch),
            str(steps),
            str(windows),
            str(folder / "result.json"),
            *(["compile"] if engine.endswith("compile") else []),
        ]
    started = time.time()
    with open(folder / "output.log", "w", encoding="utf-8") as output:
        try:
            code = subprocess.run(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=LONGEST,
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"none within {LONGEST} s"
    if code:
        lines = (folder / "output.log").read_text(errors="replace").strip().splitlines()
        return {
            "error": (
                f"ended with code {code}: {lines[-1][:300] if lines else 'no output'} (see {folder / 'output.log'})"
            )
        }
    noted = (
        tfdist_notes(folder / "run" / "logs" / "rank-0.jsonl")
        if kind == "tfdist"
        else json.loads((folder / "result.json").read_text())
    )
    ends, expected = noted["ends"], MODELS[model]["parameters"]
    if abs(noted["parameters"] - expected) > PARAMETER_TOLERANCE * expected:
        return {"error": f"its model has {noted['parameters']:,} parameters instead of {expected:,}: not comparable"}
    units = steps * batch * MODELS[model]["units"]
    rates = [units / (end - begin) for begin, end in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]
    return {
        "rates": rates,
        "parameters": noted["parameters"],
        "batch": batch,
        "startup_s": ends[0] - started - (steps - 1) * units / steps / statistics.median(rates),
    }


def tfdist_notes(log: Path) -> dict:
    """Reads tfdist's log: when each interval of --log_every steps ended, and the number of parameters."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    parameters = next(record["values"]["parameters"] for record in records if record["kind"] == "start")
    return {
        "ends": [datetime.fromisoformat(record["time"]).timestamp() for record in records if record["kind"] == "train"],
        "parameters": parameters,
    }


def figures(result: dict, peak: float) -> str:
    model, rate = MODELS[result["model"]], statistics.median(result["rates"])
    mfu = f"{100 * rate * model['flops'] / peak / 1e12:.1f} %" if peak else "unknown, give --peak_tflops"
    return (
        f"{rate:,.0f} {model['unit']}/s ({min(result['rates']):,.0f} to {max(result['rates']):,.0f}), MFU {mfu}, first"
        f" step after {result['startup_s']:.0f} s"
    )


def row(result: dict, peak: float) -> dict:
    """Returns a row for the page of scripts/acceptance."""
    what = {"model, engine": f"{result['model']}, {result['engine']}"}
    if "error" in result:
        return {**what, "units a second": result["error"]}
    model, rate = MODELS[result["model"]], statistics.median(result["rates"])
    return {
        **what,
        "units a second": rate,
        "of": model["unit"],
        "MFU, %": 100 * rate * model["flops"] / peak / 1e12 if peak else 0.0,
        "first step after, s": result["startup_s"],
        "bar": rate,
    }


def table(results: list[dict], gpu: str, peak: float) -> str:
    lines = [f"{gpu}, bfloat16; median (smallest to largest) of the windows; MFU of {peak:g} TFLOP/s.", ""]
    for model in dict.fromkeys(result["model"] for result in results):
        lines += (
            [f"**{model}**", ""]
            + [
                f"- {result['engine']}: {result.get('error') or figures(result, peak)}"
                for result in results
                if result["model"] == model
            ]
            + [""]
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
