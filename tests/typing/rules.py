"""A rule of one's own is a `Rule` by what it has, without inheriting from it."""

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from fastclip import GradClipper
from fastclip.rules import Decision, Measured, Rule, State, ZClip, require_decision


class TwiceTheMean:
    """With a plain attribute for `per_tensor`."""

    per_tensor = False

    def init(self, n: int, device: torch.device) -> State:
        return {"mean": torch.zeros((), dtype=torch.float64, device=device)}

    def decide(self, measured: Measured, state: State) -> Decision:
        assert_type(measured.total, Tensor)
        assert_type(measured.norms, Tensor)
        assert_type(measured.step, int)
        assert_type(measured.inv_scale, Tensor | None)
        mean = torch.where(state["mean"] > 0, state["mean"], measured.total)
        coef = (2 * mean / (measured.total + 1e-6)).clamp(max=1)
        kept = torch.where(measured.total.isfinite(), 0.99 * mean + 0.01 * coef, state["mean"])
        return Decision(coef, 2 * mean, {"mean": kept})


class PerTensor:
    """With a property for it."""

    @property
    def per_tensor(self) -> bool:
        return True

    def init(self, n: int, device: torch.device) -> State:
        return {}

    def decide(self, measured: Measured, state: State) -> Decision:
        one = torch.ones_like(measured.norms)
        return Decision(one, one, state, units=None)


model = nn.Linear(4, 1)
rules: list[Rule] = [TwiceTheMean(), PerTensor(), ZClip(z=3.0, max_norm=None)]
for rule in rules:
    GradClipper(model, rule=rule)
    state = rule.init(2, torch.device("cpu"))
    assert_type(state, dict[str, Tensor])
    norms = torch.ones(2, dtype=torch.float64)
    measured = Measured(norms.sum(), norms, 0, [], [], None)
    decision = rule.decide(measured, state)
    assert_type(decision, Decision)
    assert_type(decision.coef, Tensor)
    assert_type(decision.state, dict[str, Tensor])
    require_decision(rule, decision, measured, state)
