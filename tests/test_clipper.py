"""GradClipper: what is refused, what the policies write, and awkward gradients."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastclip import GradClipper, GradStats, rules
from fastclip.testing.variants import Variant
from tests.making import floats, parameters, snapshot, unchanged

NAN, INF = math.nan, math.inf
POLICIES = ("skip", "zero", "error", "propagate")

ones = [torch.ones(1)]
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "both": (lambda: GradClipper(ones, 1.0, rule=rules.ZClip()), TypeError, "pass one of them"),
    "negative": (lambda: GradClipper(ones, -1.0), ValueError, r"at least 0.*got -1\.0"),
    "nan": (lambda: GradClipper(ones, NAN), ValueError, "got nan"),
    "text": (lambda: GradClipper(ones, "1"), TypeError, "got '1'"),  # type: ignore[arg-type]
    "two-elements": (lambda: GradClipper(ones, torch.ones(2)), ValueError, "one element"),
    "policy": (lambda: GradClipper(ones, nonfinite="drop"), ValueError, "'skip', 'zero'.*'drop'"),  # type: ignore[arg-type]
    "order": (lambda: GradClipper(ones, norm_type=NAN), ValueError, "norm_type.*nan"),
    "rule-class": (lambda: GradClipper(ones, rule=rules.ZClip), TypeError, "class ZClip: call it"),  # type: ignore[arg-type]
    "no-rule": (lambda: GradClipper(ones, rule=2.0), TypeError, "decide.*got float"),  # type: ignore[arg-type]
    "rule-as-max-norm": (
        lambda: GradClipper(ones, rules.ZClip()),  # type: ignore[arg-type]
        TypeError,
        "got the rule ZClip: pass it as rule=",
    ),
    "rule-class-as-max-norm": (
        lambda: GradClipper(ones, rules.LogZ),  # type: ignore[arg-type]
        TypeError,
        "got the rule LogZ: pass it as rule=",
    ),
    "parameters": (lambda: GradClipper(3), TypeError, "got int"),  # type: ignore[arg-type]
    "a-name-twice": (
        lambda: GradClipper([("w", ones[0]), ("w", ones[0])], rule=rules.AdaGC()),
        ValueError,
        "'w' comes more than once",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_refusals(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_name_may_come_twice_where_nothing_is_kept_by_it() -> None:
    first, second = parameters(floats(3.0), floats(4.0))
    clipper = GradClipper([("w", first), ("w", second)])
    assert clipper.clip_().total_norm.item() == 5.0


AWKWARD: dict[str, Callable[[], list[Tensor]]] = {
    "dense": lambda: [floats(3.0, NAN, -4.0), floats(-INF, 0.0)],
    "half": lambda: [floats(3.0, -INF).half(), floats(NAN, 4.0).bfloat16()],
    "float64": lambda: [floats(1e200, NAN, dtype=torch.float64), floats(4.0)],
    "strided": lambda: [torch.tensor([[3.0, NAN], [INF, 4.0]]).t(), torch.ones(4)[::2]],
    "negated": lambda: [torch._neg_view(floats(3.0, INF, NAN).half())],
    "expanded": lambda: [torch.tensor([[2.0, NAN]]).expand(3, 2)],
    "complex": lambda: [torch.tensor([3 + 4j, complex(NAN, 1), complex(1, -INF)])],
    "conjugate": lambda: [torch.tensor([3 + 4j, complex(1, INF)]).conj()],
    "sparse": lambda: [
        torch.sparse_coo_tensor(
            torch.tensor([[0, 2, 0]]), [1.0, NAN, 2.0], (4,), check_invariants=True
        )
    ],
    "empty": lambda: [torch.ones(0), floats(NAN)],
}


def values(grads: list[Tensor]) -> list[Tensor]:
    return [g.to_dense().resolve_conj().resolve_neg().clone() for g in grads]


@pytest.mark.parametrize("p", [0, 1, 2, 3, INF, -INF], ids=str)
@pytest.mark.parametrize("make", AWKWARD.values(), ids=AWKWARD.keys())
def test_zero_means_the_norm_of_the_rest(
    each_backend: Variant, make: Callable[[], list[Tensor]], p: float
) -> None:
    grads = make()
    rest = [torch.where(v.isfinite(), v, 0) for v in values(grads)]
    stored = [
        torch.where(g.coalesce().values().isfinite(), g.coalesce().values(), 0)
        if g.is_sparse
        else r
        for g, r in zip(grads, rest, strict=True)
    ]
    total = torch.linalg.vector_norm(
        torch.cat([r.to(torch.complex128).abs().reshape(-1) for r in stored]), p
    ).item()
    coef = min(1.0, 0.5 / (total + 1e-6))
    clipper = GradClipper(parameters(*grads), 0.5, norm_type=p, nonfinite="zero")
    before = snapshot(grads)
    trial = clipper.measure()
    assert unchanged(grads, before)
    stats = clipper.clip_()
    for each in (trial, stats):
        assert each.total_norm.item() == pytest.approx(total, rel=1e-6)
        assert each.coef.item() == pytest.approx(coef, rel=1e-6)
        assert (each.found_inf.item(), each.skipped.item()) == (0.0, False)
        assert each.nonfinite_count.item() > 0
    assert trial.as_dict() == stats.as_dict()
    for got, want in zip(values(grads), rest, strict=True):
        torch.testing.assert_close(
            got, want * coef, rtol=8e-3 if got.element_size() < 4 else 1e-6, atol=0
        )


@pytest.mark.parametrize("policy", POLICIES)
def test_finite_gradients_are_not_written_unless_clipped(policy: Any) -> None:
    params = parameters(floats(3.0, 4.0), torch.full((3,), 1e30))
    versions = [p.grad._version for p in params if p.grad is not None]
    stats = GradClipper(params, 1e31, nonfinite=policy).clip_()
    assert stats.coef.item() == 1.0
    assert not stats.clipped
    assert [p.grad._version for p in params if p.grad is not None] == versions


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "rule", [None, rules.ZClip(), rules.AdaGC()], ids=["MaxNorm", "ZClip", "AdaGC"]
)
def test_large_finite_gradients_are_clipped(rule: Any, policy: Any) -> None:
    """Whose squares overflow float32, and here the norm too."""
    params = parameters(torch.full((16,), 1e38))
    stats = GradClipper(params, rule=rule, nonfinite=policy).clip_()
    assert stats.total_norm.item() == INF
    assert stats.found_inf.item() == 0.0
    assert stats.coef.tolist() == pytest.approx(
        2.5e-39 if rule is None or not rule.per_tensor else [2.5e-39], rel=1e-4
    )
    assert params[0].grad is not None
    assert params[0].grad.tolist() == pytest.approx([0.25] * 16, rel=1e-4)


class Half(rules.MaxNorm):
    """Twice as strict as it says."""

    def decide(self, measured: rules.Measured, state: rules.State) -> rules.Decision:
        coef, threshold, *_ = super().decide(measured, state)
        return rules.Decision(coef / 2, threshold / 2, state)


def test_a_rule_derived_from_another_is_asked_itself() -> None:
    params = parameters(floats(3.0, 4.0))
    stats = GradClipper(params, rule=Half(1.0)).clip_()
    assert stats.threshold.item() == 0.5
    assert params[0].grad is not None
    assert params[0].grad.tolist() == pytest.approx([0.3, 0.4])


def sharing() -> list[Tensor]:
    """The first two have one gradient, the third none."""
    params = parameters(torch.full((2, 2), 10.0), torch.zeros(2, 2), None, torch.full((2, 2), 20.0))
    params[1].grad = params[0].grad
    for number, p in enumerate(params):
        params[number] = torch.full(p.shape, 1.0 + number, requires_grad=True)
        params[number].grad = p.grad
    return params


def test_rows_find_their_parameters() -> None:
    """AGC looks at them: at the first of the two that share a gradient, and the last."""
    params = sharing()
    stats = GradClipper(params, rule=rules.AGC(clip_factor=1.0)).clip_()
    assert stats.names == ("0", "3")
    expected = [math.sqrt(2) * size for size in (1.0, 4.0)]
    assert stats.threshold.tolist() == pytest.approx(expected, rel=1e-6)
    grads = [p.grad for p in params if p.grad is not None]
    assert [g.unique().item() for g in grads] == pytest.approx([1.0, 1.0, 4.0], rel=1e-6)


def test_rows_of_a_rule_per_tensor_follow_their_names() -> None:
    params = parameters(floats(1.0), floats(2.0), floats(4.0))
    clipper = GradClipper(
        zip("abc", params, strict=True), rule=rules.AdaGC(warmup=1, max_norm=None)
    )
    clipper.clip_()
    params[0].grad, params[1].grad, params[2].grad = None, floats(20.0), floats(40.0)
    stats = clipper.clip_()
    assert stats.names == ("b", "c")
    assert stats.threshold.tolist() == pytest.approx([2.08, 4.16], rel=1e-6)
    params[0].grad = floats(10.0)
    assert clipper.clip_().threshold.tolist()[0] == pytest.approx(1.04, rel=1e-6)


@pytest.mark.parametrize("make", [AWKWARD["sparse"], AWKWARD["complex"], AWKWARD["expanded"]])
def test_a_gradient_that_a_rule_cannot_take_is_named(make: Callable[[], list[Tensor]]) -> None:
    (param,) = parameters(*(torch.where(v.isfinite(), v, 1) for v in values(make())))
    param.grad = make()[0]
    before = snapshot([param.grad])
    clipper = GradClipper([("layer.weight", param)], rule=rules.AGC())
    for call in (clipper.clip_, clipper.measure):
        with pytest.raises(TypeError, match=r"gradient 'layer\.weight' (is|has)"):
            call()
    assert unchanged([param.grad], before)
    assert clipper.counters()["steps"] == 0


def test_gradients_are_refused_before_anything_is_changed() -> None:
    params = parameters(floats(3.0, 4.0), torch.ones(3).unfold(0, 2, 1))
    clipper = GradClipper([("a", params[0]), ("b", params[1])])
    with pytest.raises(RuntimeError, match="gradient 'b' has elements that share memory"):
        clipper.clip_()
    assert params[0].grad is not None
    assert params[0].grad.tolist() == [3.0, 4.0]
    assert clipper.counters()["steps"] == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_mode_does_not_matter(enabled: bool) -> None:
    """Gradients of create_graph=True are clipped too, and nothing of it is recorded."""
    p = torch.ones(3, requires_grad=True)
    (p.grad,) = torch.autograd.grad((p**3).sum(), p, create_graph=True)
    assert p.grad is not None
    limit = torch.tensor(1.0, requires_grad=True)
    with torch.set_grad_enabled(enabled):
        stats = GradClipper([p], limit).clip_()
    assert p.grad.norm().item() == pytest.approx(1.0)
    tensors = (stats.table, stats.total_norm, stats.coef, stats.threshold, stats.clipped)
    assert not any(t.requires_grad for t in tensors)


def small() -> tuple[nn.Module, GradClipper]:
    model = nn.Linear(2, 2)
    clipper = GradClipper(model, rule=rules.AdaGC(warmup=2))
    return model, clipper


def advance(model: nn.Module, clipper: GradClipper, seed: int) -> GradStats:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    return clipper.clip_()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_their_own_way(again: Callable[[Any], Any]) -> None:
    model, clipper = small()
    for seed in range(4):
        advance(model, clipper, seed)
    twin_model, twin = again((model, clipper))
    ours, theirs = (advance(m, c, 9) for m, c in ((model, clipper), (twin_model, twin)))
    assert ours.as_dict() == theirs.as_dict()
    advance(twin_model, twin, 10)
    assert [int(c.counters()["steps"]) for c in (clipper, twin)] == [5, 6]
    last = [advance(m, c, 11).threshold.tolist() for m, c in ((model, clipper), (twin_model, twin))]
    assert last[0] != last[1]


BAD_STATES: dict[str, tuple[dict[str, Any], str]] = {
    "rule": ({"rule": "ZClip"}, "of the rule ZClip, and this clipper has AdaGC"),
    "version": ({"version": 2}, "version 2, where 1 is known"),
    "nothing": ({"state": ...}, "no state of a GradClipper: it has no 'state'"),
}


@pytest.mark.parametrize(("change", "message"), BAD_STATES.values(), ids=BAD_STATES.keys())
def test_a_wrong_state_is_refused(change: dict[str, Any], message: str) -> None:
    model, clipper = small()
    advance(model, clipper, 0)
    saved = {**clipper.state_dict(), **change}
    saved = {key: value for key, value in saved.items() if value is not ...}
    before = str(clipper.state_dict())
    with pytest.raises(ValueError, match=message):
        clipper.load_state_dict(saved)
    assert str(clipper.state_dict()) == before


def test_unknown_names_are_listed_up_to_ten() -> None:
    params = parameters(*(floats(1.0) for _ in range(12)))
    clipper = GradClipper([(f"old.{n}", p) for n, p in enumerate(params)], rule=rules.AdaGC())
    clipper.clip_()
    other = GradClipper([("new", params[0])], rule=rules.AdaGC())
    listed = (
        r"does not have: old\.0, .*, old\.9 and 2 more\. What it says of them is dropped; no name"
    )
    with pytest.warns(UserWarning, match=listed + ".* every tensor starts afresh"):
        other.load_state_dict(clipper.state_dict())
    assert other.counters()["steps"] == 1
