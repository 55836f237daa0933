"""The hook of DDP: what it measures is right, and what DDP does stays the same."""

from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fastclip
from fastclip.distributed import Attribution, attribution_hook
from tests.distributed.ddp import (
    EACH,
    LAYOUTS,
    backward,
    batch,
    counting,
    hooked,
    layers,
    own_gradients,
    sgd_steps,
)
from tests.distributed.ranks import Pool
from tests.forbidding import no_methods

Norms = dict[str, float]

layout = pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)


def measured_and_own(
    options: dict[str, Any], dtype: torch.dtype, p: float
) -> tuple[list[tuple[Norms, Norms]], list[int]]:
    """For each step the norms of the attribution and this rank's own; and the buckets a step."""
    buckets: list[int] = []
    model, attribution = hooked(options, dtype, inner=(buckets, counting), norm_type=p)
    norms = []
    for step in sgd_steps(model, 3):
        own = own_gradients(model, batch(step, dtype))
        backward(model, batch(step, dtype))
        stats = attribution.local()
        norms.append(
            (
                dict(zip(stats.names, stats.norms.tolist(), strict=True)),
                {name: grad.norm(p).item() for name, grad in own.items()},
            )
        )
    return norms, buckets


@layout
def test_norms_are_those_of_the_ranks_own_backward(ranks: Pool, options: dict[str, Any]) -> None:
    for norms, buckets in ranks.run(2, measured_and_own, options, torch.float32, 2.0):
        for found, expected in norms:
            assert found == pytest.approx(expected, rel=1e-6)
            assert list(found) == list(expected)
        assert buckets[-1] == (6 if "bucket_cap_mb" in options else 1)


@pytest.mark.parametrize("p", [1.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_and_orders(ranks: Pool, dtype: torch.dtype, p: float) -> None:
    for norms, _ in ranks.run(2, measured_and_own, LAYOUTS["bucket-each"], dtype, p):
        for found, expected in norms:
            assert found == pytest.approx(expected, rel=1e-6)


def accumulated(options: dict[str, Any]) -> list[tuple[float, float, int]]:
    """Of each step of three micro-batches the norm measured, that of their sum, and the steps."""
    model, attribution = hooked(options)
    norms = []
    for step in sgd_steps(model, 2):
        micro = [batch(3 * step + part) for part in range(3)]
        own = own_gradients(model, *micro)
        with model.no_sync():
            backward(model, micro[0])
            backward(model, micro[1])
        backward(model, micro[2])
        total = torch.cat([grad.view(-1) for grad in own.values()]).norm().item()
        norms.append((attribution.local().total_norm.item(), total, attribution.steps))
    return norms


@pytest.mark.parametrize("name", ["bucket-each", "views", "unused"])
def test_accumulation_is_measured_once_and_whole(ranks: Pool, name: str) -> None:
    for norms in ranks.run(2, accumulated, LAYOUTS[name]):
        assert [steps for _, _, steps in norms] == [1, 2]
        for found, expected, _ in norms:
            assert found == pytest.approx(expected, rel=1e-6)


def uneven() -> tuple[int, list[list[float]]]:
    """Rank 1 has two batches more than rank 0, which goes along with empty hands."""
    model, attribution = hooked({})
    with model.join():
        for step in range(1 + 2 * dist.get_rank()):
            model.zero_grad()
            backward(model, batch(step))
    norms = [[each.norm for each in attribution.by_rank(step)] for step in range(3)]
    return attribution.steps, norms


def test_a_rank_without_batches_counts_steps_of_nothing(ranks: Pool) -> None:
    for steps, norms in ranks.run(2, uneven):
        assert steps == 3
        assert all(norms[0])
        assert [(first, second > 0) for first, second in norms[1:]] == [(0.0, True)] * 2


def _own_hook(model: DistributedDataParallel, state: Any, hook: Any) -> None:
    if hook is not None:
        model.register_comm_hook(state, hook)


def _attributed(model: DistributedDataParallel, state: Any, hook: Any) -> None:
    inner = None if hook is None else (state, hook)
    model.register_comm_hook(Attribution(model, inner=inner), attribution_hook)


def _power_sgd() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=1, start_powerSGD_iter=2
    )


HOOKS: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "allreduce": (None, default_hooks.allreduce_hook),
    "fp16": (None, default_hooks.fp16_compress_hook),
    "power-sgd": (_power_sgd, powerSGD_hook.powerSGD_hook),
}


def with_and_without(options: dict[str, Any], name: str) -> list[tuple[Tensor, Tensor]]:
    """The parameters after four steps, with the attribution and without."""
    make, hook = HOOKS[name]
    trained = []
    for register in (_attributed, _own_hook):
        model = layers(options)
        register(model, None if make is None else make(), hook)
        for step in sgd_steps(model, 4):
            backward(model, batch(step))
        trained.append([p.detach() for p in model.parameters()])
    return list(zip(*trained, strict=True))


def require_bitwise(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for found, expected in pairs:
        assert found.equal(expected)
        assert found.isfinite().all()


@pytest.mark.parametrize("size", [1, 2, 3])
@layout
def test_training_is_bitwise_that_without(ranks: Pool, options: dict[str, Any], size: int) -> None:
    for pairs in ranks.run(size, with_and_without, options, "none"):
        require_bitwise(pairs)


@pytest.mark.parametrize("name", [name for name in HOOKS if name != "none"])
def test_other_hooks_work_inside(ranks: Pool, name: str) -> None:
    # Over gloo torch's PowerSGD waits for its own collectives in different orders on the ranks as
    # soon as there are two buckets.
    options = LAYOUTS["one-bucket" if name == "power-sgd" else "bucket-each"]
    for pairs in ranks.run(2, with_and_without, options, name):
        require_bitwise(pairs)


def compressed() -> tuple[list[Tensor], list[Tensor], float, float]:
    """The gradients after bfloat16, what they should be, the norm measured and that before."""
    model, attribution = hooked({}, inner=(None, default_hooks.bf16_compress_hook))
    own = own_gradients(model, batch(0))
    backward(model, batch(0))
    mean = []
    for grad in own.values():
        half = grad.bfloat16().div_(2)
        dist.all_reduce(half)
        mean.append(half.float())
    total = torch.cat([grad.view(-1) for grad in own.values()]).norm().item()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return grads, mean, attribution.local().total_norm.item(), total


def test_compression_comes_after_the_measure(ranks: Pool) -> None:
    for grads, mean, found, expected in ranks.run(2, compressed):
        assert all(grad.equal(other) for grad, other in zip(grads, mean, strict=True))
        assert found == pytest.approx(expected, rel=1e-6)


def sparse() -> tuple[fastclip.GradStats, list[tuple[Tensor, Tensor]]]:
    trained, stats = [], None
    for with_hook in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
        model = DistributedDataParallel(module)
        attribution = Attribution(model)
        if with_hook:
            model.register_comm_hook(attribution, attribution_hook)
        backward(model, torch.tensor([1, 1, 2 + dist.get_rank()]))
        stats = attribution.local() if with_hook else stats
        trained.append([p.grad.to_dense() for p in model.parameters() if p.grad is not None])
    assert stats is not None
    return stats, list(zip(*trained, strict=True))


def test_sparse_gradients(ranks: Pool) -> None:
    for stats, pairs in ranks.run(2, sparse):
        assert stats.names == ("0.weight", "1.weight", "1.bias")
        assert stats.numel[0] == 2 * 4  # of the rows that there are, the same index summed
        require_bitwise(pairs)


def collectives(options: dict[str, Any]) -> tuple[list[str], list[str], int]:
    """What was sent in three steps, in a by_rank, and how many buckets there were."""
    buckets: list[int] = []
    model, attribution = hooked(options, inner=(buckets, counting))
    recorded = []
    with no_methods():
        for step in range(2):
            backward(model, batch(step))
        with profile(activities=[ProfilerActivity.CPU]) as training:
            backward(model, batch(2))
            attribution.local()
    with profile(activities=[ProfilerActivity.CPU]) as asking:
        attribution.by_rank()
    for profiler in (training, asking):
        events = profiler.events()
        assert events is not None
        recorded.append([event.name for event in events if event.name.startswith("gloo:")])
    return recorded[0], recorded[1], buckets[-1]


@pytest.mark.parametrize("name", ["one-bucket", "bucket-each"])
def test_nothing_is_sent_or_read_before_somebody_asks(ranks: Pool, name: str) -> None:
    for training, asking, buckets in ranks.run(2, collectives, LAYOUTS[name]):
        assert training == ["gloo:all_reduce"] * buckets
        assert asking
        assert set(asking) == {"gloo:all_gather"}


def of_another_model() -> str:
    first, second = layers({}), layers({"bucket_cap_mb": EACH})
    attribution = Attribution(first)
    second.register_comm_hook(attribution, attribution_hook)
    backward(second, batch(0))
    with pytest.raises(RuntimeError) as error:
        attribution.local()
    return str(error.value)


def test_the_attribution_of_another_model_is_refused(ranks: Pool) -> None:
    for message in ranks.run(2, of_another_model):
        assert "register it with the model that it was made for" in message


def refused() -> list[str]:
    model, swapped = layers({}), cast(Any, (default_hooks.allreduce_hook, None))
    messages = []
    for make in (
        partial(Attribution, model.module),
        partial(Attribution, model, history=0),
        partial(Attribution, model, inner=swapped),
        partial(Attribution, model, norm_type=float("nan")),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            make()
        messages.append(f"{error.type.__name__}: {error.value}")
    return messages


def test_wrong_arguments_are_refused(ranks: Pool) -> None:
    (messages,) = ranks.run(1, refused)
    starts = [
        "TypeError: model must be a DistributedDataParallel, got Layers. FSDP2 has no such hook: "
        "its shards are averages of all ranks",
        "ValueError: history must be at least 1, got 0",
        "TypeError: inner must be a pair (state, hook)",
        "ValueError: norm_type must be a number",
    ]
    for message, start in zip(messages, starts, strict=True):
        assert message.startswith(start)
