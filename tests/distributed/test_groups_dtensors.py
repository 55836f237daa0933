"""DTensors under process groups: combined over their own meshes first, then as one row."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fastclip import GradClipper
from fastclip.rules import AdaGC, MaxNorm
from tests.distributed import splits
from tests.distributed.ranks import Pool

STAGES = [["embed", "w0", "norm0"], ["w1", "norm1", "embed"]]  # two ranks each
ABSENT = ("w0", "experts.0", "experts.1")  # gradients, at step 1
PLACEMENTS: dict[str, Placement] = {"norm0": Replicate(), "norm1": Replicate()}


def expert() -> str:
    return f"experts.{dist.get_rank()}"


def pipeline() -> tuple[DeviceMesh, list[str], dict[str, Any]]:
    """Two stages of FSDP that tie `embed`; of each rank an expert of its own, as a plain tensor."""
    stage = dist.get_rank() // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    return (
        mesh["shard"],
        STAGES[stage],
        {
            # experts meet over both dimensions; what a mesh has combined counts once all the same
            "process_group": [mesh.get_group("shard"), mesh.get_group("stage")],
            "counts": lambda name, _: (name, stage) != ("embed", 1),
        },
    )


def everywhere() -> tuple[DeviceMesh, list[str], dict[str, Any]]:
    """FSDP over all ranks, and experts."""
    mesh = init_device_mesh("cpu", (4,))
    return mesh, STAGES[0], {"process_group": dist.group.WORLD}


def counted_once() -> tuple[DeviceMesh, list[str], dict[str, Any]]:
    """The same where the user says that the whole tensors count on one rank."""
    mesh, names, groups = everywhere()
    return mesh, names, groups | {"counts": lambda n, _: n == expert() or dist.get_rank() == 2}


LAYOUTS = {each.__name__: each for each in (pipeline, everywhere, counted_once)}


def own_gradients(mesh: DeviceMesh, names: list[str], step: int) -> dict[str, Tensor]:
    """Of step 1 three are missing: `w0` and the experts of the ranks 0 and 1."""
    grads = splits.gradients(step)
    own: dict[str, Tensor] = {
        name: distribute_tensor(grads[name], mesh, [PLACEMENTS.get(name, Shard(0))])
        for name in names
    }
    own[expert()] = grads[expert()]
    return {name: grad for name, grad in own.items() if step != 1 or name not in ABSENT}


def compared(layout: str, rule: str, p: float, bad: str) -> Any:
    mesh, names, groups = LAYOUTS[layout]()
    start = own_gradients(mesh, names, 9)
    own = {name: value.detach().clone().requires_grad_() for name, value in start.items()}
    rules: dict[str, Any] = {"MaxNorm": MaxNorm(1.0), "AdaGC": AdaGC(warmup=1, max_norm=1.0)}
    policy: Any = "zero" if bad == "zero" else "skip"
    clipper = GradClipper(own.items(), rule=rules[rule], norm_type=p, nonfinite=policy, **groups)
    seen = []
    for step in range(3):
        grads = own_gradients(mesh, names, step)
        for name, parameter in own.items():
            parameter.grad = grads[name].clone() if name in grads else None
        if bad and step == 2 and dist.get_rank() == 1:
            gradient = own[names[0]].grad
            assert isinstance(gradient, DTensor)
            gradient.to_local()[0, 0] = math.nan
        stats = clipper.clip_()
        whole = (
            {
                name: parameter.grad.full_tensor()
                if isinstance(parameter.grad, DTensor)
                else parameter.grad
                for name, parameter in own.items()
            }
            if step != 1
            else {}
        )
        by_rank = [(each.rank, each.nan, each.nonfinite) for each in stats.by_rank()]
        seen.append((stats.as_dict(), whole, by_rank))
    return seen, clipper.state_dict()["state"]


def expected(names: list[str], rule: str, p: float) -> Any:
    """The same in one process."""
    own = {name: torch.zeros(splits.SHAPES[name], requires_grad=True) for name in names}
    rules: dict[str, Any] = {"MaxNorm": MaxNorm(1.0), "AdaGC": AdaGC(warmup=1, max_norm=1.0)}
    clipper = GradClipper(own.items(), rule=rules[rule], norm_type=p)
    seen = []
    for step in range(3):
        grads = splits.gradients(step)
        for name, parameter in own.items():
            parameter.grad = None if step == 1 and name in ABSENT else grads[name]
        stats = clipper.clip_()
        seen.append((stats.as_dict(), {name: parameter.grad for name, parameter in own.items()}))
    return seen, clipper.state_dict()["state"]


ROWS = {
    "pipeline": [
        *("embed", "w0", "norm0", "experts.0", "experts.1"),
        *("w1", "norm1", "experts.2", "experts.3"),
    ],
    "everywhere": [*STAGES[0], *(f"experts.{rank}" for rank in range(4))],
}
ROWS["counted_once"] = ROWS["everywhere"]


@pytest.mark.parametrize("p", [2.0, math.inf, 3.0])
@pytest.mark.parametrize("rule", ["MaxNorm", "AdaGC"])
@pytest.mark.parametrize("layout", ["pipeline", "everywhere", "counted_once"])
def test_the_same_as_one_process(ranks: Pool, layout: str, rule: str, p: float) -> None:
    names = ROWS[layout]
    wanted, wanted_state = expected(names, rule, p)
    answers = ranks.run(4, compared, layout, rule, p, "")
    for seen, state in answers:
        for step, ((stats, whole, _), (theirs, grads)) in enumerate(zip(seen, wanted, strict=True)):
            assert stats["names"] == names
            assert stats["total_norm"] == pytest.approx(theirs["total_norm"], rel=2e-6)
            norms = dict(zip(stats["names"], stats["norms"], strict=True))
            numel = dict(zip(stats["names"], stats["numel"], strict=True))
            for name, norm, size in zip(
                *(theirs[k] for k in ("names", "norms", "numel")), strict=True
            ):
                assert (norms[name], numel[name]) == (pytest.approx(norm, rel=2e-6), size)
            for name, values in whole.items():
                torch.testing.assert_close(values, grads[name], rtol=2e-6, atol=0)
            assert stats == answers[0][0][step][0]  # every bit
        torch.testing.assert_close(state, wanted_state, rtol=2e-6, atol=0)


@pytest.mark.parametrize("policy", ["skip", "zero"])
@pytest.mark.parametrize("layout", ["pipeline", "everywhere"])
def test_the_rank_of_a_bad_shard_is_known_everywhere(ranks: Pool, layout: str, policy: str) -> None:
    for seen, _ in ranks.run(4, compared, layout, "MaxNorm", 2.0, policy):
        stats, _, by_rank = seen[2]
        assert by_rank == [(rank, int(rank == 1), ["embed"] * (rank == 1)) for rank in range(4)]
        # of the pipeline the other stage has a copy, and cannot know which element to zero
        assert stats["skipped"] == (policy == "skip" or layout == "pipeline")
        assert stats["nan_count"][0] == 1
        if policy == "zero":
            assert math.isfinite(stats["total_norm"])
