"""python scripts/acceptance/attention.py OUT [--rehearse]: compares cuDNN's attention with the formula in float32, for
shapes of real models and for odd ones; measures how long both take for GPT-2's shape.
"""

from __future__ import annotations

import itertools
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
            is_even = sizes[1] % 2 == sizes[2] % 2 == 0  # other shapes have no kernel with a mask
            for is_masked, is_causal in itertools.product((False, True), repeat=2):
                if is_masked and not is_even or is_causal and sizes[1] != sizes[2]:
                    continue
                found = distance(dtype, sizes, sizes[-1] ** -0.5, is_causal, is_masked)
                kind = {"causal": is_causal, "mask": is_masked}
                rows.append({"B, T, S, N, H": str(sizes), "dtype": dtype.name, **kind, "off": found})
                write_rows(out, rows)
    if wrong := [row for row in rows if not row["off"] <= TOLERANCE]:
        fail(f"{len(wrong)} of {len(rows)} differ from the formula by more than {TOLERANCE}: {wrong[0]}")
    batch = (2 if rehearse else GPT2[0], *GPT2[1:])
    print(f"{len(rows)} shapes within {max(row['off'] for row in rows):.2g} of the formula")
    for name, is_masked in itertools.product(("cudnn_attention", "attention_by_formula"), (False, True)):
        found = milliseconds(name, batch, is_masked)
        rows.append({"B, T, S, N, H": str(batch), "by": name, "causal": True, "mask": is_masked, "ms": found})
        write_rows(out, rows)


def milliseconds(name: str, sizes: tuple[int, int, int, int, int], is_masked: bool) -> float:
    """Returns the time of one forward and backward pass, causal, in bfloat16, compiled by XLA."""
    import tensorflow as tf

    from tfdist.models import cudnn_attention

    inputs = cudnn_attention.random_inputs(tf.bfloat16, sizes)
    mask = cudnn_attention.random_mask((sizes[0], 1, *sizes[1:3])) if is_masked else None
    scores = cudnn_attention.Scores(sizes[-1] ** -0.5, True, mask)
    attention = getattr(cudnn_attention, name)
    compute = tf.function(cudnn_attention.with_gradients(attention, scores), jit_compile=True, autograph=False)
    compute(*inputs)[0].numpy()
    began, times = time.perf_counter(), 20
    for _ in range(times):
        found = compute(*inputs)
    found[0].numpy()
    return 1e3 * (time.perf_counter() - began) / times


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--rehearse" in sys.argv)
