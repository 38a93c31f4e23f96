"""PyTorch for bench_gpu.py: gpu_torch.py MODEL BATCH STEPS WINDOWS RESULT.json [compile]

bf16 by autocast, fused optimizer, flash attention, channels-last images: as PyTorch's own guides recommend.
"""

import json
import sys
import time

import torch
from torch.nn import functional as F


def main(name: str, batch: int, steps: int, windows: int, path: str, compiled: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
    if name == "gpt2":
        from torch_models import Transformer

        model = Transformer(layers=12, width=768, heads=12, length=1024, vocabulary=50257).cuda()
        model.logits.weight = model.tokens.weight
        x, y = torch.randint(0, 50257, (2, batch, 1024), device="cuda").unbind()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    else:
        from torchvision.models import resnet50

        model = resnet50().cuda().to(memory_format=torch.channels_last)
        x = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
        y = torch.randint(0, 1000, (batch,), device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    run = torch.compile(model) if compiled else model
    ends = []
    for _ in range(windows):
        total = torch.zeros((), device="cuda")
        for _ in range(steps):
            with torch.autocast("cuda", torch.bfloat16):
                logits = run(x)
                loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total += loss.detach()
        total.item()
        ends.append(time.time())
    with open(path, "w") as file:
        json.dump({"ends": ends, "parameters": sum(parameter.numel() for parameter in model.parameters())}, file)


main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5], "compile" in sys.argv[6:])
