"""python scripts/acceptance/attention.py OUT [--rehearse]: cuDNN's attention against the formula in float32, in shapes
that models have and in odd ones; and how long both take for GPT-2's.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from scripts.acceptance.training import fail, gpus, leave_out, write_rows

SIZES = [  # B, T, S, N, H
    (2, 1024, 1024, 12, 64),
    (4, 197, 197, 3, 64),
    (3, 31, 31, 2, 64),
    (1, 100, 260, 2, 32),
    (2, 1, 64, 2, 128),
    (2, 65, 65, 2, 24),
    (2, 128, 128, 2, 256),
]
GPT2 = (32, 1024, 1024, 12, 64)


def main(out: Path, rehearse: bool) -> None:
    if not gpus():
        leave_out("there is no GPU: XLA has cuDNN's attention on GPUs only.")
    import tensorflow as tf

    from tfdist.models.cudnn_attention import distance
    from tfdist.models.fused_attention import TOLERANCE

    rows: list[dict[str, Any]] = []
    for dtype in (tf.bfloat16, tf.float16):
        for sizes in SIZES:
            for is_causal in (False, True) if sizes[1] == sizes[2] else (False,):
                found = distance(dtype, sizes, sizes[-1] ** -0.5, is_causal)
                rows.append({"B, T, S, N, H": str(sizes), "dtype": dtype.name, "causal": is_causal, "off": found})
                write_rows(out, rows)
    if wrong := [row for row in rows if not row["off"] <= TOLERANCE]:
        fail(f"{len(wrong)} of {len(rows)} are off the formula by more than {TOLERANCE}: {wrong[0]}")
    batch = (2 if rehearse else GPT2[0], *GPT2[1:])
    for name in ("cudnn_attention", "attention_by_formula"):
        rows.append({"B, T, S, N, H": str(batch), "by": name, "ms": milliseconds(name, batch)})
        write_rows(out, rows)
    print(f"{len(rows) - 2} shapes within {max(row['off'] for row in rows[:-2]):.2g} of the formula")


def milliseconds(name: str, sizes: tuple[int, int, int, int, int]) -> float:
    """Of one forward and backward pass, causal, in bfloat16, compiled by XLA."""
    import tensorflow as tf

    from tfdist.models import cudnn_attention

    inputs = cudnn_attention.random_inputs(tf.bfloat16, sizes)
    attention = getattr(cudnn_attention, name)
    compute = tf.function(
        cudnn_attention.with_gradients(attention, sizes[-1] ** -0.5, True), jit_compile=True, autograph=False
    )
    compute(*inputs)[0].numpy()
    began, times = time.perf_counter(), 20
    for _ in range(times):
        found = compute(*inputs)
    found[0].numpy()
    return 1e3 * (time.perf_counter() - began) / times


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--rehearse" in sys.argv)
