"""What may be passed as parameters, and how gradients are found, named and told apart."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastclip
from tests.making import floats, grads_of, parameters


class Net(nn.Module):
    """Tied weights, a frozen parameter, one without a gradient, and nesting."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(self.embed(x)))
        return out


def trained() -> Net:
    net = Net()
    net(torch.tensor([1, 2, 4])).square().sum().backward()
    return net


def _norm(net: nn.Module) -> float:
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads))


NAMES = ("embed.weight", "inner.0.weight", "inner.0.bias", "head.bias")


def test_a_module() -> None:
    net = trained()
    stats = fastclip.grad_stats(net)
    assert stats.names == NAMES
    assert stats.total_norm.item() == pytest.approx(_norm(net), rel=1e-6)
    before = _norm(net)
    assert fastclip.clip_grad_norm_(net, before / 2).item() == pytest.approx(before, rel=1e-6)
    assert _norm(net) == pytest.approx(before / 2, rel=1e-5)


def test_every_form_means_the_same() -> None:
    net = trained()
    total = fastclip.grad_stats(net).total_norm.item()
    forms: dict[str, Any] = {
        "generator": net.parameters(),
        "list": list(net.parameters()),
        "tuple": tuple(net.parameters()),
        "set": set(net.parameters()),
        "named-generator": net.named_parameters(),
        "named-list": list(net.named_parameters()),
        "dict-items": dict(net.named_parameters()).items(),
        "dict-values": dict(net.named_parameters()).values(),
        "iterator": iter(list(net.parameters())),
        "duplicates": [*net.parameters(), *net.parameters()],
        "named-duplicates": net.named_parameters(remove_duplicate=False),
    }
    for name, form in forms.items():
        got = fastclip.clip_grad_norm_(form, math.inf).item()
        assert got == pytest.approx(total, rel=1e-6), name


def test_pairs_give_names_and_plain_tensors_positions() -> None:
    net = trained()
    assert fastclip.grad_stats(net.named_parameters()).names == NAMES
    # a module's own parameters come first: the unused and the frozen one have positions 0 and 1
    assert fastclip.grad_stats(net.parameters()).names == ("2", "3", "4", "5")


def test_the_order_is_the_callers() -> None:
    pairs = list(trained().named_parameters())[::-1]
    assert fastclip.grad_stats(pairs).names == NAMES[::-1]


def test_a_single_tensor() -> None:
    (param,) = parameters(floats(3.0, 4.0))
    assert fastclip.grad_stats(param).names == ("0",)
    assert fastclip.clip_grad_norm_(param, 2.5).item() == 5.0
    assert param.grad is not None
    assert param.grad.tolist() == pytest.approx([1.5, 2.0], rel=1e-6)


def test_a_generator_that_yields_parameters_made_on_the_way() -> None:
    made = parameters(floats(3.0), None, floats(4.0))

    def produce() -> Iterator[Tensor]:
        yield from made

    assert fastclip.grad_stats(produce()).names == ("0", "2")


def test_tied_weights_keep_the_first_name() -> None:
    grad = floats(3.0)
    first, second = parameters(grad, grad)
    stats = fastclip.grad_stats([("embed", first), ("head", second)])
    assert (stats.names, stats.total_norm.item()) == (("embed",), 3.0)


def test_equal_but_distinct_gradients_both_count() -> None:
    stats = fastclip.grad_stats(parameters(floats(3.0), floats(3.0)))
    assert stats.names == ("0", "1")
    assert stats.total_norm.item() == pytest.approx(math.sqrt(18), rel=1e-6)


def test_the_same_storage_at_another_dtype_or_shape_is_another_gradient() -> None:
    base = floats(3.0, 4.0, 12.0, 0.0)
    views = [base[:2], base[:3], base.view(2, 2)]
    assert fastclip.get_total_norm(views).item() == pytest.approx(
        math.sqrt(25 + 169 + 169), rel=1e-6
    )


def test_empty_gradients_are_never_the_same() -> None:
    stats = fastclip.grad_stats(parameters(torch.zeros(0), torch.zeros(0), floats(1.0)))
    assert (stats.names, stats.numel) == (("0", "1", "2"), (0, 0, 1))


def test_gradients_that_require_grad() -> None:
    """As after backward(create_graph=True): clipped in place, outside the graph."""
    weight = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    assert grad.requires_grad
    weight.grad = grad
    assert fastclip.clip_grad_norm_([weight], 1.0).item() == pytest.approx(math.sqrt(27))
    assert grad.detach().tolist() == pytest.approx([1 / math.sqrt(3)] * 3, rel=1e-6)
    leaf = floats(3.0, 4.0).requires_grad_()
    assert not fastclip.get_total_norm([leaf]).requires_grad
    weight.grad = None  # the cycle that create_graph made


def test_subclasses_that_only_add_methods_are_served() -> None:
    class Labelled(Tensor):
        pass

    plain = floats(3.0, 4.0)
    params = parameters(floats(0.0, 0.0))
    params[0].grad = plain.as_subclass(Labelled)
    assert fastclip.clip_grad_norm_(params, 2.5).item() == 5.0
    assert plain.tolist() == pytest.approx([1.5, 2.0], rel=1e-6)
    assert type(fastclip.clip_grad_norm_(params, 2.5)) is Tensor


def test_default_dtype_and_device_do_not_matter() -> None:
    params = parameters(floats(3.0), floats(4.0), floats(5.0).expand(7), None)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            norm = fastclip.clip_grad_norm_(params, 1.0)
            none = fastclip.clip_grad_norm_([], 1.0)
            assert fastclip.grad_stats(params).total_norm.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert (norm.dtype, norm.device.type) == (torch.float32, "cpu")
    assert (none.dtype, none.device.type) == (torch.float32, "cpu")
    assert norm.item() == pytest.approx(math.sqrt(25 + 175), rel=1e-6)


def test_inference_and_no_grad_modes() -> None:
    for mode in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        params = parameters(floats(3.0, 4.0), floats(0.0).expand(3))
        with mode:
            assert fastclip.clip_grad_norm_(params, 2.5).item() == 5.0
            assert fastclip.grad_stats(params).total_norm.item() == pytest.approx(2.5, rel=1e-6)
        assert grads_of(params)[0].tolist() == pytest.approx([1.5, 2.0], rel=1e-6)


def test_dtensor_on_a_mesh_of_one_process() -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        params = parameters(floats(12.0))
        for grad, placement in ((floats(3.0, 0.0), Shard(0)), (floats(4.0), Replicate())):
            param = distribute_tensor(torch.zeros_like(grad), mesh, [placement]).requires_grad_()
            param.grad = distribute_tensor(grad, mesh, [placement])
            params.append(param)
        assert fastclip.grad_stats(params).numel == (1, 2, 1)
        norm = fastclip.clip_grad_norm_(params, 6.5)
        assert type(norm) is Tensor
        assert norm.item() == 13.0
        stored = [g.to_local() if isinstance(g, DTensor) else g for g in grads_of(params)]
        assert [value for grad in stored for value in grad.tolist()] == pytest.approx(
            [6.0, 1.5, 0.0, 2.0], rel=1e-6
        )
    finally:
        distributed.destroy_process_group()
