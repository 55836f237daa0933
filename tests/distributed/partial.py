"""Gradients that are sums still to be made: jobs for ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fastclip
from fastclip import GradClipper
from tests.distributed import layouts


def parameter(size: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    over = layouts.mesh(dist.get_world_size())
    return nn.Parameter(distribute_tensor(torch.zeros(size, dtype=dtype), over, [Replicate()]))


def summand(local: Tensor, kind: str) -> nn.Parameter:
    """With a gradient of which this rank has that part."""
    made = parameter(len(local), local.dtype)
    assert isinstance(made, DTensor)
    made.grad = DTensor.from_local(local, made.device_mesh, [Partial(kind)])
    return made


def overflowing(kind: str) -> tuple[float, float, list[int]]:
    """The norm of a gradient of 4 elements whose parts are 30000 and 45056 in float16, the
    coefficient that clips it to 1 under "zero", and the counts of NaN and inf."""
    local = torch.full((4,), (30000.0, 45056.0)[dist.get_rank()], dtype=torch.float16)
    made = summand(local, kind)
    stats = GradClipper([("w", made)], 1.0, nonfinite="zero").clip_()
    layer = stats.layers()[0]
    return stats.total_norm.item(), float(stats.coef), [layer.nan, layer.inf]


def in_bfloat16() -> tuple[float, float]:
    """The norm of a sum of bfloat16 parts, and that of the sum in float64."""
    local = layouts.normal(7 + dist.get_rank(), 999).bfloat16()
    whole = local.double()
    dist.all_reduce(whole)
    return fastclip.grad_stats(
        [("w", summand(local, "sum"))]
    ).total_norm.item(), whole.norm().item()


def summand_on_some(having: list[int], further: bool) -> tuple[list[str], float]:
    """By call, the error where these ranks alone have a partial gradient; and a norm afterwards."""
    texts = []
    for call in (fastclip.clip_grad_norm_, GradClipper):
        made = summand(torch.ones(6), "sum")
        if dist.get_rank() not in having:
            made.grad = None
        named: layouts.Named = [("w", made)]
        if further:
            named.append(("all", summand(torch.ones(3), "sum")))
        try:
            result = call(named, 1.0)
            if isinstance(result, GradClipper):
                result.clip_()
        except RuntimeError as error:
            texts.append(str(error))
    return texts, fastclip.clip_grad_norm_([summand(torch.ones(4), "sum")], 1.0).item()


def permuted(kind: str, length: int) -> tuple[float, float]:
    """The norm of a gradient on a mesh whose ranks are not in order, and that of all of it."""
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]])
    local = layouts.normal(3 + dist.get_rank(), length)
    whole = local.double()
    dist.all_reduce(whole)
    made = DTensor.from_local(local, mesh, [Partial(kind), Partial(kind)])
    mean = whole / (4 if kind == "avg" else 1)
    return fastclip.grad_stats([("w", with_grad(made))]).total_norm.item(), mean.norm().item()


def with_grad(grad: DTensor) -> nn.Parameter:
    mesh, zeros = grad.device_mesh, torch.zeros(grad.shape)
    made = nn.Parameter(DTensor.from_local(zeros, mesh, [Replicate()] * mesh.ndim))
    made.grad = grad
    return made


def of_new_groups() -> list[float]:
    """The norms of gradients on equal meshes, whose groups replace each other."""
    norms = []
    for number in range(3):
        group = dist.new_group([0, 1])
        mesh = DeviceMesh.from_group(group, "cpu")
        local = torch.full((4,), 1.0 + number)
        made = with_grad(DTensor.from_local(local.clone(), mesh, [Partial()]))
        norms.append(fastclip.clip_grad_norm_([made], 1.0).item())
        norms.append(fastclip.get_total_norm([DTensor.from_local(local, mesh, [Shard(0)])]).item())
        if number == 0:
            dist.destroy_process_group(group)
    return norms
