"""Every block of docs/distributed.md runs, on as many ranks as it says, and does what is said."""

import math
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.distributed.ranks import Pool
from tests.docs.pages import blocks, text

PAGE = text("distributed.md")
COMMON, *BLOCKS = (block.code for block in blocks("distributed.md") if block.language == "python")
RANKS = re.compile(r"# torchrun --nproc-per-node=(\d)\n")
TITLES = (
    *("ddp", "fsdp-tensor", "experts", "pipeline", "tied", "megatron", "by-rank", "losses"),
    *("attribution", "checkpoint"),
)
MODEL_PARALLEL = "parallel_state.get_model_parallel_group()"


def fresh() -> dict[str, Any]:
    """A namespace with the page's first block in it, whose process group these ranks have."""
    names: dict[str, Any] = {}
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", asked.append)
        exec(COMMON, names)
    assert asked == [dist.get_backend()]
    return names


def after(title: str) -> dict[str, Any]:
    """What a block leaves behind."""
    names = fresh()
    exec(BLOCKS[TITLES.index(title)], names)
    return names


def one_process(names: dict[str, Any], shares: int, steps: int = 1) -> dict[str, Tensor]:
    """The gradients of the last of some steps of one process with the batches of all `shares`, by
    torch's own functions."""
    torch.manual_seed(0)
    model = names["Model"]()
    optimizer = torch.optim.AdamW(model.parameters())
    grads: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        for share in range(shares):
            inputs, targets = names["batch_of"](step, share)
            (names["loss_fn"](model(inputs), targets) / shares).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return grads


def norm_of(grads: dict[str, Tensor]) -> float:
    return torch.cat([grad.double().view(-1) for grad in grads.values()]).norm().item()


def run(ranks: Pool, title: str, job: Any, *arguments: Any) -> list[Any]:
    size = RANKS.match(BLOCKS[TITLES.index(title)])
    assert size is not None
    return ranks.run(int(size[1]), job, *arguments)


def test_every_block_is_run() -> None:
    assert len(BLOCKS) == len(TITLES)
    assert all(RANKS.match(block) for block in BLOCKS)
    assert not RANKS.search(COMMON)


def counted(names: dict[str, Any]) -> dict[str, int]:
    return {name: int(count) for name, count in names["clipper"].counters().items()}


def ddp() -> tuple[float, float, dict[str, int], bool]:
    names = after("ddp")
    expected = one_process(names, shares=2, steps=3)
    stats = names["stats"]
    same = stats.names == tuple(expected)
    return stats.total_norm.item(), norm_of(expected), counted(names), same


def test_ddp(ranks: Pool) -> None:
    for norm, expected, counts, same_names in run(ranks, "ddp", ddp):
        assert norm == pytest.approx(expected, rel=1e-4)
        assert same_names
        assert counts["steps"] == counts["clipped"] == 3


def fsdp_tensor() -> tuple[type, float, float, float]:
    names = after("fsdp-tensor")
    import fastclip

    left = fastclip.get_total_norm([p.grad for p in names["model"].parameters()])
    total = names["total_norm"]
    return type(total), total.item(), norm_of(one_process(names, shares=2)), left.item()


def test_fsdp_and_tensor_parallel(ranks: Pool) -> None:
    for kind, norm, expected, left in run(ranks, "fsdp-tensor", fsdp_tensor):
        assert kind is Tensor
        assert norm == pytest.approx(expected, rel=1e-5)
        assert left == pytest.approx(0.1, rel=1e-5)


def experts() -> tuple[float, float | None]:
    names = after("experts")
    grad = names["experts"].grad
    return names["total_norm"].item(), None if grad is None else grad.to_local()[0, 0, 0].item()


def test_experts(ranks: Pool) -> None:
    total = math.sqrt(2 * 16 * 16 + 0.25 * 16 * 4)
    first, second = run(ranks, "experts", experts)
    assert first == (pytest.approx(total), pytest.approx(1 / total))
    assert second == (pytest.approx(total), None)


def pipeline() -> tuple[dict[str, float], dict[str, float], float]:
    names = after("pipeline")
    stats = names["stats"]
    expected = one_process(names, shares=2, steps=2)
    return (
        dict(zip(stats.names, stats.norms.tolist(), strict=True)),
        {name: grad.norm().item() for name, grad in expected.items()},
        norm_of(expected) - stats.total_norm.item(),
    )


def test_pipeline(ranks: Pool) -> None:
    answers = run(ranks, "pipeline", pipeline)
    for norms, expected, difference in answers:
        assert norms == pytest.approx(expected, rel=1e-3)
        assert abs(difference) < 1e-3 * sum(expected.values())
    assert all(norms == answers[0][0] for norms, _, _ in answers)


def tied() -> tuple[dict[str, float], dict[str, float], bool, bool]:
    names = after("tied")
    stats, whole = names["stats"], names["whole"]
    found = dict(zip(stats.names, stats.norms.tolist(), strict=True))
    expected = {name: p.grad.norm().item() for name, p in whole.named_parameters()}
    copies = [torch.empty_like(names["tied"]) for _ in range(2)]
    dist.all_gather(copies, names["tied"].detach())
    trained = not torch.equal(copies[0], whole.embed.weight)
    return found, expected, torch.equal(*copies), trained


def test_tied(ranks: Pool) -> None:
    for norms, expected, same, trained in run(ranks, "tied", tied):
        assert norms == pytest.approx(expected, rel=1e-5)
        assert same
        assert trained


@pytest.mark.parametrize("forgotten", ["dist.all_reduce(tied.grad)", "counts=", "process_group="])
def test_the_check_of_a_layout_finds(ranks: Pool, forgotten: str) -> None:
    for error in run(ranks, "tied", without, forgotten):
        assert "Tensor-likes are not close" in error or "Scalars are not close" in error


def without(forgotten: str) -> str:
    """What the block of the tied embedding says without some of its lines."""
    lines = BLOCKS[TITLES.index("tied")].splitlines()
    gone = [forgotten, "counts="] if forgotten == "process_group=" else [forgotten]
    kept = [line for line in lines if not line.strip().startswith(tuple(gone))]
    assert len(kept) == len(lines) - len(gone)
    with pytest.raises(AssertionError) as caught:
        exec("\n".join(kept), fresh())
    return str(caught.value)


def megatron(
    group: str,
) -> tuple[float, float, list[tuple[str, float]], list[tuple[str, float]]]:
    """Four layers over two stages and two tensor-parallel ranks, with marks as Megatron sets them,
    and the gradients that one process has. The head is a copy of the embedding. `group` takes the
    place of that in the block."""
    names, mesh = fresh(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model, expected = nn.ParameterDict(), {}
    for name, grad in one_process(names, shares=1).items():
        if name.startswith("head"):
            continue
        stage, name = _of_stage(name.replace(".", "-"))
        tied = stage is None
        expected["embedding" if tied else f"stage{stage}.{name}"] = grad
        if tied or stage == mesh["pp"].get_local_rank():
            model[name] = _placed(name, grad, mesh["tp"])
        if tied:
            model[name].shared_embedding = True
            model[name].shared = mesh["pp"].get_local_rank() == 1
    names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.0)}
    names |= {"tp_group": mesh["tp"].get_group(), "pp_group": mesh["pp"].get_group()}
    with pytest.MonkeyPatch.context() as patch:
        for module in _megatron(mesh):
            patch.setitem(sys.modules, module.__name__, module)
        exec(BLOCKS[TITLES.index("megatron")].replace(MODEL_PARALLEL, group), names)
    stats = names["stats"]
    found = zip(stats.names, stats.norms.tolist(), strict=True)
    norms = [(name, grad.norm().item()) for name, grad in expected.items()]
    return stats.total_norm.item(), norm_of(expected), sorted(found), sorted(norms)


def _of_stage(name: str) -> tuple[int | None, str]:
    """The stage of a layer, and its name there; no stage for the embedding."""
    found = re.match(r"layers-(\d)-(.*)", name)
    if found is None:
        return None, name
    return int(found[1]) // 2, f"layers-{int(found[1]) % 2}-{found[2]}"


def _placed(name: str, grad: Tensor, tp: Any) -> nn.Parameter:
    """A plain parameter with this rank's part of a gradient, marked."""
    kinds: dict[str, Placement] = {
        **{"up-weight": Shard(0), "up-bias": Shard(0), "down-weight": Shard(1)},
        "embed-weight": Shard(0),
    }
    kind = next((kind for end, kind in kinds.items() if name.endswith(end)), Replicate())
    own = distribute_tensor(grad, tp, [kind]).to_local().clone()
    parameter = nn.Parameter(torch.zeros_like(own))
    parameter.grad = own
    parameter.tensor_model_parallel = kind != Replicate()  # type: ignore[attr-defined]
    return parameter


def _megatron(mesh: Any) -> list[ModuleType]:
    """Stand-ins for the modules that the block imports from."""
    state: Any = ModuleType("megatron.core.parallel_state")
    state.get_pipeline_model_parallel_rank = mesh["pp"].get_local_rank
    state.get_tensor_model_parallel_rank = mesh["tp"].get_local_rank
    state.get_model_parallel_group = lambda: dist.group.WORLD
    core: Any = ModuleType("megatron.core")
    core.parallel_state = state
    return [ModuleType("megatron"), core, state]


@pytest.mark.parametrize("group", [MODEL_PARALLEL, "[tp_group, pp_group]"], ids=["one", "two"])
def test_megatron(ranks: Pool, group: str) -> None:
    assert group in PAGE
    for total, expected, norms, own in run(ranks, "megatron", megatron, group):
        assert total == pytest.approx(expected, rel=1e-6)
        assert [name for name, _ in norms] == [name for name, _ in own]
        assert [norm for _, norm in norms] == pytest.approx([norm for _, norm in own], rel=1e-6)


def by_rank() -> str:
    out = StringIO()
    with redirect_stdout(out):
        after("by-rank")
    return out.getvalue()


def test_by_rank_prints_what_is_shown(ranks: Pool) -> None:
    shown = PAGE[PAGE.index("rank 0: norm") :].split("```")[0]
    assert run(ranks, "by-rank", by_rank) == [shown, shown]


def whose(title: str) -> tuple[list[int], dict[str, int]]:
    names = after(title)
    return names["guilty"], counted(names)


@pytest.mark.parametrize("title", ["losses", "attribution"])
def test_whose_batch_it_was(ranks: Pool, title: str) -> None:
    for guilty, counts in run(ranks, title, whose, title):
        assert guilty == [1]
        assert (counts["steps"], counts["skipped"]) == (4, 1)


def stepped(names: dict[str, Any], step: int) -> float:
    """The norm of a step with the batches of 4 shares, as many on each rank."""
    shares = range(dist.get_rank(), 4, dist.get_world_size())
    batches = zip(*(names["batch_of"](step, share) for share in shares), strict=True)
    inputs, targets = (torch.cat(parts) for parts in batches)
    names["optimizer"].zero_grad()
    names["loss_fn"](names["model"](inputs), targets).backward()
    norm: float = names["clipper"].step(names["optimizer"]).total_norm.item()
    return norm


def saved(folder: str) -> tuple[dict[str, Any], float, set[str]]:
    names = after("checkpoint")
    for step in range(3):
        stepped(names, step)
    names["save"](folder)
    parameters = {name for name, _ in names["model"].named_parameters()}
    return names["clipper"].state_dict(), stepped(names, 3), parameters


def loaded(folder: str) -> tuple[dict[str, Any], float]:
    names = after("checkpoint")
    names["load"](folder)
    return names["clipper"].state_dict(), stepped(names, 3)


def test_checkpoint_for_another_number_of_ranks(ranks: Pool, tmp_path: Path) -> None:
    before = run(ranks, "checkpoint", saved, str(tmp_path))
    answers = ranks.run(2, loaded, str(tmp_path))
    state, norm, parameters = before[0]
    assert set(state["state"]) == parameters
    assert all(each == before[0] for each in before)
    for each, found in answers:
        assert each == state
        assert found == pytest.approx(norm, rel=1e-5)
