"""The benchmark's rows for GradClipper: each side does what its name says, or ends the run."""

from functools import partial

import pytest
import torch

import fastclip
from benchmarks import rules
from benchmarks.rows import ROWS
from fastclip.benchmarking import clipper
from fastclip.benchmarking.checks import WrongResult
from fastclip.benchmarking.contest import OURS, QUICK
from fastclip.benchmarking.measure import Side, interleave
from fastclip.benchmarking.workloads import clip
from tests.backward import n_hooks


def sides(name: str) -> dict[str, Side]:
    rows = {row.name: row for row in ROWS}
    return {side.name: side for side in rows[name].build(QUICK).sides}


@pytest.mark.parametrize("name", ["amp-float32-clipped", "amp-float16-clipped"])
def test_both_chains_of_mixed_precision_leave_the_same_gradients(name: str) -> None:
    left, norms = [], []
    for side in sides(name).values():
        assert side.before is not None
        side.before()
        norms.append(float(side.run()))
        (grad, *_) = side.run.__self__.problem.gradients  # type: ignore[attr-defined]
        left.append(grad.clone())
    assert norms[0] == pytest.approx(norms[1], rel=0.05)  # torch's float16 norm is that far off
    torch.testing.assert_close(left[0], left[1], rtol=0.05, atol=0)


def test_a_chain_that_does_not_unscale_ends_the_run() -> None:
    side = sides("amp-float32-clipped")[OURS]
    task = side.run.__self__  # type: ignore[attr-defined]
    norm = torch.tensor(task.problem.norm / clipper.LOSS_SCALE)
    with pytest.raises(WrongResult, match=r"left 1 to 1 of the elements .* where 0\.000488"):
        interleave([Side(OURS, lambda: norm, side.before, side.check)], rounds=1)


NO_STEP = "steps, where one step is right"
NO_NORM = "returned a norm of 0, where"


@pytest.mark.parametrize(
    ("name", "result", "words"),
    [
        ("step-adamw", 0.0, NO_STEP),
        ("step-adamw-clipped", 0.0, NO_STEP),
        ("step-adamw-read", 0.0, NO_STEP),
        ("step-amp", 0.0, NO_STEP),
        ("amp-float16-clipped", 0.0, NO_NORM),
        ("rule-zclip", None, "returned None, where statistics are right"),
        ("rule-zclip-fixed", None, "returned None, where statistics are right"),
        ("read-rate", 0.0, NO_NORM),
        ("gpt2-small-float32", 0.0, NO_NORM),
        ("statistics-2000x1024", {"norms": None}, "returned no norms of 24 tensors"),
        ("statistics-2000x1024", {}, "returned no norms of 24 tensors"),
    ],
)
def test_a_call_that_does_nothing_ends_the_run(name: str, result: object, words: str) -> None:
    side = sides(name)[OURS]
    returned = torch.tensor(result) if isinstance(result, float) else result
    with pytest.raises(WrongResult, match=words):
        interleave([Side(OURS, lambda: returned, side.before, side.check)], rounds=1)


@pytest.mark.parametrize("name", ["torch", OURS])
def test_an_optimizer_that_does_not_step_ends_the_run(name: str) -> None:
    side = sides("step-adamw-clipped")[name]
    problem = side.run.__self__.problem  # type: ignore[attr-defined]

    def clip_only() -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(problem.parameters, problem.max_norm)

    with pytest.raises(WrongResult, match=NO_STEP):
        interleave([Side(name, clip_only, side.before, side.check)], rounds=1)


@pytest.mark.parametrize("clips", [False, True])
def test_both_steps_make_the_same_parameters(clips: bool) -> None:
    after = []
    for name in ("torch", OURS):
        side = sides("step-adamw-clipped" if clips else "step-adamw")[name]
        problem = side.run.__self__.problem  # type: ignore[attr-defined]
        for _ in range(3):
            if side.before is not None:
                side.before()
            side.run()
        after.append([parameter.detach().clone() for parameter in problem.parameters])
    for a, b in zip(*after, strict=True):
        assert not torch.equal(a, torch.ones_like(a))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", rules.RULES)
def test_no_side_of_a_rule_clips_until_gradients_grow(rule: str) -> None:
    problem = clip([(30, 7), (65,)])
    for parameter in problem.parameters:
        parameter.data.fill_(1.0)
    plain = rules.PLAIN[rule](problem.parameters)
    ours = fastclip.GradClipper(problem.parameters, rule=rules.RULES[rule]())
    for _ in range(101):  # through every warm-up
        plain()
        ours.clip_()
        assert problem.left() == (1.0, 1.0)
    before = [grad.mul_(100).clone() for grad in problem.gradients]
    stats = ours.measure()
    assert bool((stats.coef < 0.9).any())
    plain()
    assert any(not torch.equal(a, b) for a, b in zip(before, problem.gradients, strict=True))


def test_a_rule_that_clips_ends_the_run() -> None:
    problem = clip([(300, 7)])
    check = partial(rules.require_untouched, "side", problem)
    check(fastclip.grad_stats(problem.parameters))
    with pytest.raises(WrongResult, match="side clipped: coefficients down to"):
        check(fastclip.GradClipper(problem.parameters, 1e-3).measure())
    problem.gradients[0].mul_(0.5)
    with pytest.raises(WrongResult, match="side changed the gradients"):
        check(None)


@pytest.mark.parametrize("name", ["overlap-gpt", "overlap-mlp"])
def test_hooks_are_there_for_one_side_alone(name: str) -> None:
    both = sides(name)
    model = both[OURS].run.func.__self__.model  # type: ignore[attr-defined]
    for side, hooks in (("after", False), (OURS, True), ("after", False)):
        before = both[side].before
        assert before is not None
        before()
        assert any(n_hooks(model)) is hooks


def test_hooks_that_serve_nothing_end_the_run() -> None:
    both = sides("overlap-mlp")
    without_hooks = Side(OURS, both["after"].run, both["after"].before, both[OURS].check)
    with pytest.raises(RuntimeError, match=r"hooks served \(0, 0\)"):
        interleave([without_hooks], rounds=1)
