"""The workloads as PyTorch modules, with the initial weights of keras_models.py. Legend: workloads.py."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from workloads import BLOCKS, CLASSES, STAGES, Workload, initial

EPSILON = 1e-5


def build(workload: Workload, sparse: bool) -> nn.Module:
    """Returns the float32 model. `sparse`: the table of the embedding workload has sparse gradients."""
    kinds = {"cnn": CNN, "resnet": ResNet, "embedding": Embeddings, "transformer": Transformer}
    return kinds[workload.kind](**workload.sizes, **({"sparse": sparse} if workload.kind == "embedding" else {}))


def set_start(weight: torch.Tensor, name: str) -> None:
    """Sets the initial weight. Keras stores kernels as [in, out] and [height, width, in, out], PyTorch as [out, in] and
    [out, in, height, width].
    """
    with torch.no_grad():
        if weight.dim() == 4:
            weight.copy_(torch.from_numpy(initial(name, tuple(weight.permute(2, 3, 1, 0).shape))).permute(3, 2, 0, 1))
        elif name.startswith("embed"):
            weight.copy_(torch.from_numpy(initial(name, tuple(weight.shape))))
        else:
            weight.copy_(torch.from_numpy(initial(name, tuple(weight.shape[::-1]))).T)


def linear(name: str, inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias)
    set_start(layer.weight, name)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def conv(name: str, inputs: int, outputs: int, size: int, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=bias)
    set_start(layer.weight, name)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def table(name: str, rows: int, width: int, sparse: bool = False) -> nn.Embedding:
    layer = nn.utils.skip_init(nn.Embedding, rows, width, sparse=sparse)
    set_start(layer.weight, name)
    return layer


class CNN(nn.Module):
    def __init__(self, side: int, channels: int):
        super().__init__()
        self.conv_0, self.conv_1 = conv("conv_0", channels, 32, 3, bias=True), conv("conv_1", 32, 64, 3, bias=True)
        self.hidden, self.logits = linear("hidden", (side // 4) ** 2 * 64, 128), linear("logits", 128, CLASSES)

    def forward(self, x):  # [B, C, H, W]
        for layer in (self.conv_0, self.conv_1):
            x = F.max_pool2d(F.relu(layer(x)), 2)
        x = x.permute(0, 2, 3, 1).flatten(1)  # in the order of Keras
        return self.logits(F.relu(self.hidden(x)))


class Residual(nn.Module):
    def __init__(self, name: str, inputs: int, width: int, stride: int):
        super().__init__()
        self.a, self.norm_a = conv(f"{name}/a", inputs, width, 3, stride), nn.BatchNorm2d(width, eps=EPSILON)
        self.b, self.norm_b = conv(f"{name}/b", width, width, 3), nn.BatchNorm2d(width, eps=EPSILON)
        changes = inputs != width
        self.skip = (
            nn.Sequential(conv(f"{name}/skip", inputs, width, 1, stride), nn.BatchNorm2d(width, eps=EPSILON))
            if changes
            else nn.Identity()
        )

    def forward(self, x):
        y = self.norm_b(self.b(F.relu(self.norm_a(self.a(x)))))
        return F.relu(y + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, side: int, channels: int):
        super().__init__()
        self.stem, self.norm = conv("stem", channels, STAGES[0], 3), nn.BatchNorm2d(STAGES[0], eps=EPSILON)
        blocks, inputs = [], STAGES[0]
        for stage, width in enumerate(STAGES):
            for index in range(BLOCKS):
                blocks.append(Residual(f"stage_{stage}_{index}", inputs, width, 2 if stage and not index else 1))
                inputs = width
        self.blocks, self.logits = nn.Sequential(*blocks), linear("logits", inputs, CLASSES)

    def forward(self, x):
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.logits(x.mean((2, 3)))


class Embeddings(nn.Module):
    def __init__(self, rows: int, width: int, features: int, sparse: bool):
        super().__init__()
        self.table = table("embed", rows, width, sparse)
        sizes = (features * width, 256, 64)
        self.hidden = nn.ModuleList(
            linear(f"hidden_{index}", a, b) for index, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False))
        )
        self.logits = linear("logits", sizes[-1], CLASSES)

    def forward(self, x):
        x = self.table(x).flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.logits(x)


class Block(nn.Module):
    def __init__(self, index: int, width: int, heads: int):
        super().__init__()
        name = f"block_{index}"
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, eps=EPSILON), nn.LayerNorm(width, eps=EPSILON)
        self.qkv, self.out = linear(f"{name}/qkv", width, 3 * width), linear(f"{name}/out", width, width)
        self.up, self.down = linear(f"{name}/up", width, 4 * width), linear(f"{name}/down", 4 * width, width)

    def forward(self, x):  # [B, T, D]
        B, T, D = x.shape
        q, k, v = (
            part.view(B, T, self.heads, D // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(D, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int):
        super().__init__()
        self.tokens, self.positions = table("embed_tokens", vocabulary, width), nn.Parameter(torch.empty(length, width))
        set_start(self.positions, "embed_positions")
        self.blocks = nn.Sequential(*(Block(index, width, heads) for index in range(layers)))
        self.norm, self.logits = nn.LayerNorm(width, eps=EPSILON), linear("logits", width, vocabulary, bias=False)

    def forward(self, x):  # [B, T] -> [B, T, V]
        return self.logits(self.norm(self.blocks(self.tokens(x) + self.positions)))
