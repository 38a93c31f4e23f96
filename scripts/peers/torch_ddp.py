"""Peer: PyTorch DistributedDataParallel over Gloo. Variants: "" eager; "compile" with torch.compile.

PyTorch at its best on a CPU, as its own guides recommend: channels-last images, fused Adam, gradients as views of the
buckets, sparse gradients for the large table, no DataLoader. A single process does not use DistributedDataParallel.
"""

from cell import Cell

cell = Cell()

import os  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch_models import build  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    if cell.world > 1:
        dist.init_process_group("gloo", rank=cell.rank, world_size=cell.world)
    x, y = (torch.from_numpy(array.copy()) for array in cell.batches())
    images, y = x.dim() == 5, y.long()
    if images:
        x = x.permute(0, 1, 4, 2, 3)  # [S, B, C, H, W] whose memory is channels-last
    sparse = cell.variant != "compile"  # sparse gradients break torch.compile
    plain = model = build(cell.workload, sparse)
    if images:
        plain = model = model.to(memory_format=torch.channels_last)
    optimizer = make_optimizer(plain.parameters(), sparse and cell.workload.kind == "embedding")
    if cell.resume:
        restore(plain, optimizer)
    if cell.world > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if cell.variant == "compile":
        model = torch.compile(model)
    position = 0
    for _ in range(cell.windows):
        total = torch.zeros(())
        for _ in range(cell.steps):
            index = position % len(x)
            logits = model(x[index])
            loss = F.cross_entropy(logits.flatten(0, -2), y[index].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            position += 1
        cell.window(total.item() / cell.steps)
        if cell.rank == 0 and cell.due():
            save(plain, optimizer, position)
    cell.finish(
        parameters=sum(parameter.numel() for parameter in plain.parameters()),
        flops=forward_flops(plain, x[0]),
        versions=f"PyTorch {torch.__version__}",
    )
    if cell.world > 1:
        dist.barrier()
        os._exit(0)  # after an orderly exit, Gloo's threads may run for seconds


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Writes a snapshot; called on the chief. The others wait in their next all-reduce."""
    cell.snapshots.mkdir(exist_ok=True)
    part = cell.snapshots / "newest.part"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}, part)
    part.replace(cell.snapshots / "newest.pt")


def restore(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restores the newest snapshot; called on every worker."""
    state = torch.load(cell.snapshots / "newest.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    cell.restored = state["steps"]


def make_optimizer(parameters, sparse: bool):
    if cell.workload.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=cell.workload.learning_rate, eps=1e-7, fused=True)
    return torch.optim.SGD(parameters, lr=cell.workload.learning_rate, **({} if sparse else {"fused": True}))


def forward_flops(model: torch.nn.Module, x: torch.Tensor) -> int:
    """Counts the FLOPs of matrix products and convolutions in a forward pass, including the products of attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model.eval()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x)
    return counter.get_total_flops()


main()
