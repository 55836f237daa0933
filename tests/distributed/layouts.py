"""Ways to spread the model over ranks with DTensor, each with its gradients after one backward."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.distributed import models

Named = list[tuple[str, Tensor]]


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be spread; a collective if it is. A copy."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it, on the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(model: nn.Module) -> dict[str, Tensor]:
    """What this rank holds of the parameters. Copies."""
    return {name: local(value).detach().clone() for name, value in model.named_parameters()}


def shard(
    model: nn.Module, over: DeviceMesh, leave: Sequence[nn.Module] = (), **options: Any
) -> None:
    """FSDP2, each layer apart and then the rest."""
    for module in model.children():
        if module not in leave:
            fully_shard(module, mesh=over, **options)
    fully_shard(model, mesh=over, **options)


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """As `models.loss`."""
    with warnings.catch_warnings():
        # a linear layer of three-dimensional input returns a view, and nothing here writes it
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        return models.loss(model, data)


def backward(model: nn.Module, index: int, count: int, step: int = 0) -> Named:
    """With this rank's share of a batch."""
    loss(model, models.part(step, index, count)).backward()
    return list(model.named_parameters())


def fsdp(size: int, dtype: torch.dtype = torch.float32, **options: Any) -> Named:
    over = mesh(size)
    model = models.net(dtype)
    shard(model, over, **options)
    return backward(model, over.get_local_rank(), size)


def tensor_parallel(model: models.Net, over: DeviceMesh) -> None:
    """The usual plan: between the layers the sequence is spread, within them the features."""
    parallelize_module(
        model,
        over,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "first": ColwiseParallel(input_layouts=Shard(1)),
            "second": RowwiseParallel(output_layouts=Replicate()),
        },
    )


def tensor(size: int) -> Named:
    """`scale` stays a plain tensor, the same everywhere."""
    model = models.net()
    tensor_parallel(model, mesh(size))
    return backward(model, 0, 1)


def fsdp_tensor(size: int) -> Named:
    over = mesh(size // 2, 2, names=("dp", "tp"))
    model = models.net()
    tensor_parallel(model, over["tp"])
    shard(model, over["dp"])
    return backward(model, over["dp"].get_local_rank(), size // 2)


def hsdp(size: int) -> Named:
    over = mesh(2, size // 2, names=("replicate", "shard"))
    model = models.net()
    shard(model, over)
    return backward(model, torch.distributed.get_rank(), size)


def normal(seed: int, *shape: int) -> Tensor:
    """The same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def placed(seed: int, over: DeviceMesh, placements: Sequence[Placement], *shape: int) -> Tensor:
    """A parameter with a random gradient, both placed alike. Gradients that are partial are a
    different random number on every rank, and their parameter is replicated."""
    full = normal(seed, *shape)
    partial = any(isinstance(each, Partial) for each in placements)
    settled = [Replicate() if isinstance(each, Partial) else each for each in placements]
    parameter = nn.Parameter(distribute_tensor(full, over, settled))
    grad = distribute_tensor(normal(seed + 1, *shape), over, settled)
    if partial:
        own = torch.distributed.get_rank()
        summand = normal(seed + 2 + own, *grad.to_local().shape)
        replicas = [d for d, each in enumerate(placements) if each == Replicate()]
        for dim in replicas:  # copies are copies
            torch.distributed.broadcast(summand, group=over.get_group(dim), group_src=0)
        grad = DTensor.from_local(summand, over, placements, shape=full.shape, stride=full.stride())
    parameter.grad = grad
    return parameter


def by_hand(size: int) -> Named:
    """Every placement on a mesh of one dimension, and of two."""
    line, two = mesh(size), mesh(2, size // 2)
    kinds: dict[str, tuple[DeviceMesh, list[Placement], tuple[int, ...]]] = {
        "replicated": (line, [Replicate()], (5, 3)),
        "rows": (line, [Shard(0)], (5, 3)),
        "columns": (line, [Shard(1)], (3, 7)),
        "one-row": (line, [Shard(0)], (1, 4)),
        "empty": (line, [Shard(0)], (0, 4)),
        "scalar": (line, [Replicate()], ()),
        "partial": (line, [Partial()], (5, 2)),
        "partial-scalar": (line, [Partial()], ()),
        "partial-mean": (line, [Partial("avg")], (2, 3)),
        "replicated-rows": (two, [Replicate(), Shard(0)], (3, 2)),
        "rows-replicated": (two, [Shard(0), Replicate()], (3, 2)),
        "blocks": (two, [Shard(0), Shard(1)], (3, 5)),
        "twice-replicated": (two, [Replicate(), Replicate()], (4,)),
        "partial-rows": (two, [Partial(), Shard(0)], (6, 2)),
        "columns-partial": (two, [Shard(1), Partial()], (2, 5)),
        "partial-replicated": (two, [Partial(), Replicate()], (3,)),
    }
    return [
        (name, placed(10 * number, over, placements, *shape))
        for number, (name, (over, placements, shape)) in enumerate(kinds.items())
    ]


def several(size: int) -> Named:
    """Whole meshes, parts of a mesh, and plain tensors among them."""
    two = mesh(2, size // 2, names=("a", "b"))
    plain = nn.Parameter(normal(1, 3, 4))
    plain.grad = normal(2, 3, 4)
    last = nn.Parameter(normal(3))
    last.grad = normal(4)
    return [
        ("plain", plain),
        ("a.rows", placed(20, two["a"], [Shard(0)], 5, 3)),
        ("b.columns", placed(30, two["b"], [Shard(1)], 2, 7)),
        ("both.blocks", placed(40, two, [Shard(0), Shard(1)], 3, 3)),
        ("line.rows", placed(50, mesh(size), [Shard(0)], 13, 2)),
        ("b.replicated", placed(60, two["b"], [Replicate()], 4)),
        ("last", last),
    ]


class Layout(NamedTuple):
    """How to build one, on how many ranks, and what may be asked of it."""

    build: Callable[..., Named]
    sizes: tuple[int, ...] = (2, 4)
    options: Mapping[str, Any] = MappingProxyType({})
    is_net: bool = True  # its gradients are those of one process with the whole batch
    torch_total: bool = True  # torch.nn.utils.get_total_norm takes it


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

LAYOUTS = {
    "fsdp": Layout(fsdp),
    "fsdp-mixed-precision": Layout(fsdp, (4,), {"mp_policy": BF16}, is_net=False),
    "fsdp-bf16": Layout(fsdp, (4,), {"dtype": torch.bfloat16}, is_net=False),
    "fsdp-cpu-offload": Layout(fsdp, (2,), {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "tensor": Layout(tensor, torch_total=False),
    "fsdp-x-tensor": Layout(fsdp_tensor, (4,), torch_total=False),
    "hsdp": Layout(hsdp, (4,)),
    "by-hand": Layout(by_hand, is_net=False, torch_total=False),
    "several-meshes": Layout(several, (4,), is_net=False, torch_total=False),
}
CASES = [(name, size) for name, layout in LAYOUTS.items() for size in layout.sizes]


def build(name: str, size: int) -> Named:
    layout = LAYOUTS[name]
    return layout.build(size, **layout.options)
