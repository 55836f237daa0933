"""What goes wrong on one rank before an exchange, or differs there: an error on every rank."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import Parameter

import fastclip
from fastclip import GradClipper
from fastclip.rules import Decision, Measured, State, ZClip
from tests.distributed import layouts
from tests.distributed.layouts import Named
from tests.distributed.models import grad_of
from tests.distributed.ranks import Pool
from tests.distributed.troubles import integers, rows, sgd

GUILTY = 1
HEARD = (
    "FailedElsewhere: rank 1 could not measure its gradients, and raises the error itself. No "
    "gradient has been changed"
)
DIFFERENT = (
    "RuntimeError: all ranks need the same options (order of the norm, threshold, rule, policy, "
    "scaler), and clippers that have taken the same number of steps and loaded the same state, but "
    "rank 1 has others than rank 0. No gradient has been changed"
)


class Odd(Exception):
    """Nothing that fastclip knows of."""


def guilty() -> bool:
    return dist.get_rank() == GUILTY


def raised(call: Callable[[], Any]) -> str:
    """The error of a call, which may be the end of the process; "" without one."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def afterwards() -> float:
    """Whether nobody is out of step with the others."""
    return fastclip.clip_grad_norm_([rows(1, 5, 2)], 1.0).item()


def schedule(error: type[BaseException]) -> Callable[[int], float]:
    def limit(step: int) -> float:
        if guilty():
            raise error("of the schedule")
        return 1.0

    return limit


def strangers(named: Named) -> Any:
    own = named
    if guilty():
        own = [("strange", torch.zeros(2, requires_grad=True))]
    return GradClipper(named).step(sgd(own))


def unscaled(named: Named) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if not guilty():
        scaler.scale(torch.ones(()))
    return GradClipper(named).step(sgd(named), scaler)


def not_linear(named: Named) -> Any:
    if guilty():
        first = named[0][1]
        grad = grad_of(first)
        assert isinstance(grad, DTensor)
        whole = torch.ones(grad.shape)
        first.grad = DTensor.from_local(whole, grad.device_mesh, [Partial("max")])
    return GradClipper(named).clip_()


def unsupported_elsewhere(named: Named) -> Any:
    """A gradient that is the optimizer's and not the clipper's."""
    other = Parameter(torch.zeros(3))
    other.grad = torch.ones(3)
    optimizer = torch.optim.SGD([*(each for _, each in named), other], lr=0.1)
    if guilty():
        optimizer.param_groups[0]["params"][-1] = integers()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    return GradClipper(named).clip_(optimizer, scaler)


def twice(named: Named) -> Any:
    optimizer = sgd(named)
    return GradClipper(named).step([optimizer] * (1 + guilty()))


EARLY: dict[str, tuple[Callable[[Named], Any], str]] = {
    "schedule": (
        lambda named: GradClipper(named, schedule(Odd)).clip_(),
        "Odd: of the schedule",
    ),
    "measure": (
        lambda named: GradClipper(named, schedule(Odd)).measure(),
        "Odd: of the schedule",
    ),
    "interrupt": (
        lambda named: GradClipper(named, schedule(KeyboardInterrupt)).clip_(),
        "KeyboardInterrupt: of the schedule",
    ),
    "scaler": (unscaled, "RuntimeError: the scaler has not scaled a loss yet"),
    "twice": (twice, "ValueError: an optimizer comes twice"),
    "strangers": (strangers, "UserWarning: SGD has none of the clipper's parameters"),
    "not-linear": (not_linear, "TypeError: gradient 'a' is a DTensor with placements (Partial(max"),
    "max_norm": (
        lambda named: fastclip.clip_grad_norm_(named, -1.0 if guilty() else 1.0),
        "ValueError: max_norm must be a number of at least 0",
    ),
    "norm_type": (
        lambda named: fastclip.grad_stats(named, math.nan if guilty() else 2.0),
        "ValueError: norm_type must be a number",
    ),
    "tensors": (
        lambda named: fastclip.get_total_norm(
            [(name, grad_of(each)) for name, each in named], math.nan if guilty() else 2.0
        ),
        "ValueError: norm_type must be a number",
    ),
}


def early(kind: str) -> tuple[str, bool, float]:
    named: Named = [("a", rows(1, 9, 2)), ("b", rows(3, 8))]
    last = layouts.local(grad_of(named[1][1])).clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        error = raised(lambda: EARLY[kind][0](named))
    return error, torch.equal(last, layouts.local(grad_of(named[1][1]))), afterwards()


@pytest.mark.parametrize("kind", EARLY)
def test_what_is_wrong_before_the_exchange_is_an_error_on_all(ranks: Pool, kind: str) -> None:
    answers = ranks.run(3, early, kind)
    for rank, (error, unchanged, total) in enumerate(answers):
        assert error.startswith(EARLY[kind][1] if rank == GUILTY else HEARD), (rank, error)
        assert unchanged
        assert total == answers[0][2]


def elsewhere() -> tuple[str, bool, float]:
    named: Named = [("a", rows(1, 9, 2))]
    skipped: list[bool] = []
    error = raised(lambda: skipped.append(bool(unsupported_elsewhere(named).skipped)))
    return error, skipped == [True], afterwards()


def test_an_unsupported_gradient_of_the_optimizer_makes_the_others_skip(ranks: Pool) -> None:
    for rank, (error, skipped, _) in enumerate(ranks.run(2, elsewhere)):
        if rank == GUILTY:
            assert error.startswith("TypeError: the gradient at position 0 has dtype torch.int64")
        else:
            assert (error, skipped) == ("", True)


def more_on_one() -> tuple[float, bool]:
    """One rank's optimizer has more parameters than the clipper."""
    named: Named = [("a", rows(1, 9, 2))]
    parameters = [each for _, each in named]
    if guilty():
        other = Parameter(torch.zeros(3))
        other.grad = torch.full((3,), math.inf)
        parameters.append(other)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    stats = GradClipper(named).clip_(torch.optim.SGD(parameters, lr=0.1), scaler)
    return stats.total_norm.item(), bool(stats.skipped)


def test_what_an_optimizer_has_beside_on_one_rank_counts_on_all(ranks: Pool) -> None:
    answers = ranks.run(2, more_on_one)
    expected = layouts.normal(2, 9, 2).double().norm().item() / 4
    assert [skipped for _, skipped in answers] == [True, True]
    assert [total for total, _ in answers] == pytest.approx([expected] * 2, rel=1e-6)


def staged(**options: Any) -> tuple[Named, GradClipper]:
    """A pipeline stage, sharded over two ranks."""
    over = layouts.mesh(2, 2, names=("pp", "dp"))
    stage = over["pp"].get_local_rank()
    named = [(f"{stage}.a", layouts.placed(10 * stage, over["dp"], [Shard(0)], 5, 3))]
    return named, GradClipper(named, process_group=over["pp"].get_group(), **options)


def early_in_a_stage(kind: str) -> tuple[str, str]:
    errors = {"schedule": Odd, "interrupt": KeyboardInterrupt}
    limit: Any = schedule(errors[kind]) if kind in errors else 1.0
    _, clipper = staged(max_norm=limit)
    _, sound = staged()
    if kind == "scaler" and guilty():
        optimizer = sgd([("a", torch.zeros(1, requires_grad=True))])
        return raised(lambda: clipper.step(optimizer, torch.amp.GradScaler("cpu"))), raised(
            sound.clip_
        )
    return raised(clipper.clip_), raised(sound.clip_)


@pytest.mark.parametrize("kind", ["schedule", "interrupt", "scaler"])
def test_meshes_and_groups_hear_of_the_rank_that_failed(ranks: Pool, kind: str) -> None:
    for rank, (error, after) in enumerate(ranks.run(4, early_in_a_stage, kind)):
        assert (error == HEARD) == (rank != GUILTY), error
        assert error != ""
        assert after == ""


class Own:
    """Clips to 1, and raises on one rank where a norm is not finite."""

    per_tensor = False

    def init(self, n: int, device: torch.device) -> State:
        return {}

    def decide(self, measured: Measured, state: State) -> Decision:
        if guilty() and not bool(measured.total.isfinite()):
            raise Odd("of the rule")
        one = torch.ones_like(measured.total)
        return Decision(one / measured.total.clamp(min=1), one, {})


def raises_when_zeroing(kind: str) -> tuple[str, str]:
    plain = torch.zeros(4, requires_grad=True)
    plain.grad = torch.ones(4)
    if kind == "mesh":
        named: Named = [("a", rows(1, 8, 2))]
        clipper = GradClipper(named, rule=Own(), nonfinite="zero")
    elif kind == "group":
        named = [(f"own.{dist.get_rank()}", plain)]
        group = dist.group.WORLD
        clipper = GradClipper(named, rule=Own(), nonfinite="zero", process_group=group)
    else:
        named, clipper = staged(rule=Own(), nonfinite="zero")
    layouts.local(grad_of(named[0][1])).view(-1)[0] = math.nan
    return raised(clipper.clip_), f"{afterwards()}"


@pytest.mark.parametrize("kind", ["mesh", "group", "mesh-and-group"])
def test_a_rule_that_raises_before_gradients_are_zeroed_is_an_error_on_all(
    ranks: Pool, kind: str
) -> None:
    answers = ranks.run(4, raises_when_zeroing, kind)
    for rank, (error, after) in enumerate(answers):
        assert error == ("Odd: of the rule" if rank == GUILTY else HEARD)
        assert after == answers[0][1]


def options(kind: str) -> dict[str, Any]:
    """Those of a clipper, others on one rank."""
    each: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "policy": ({"nonfinite": "skip"}, {"nonfinite": "zero"}),
        "order": ({"norm_type": 2.0}, {"norm_type": 1.0}),
        "max_norm": ({"max_norm": 1.0}, {"max_norm": 0.5}),
        "rule": ({"rule": ZClip(alpha=0.9)}, {"rule": ZClip(alpha=0.8)}),
        "schedule": ({"max_norm": lambda step: 1.0}, {"max_norm": lambda step: 0.5}),
        "tensor": ({"max_norm": torch.tensor(1.0)}, {"max_norm": torch.tensor(0.5)}),
    }
    return each[kind][guilty()]


def differing(kind: str, grouped: bool) -> tuple[str, bool]:
    chosen = options(kind)
    if grouped:
        named, clipper = staged(**chosen)
    else:
        named = [("a", rows(1, 9, 2))]
        clipper = GradClipper(named, **chosen)
    before = layouts.local(grad_of(named[0][1])).clone()
    error = raised(clipper.clip_)
    return error, torch.equal(before, layouts.local(grad_of(named[0][1])))


@pytest.mark.parametrize("kind", ["policy", "order", "max_norm", "rule", "schedule", "tensor"])
def test_options_that_differ_are_an_error_on_all(ranks: Pool, kind: str) -> None:
    for error, unchanged in ranks.run(3, differing, kind, False):
        assert error == DIFFERENT
        assert unchanged


@pytest.mark.parametrize("kind", ["schedule", "tensor"])
def test_thresholds_that_differ_between_stages_are_an_error_on_all(ranks: Pool, kind: str) -> None:
    for rank, (error, unchanged) in enumerate(ranks.run(4, differing, kind, True)):
        # the mesh of ranks 0 and 1 is the first to see it, and tells their groups
        assert error == DIFFERENT if rank < 2 else error.startswith("FailedElsewhere: rank "), error
        assert unchanged


def calls_differ(kind: str) -> str:
    named: Named = [("a", rows(1, 9, 2))]
    limit, p, strict = 1.0, 2.0, False
    if guilty():
        limit, p, strict = {
            "max_norm": (0.5, p, strict),
            "order": (limit, 1.0, strict),
            "strict": (limit, p, True),
        }[kind]
    return raised(lambda: fastclip.clip_grad_norm_(named, limit, p, strict))


@pytest.mark.parametrize("kind", ["max_norm", "order", "strict"])
def test_arguments_that_differ_are_an_error_on_all(ranks: Pool, kind: str) -> None:
    assert ranks.run(2, calls_differ, kind) == [DIFFERENT] * 2


def resumed(kind: str, grouped: bool) -> tuple[str, str]:
    """Load on one rank what is another number of steps, or another state; then on all."""

    def built() -> GradClipper:
        if grouped:
            plain = torch.zeros(4, requires_grad=True)
            plain.grad = torch.ones(4)
            group = dist.group.WORLD
            name = f"own.{dist.get_rank()}"
            return GradClipper([(name, plain)], rule=ZClip(warmup=1), process_group=group)
        return GradClipper([("a", rows(1, 9, 2))], rule=ZClip(warmup=1))

    first, second = built(), built()
    for _ in range(3):
        first.clip_()
        second.clip_()
    saved = copy.deepcopy(first.state_dict())
    if kind == "steps":
        saved["counters"]["steps"] += 1
    else:
        saved["state"]["mean"] = saved["state"]["mean"] + 1
    if guilty():
        second.load_state_dict(saved)
    alone = raised(second.clip_)
    second.load_state_dict(saved)
    return alone, raised(second.clip_) + raised(second.clip_)


@pytest.mark.parametrize("grouped", [False, True], ids=["mesh", "group"])
@pytest.mark.parametrize("kind", ["steps", "state"])
def test_a_state_that_one_rank_has_loaded_is_an_error_on_all(
    ranks: Pool, kind: str, grouped: bool
) -> None:
    for alone, together in ranks.run(2, resumed, kind, grouped):
        assert together == ""
        assert alone.startswith("RuntimeError: ")
        assert alone == DIFFERENT
