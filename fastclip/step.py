"""One step of a clipper, up to the optimizer's: measure, decide, rescale."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastclip import folding, passes, policy
from fastclip import table as tables
from fastclip.checks import norm_order
from fastclip.gradients import Gradients, Listed
from fastclip.policy import Policy
from fastclip.rules import (
    AutoClip,
    Decision,
    LogZ,
    MaxNorm,
    Measured,
    Rule,
    State,
    UnsuitableGradient,
    ZClip,
    require_decision,
)
from fastclip.scaling import WithoutScaler
from fastclip.stats import GradStats

INSTEAD = 'nonfinite="skip" skips such steps'
ELSEWHERE = (
    "the gradients are not finite: one of the optimizer that is not the clipper's, or one that "
    "scaler.unscale_ has looked at"
)

_CAPPED = (ZClip, LogZ, AutoClip)  # one threshold, of `max_norm` where it does not bind

if TYPE_CHECKING:
    from fastclip.distributed.groups import Groups
    from fastclip.distributed.shards import Spread

Measure = Callable[[Listed, Tensor | None, bool], tuple[Gradients, Tensor]]
Rows = Callable[[tuple[str, ...], torch.device], State]  # the rule's state of these gradients


class Settings(NamedTuple):
    """What stays the same from step to step."""

    rule: Rule
    p: float
    policy: Policy


def settings_of(max_norm: Any, rule: Any, norm_type: float | str, nonfinite: Policy) -> Settings:
    """Those that a clipper is asked for. Raises `TypeError` or `ValueError`."""
    if nonfinite not in policy.POLICIES:
        known = ", ".join(map(repr, policy.POLICIES))
        raise ValueError(f"nonfinite must be one of {known}, got {nonfinite!r:.80}")
    return Settings(_rule(max_norm, rule), norm_order(norm_type), nonfinite)


class Step(NamedTuple):
    """What a step starts from."""

    settings: Settings
    number: int  # of steps before it
    parameters: Sequence[Tensor]
    listed: Listed  # their gradients
    loss_scale: WithoutScaler
    measure: Measure
    rows: Rows
    groups: "Groups | None" = None  # with which the gradients make one whole
    loaded: int = 0  # a checksum of the rule's state, if it was loaded since the step before

    @property
    def held(self) -> Sequence[Tensor]:
        """What this process has of the parameters."""
        spread = self.listed.spread
        return self.parameters if spread is None else spread.held(self.parameters)

    @property
    def at_once(self) -> bool:
        """Whether the fused form does it all: one threshold, and nothing else to ask."""
        return (
            type(self.settings.rule) is MaxNorm  # not a subclass, which may decide otherwise
            and len(self.listed.grads) > 0
            and self.settings.policy in ("skip", "propagate")
            and self.loss_scale.alone
            # what processes agree on must not depend on who has other gradients too
            and not (self.loss_scale.enabled and self.listed.spread is not None)
        )

    @property
    def _leaves(self) -> bool:
        """Whether gradients that are not finite are left as they are."""
        return self.settings.policy in ("skip", "error")

    def clip_at_once_(self) -> "Decided":
        """Measure and rescale in the fused form."""
        rule, p, _ = self.settings
        assert type(rule) is MaxNorm
        limit = rule.limit(self.number)
        self._agree_on(limit)
        found, table, total, coef = passes.active(self.listed).clip_measured_(
            self.listed, p, limit, self.loss_scale.inv_scale, self._leaves
        )
        decision = Decision(coef, tables.limit(limit, coef.device), {})
        bad = tables.found_nonfinite(table)
        if self.settings.policy == "skip":
            bad = bad | total.isnan()
        return Decided(
            self.settings, self.loss_scale, found, table, total.dtype, total, decision, bad
        )

    def decide(self, dry: bool = False) -> "Decided":
        """Measure and decide. What the policy writes is written, unless `dry`."""
        rule, p, chosen = self.settings
        limit: float | Tensor | None = None
        if type(rule) is MaxNorm:  # asked first: a schedule may give what is no threshold
            limit = rule.limit(self.number)
        self._agree_on(limit)
        found, table, elsewhere = self._read()
        bad = tables.found_nonfinite(table)
        if elsewhere is not None:
            bad = bad | elsewhere
        if chosen == "error" and not dry:
            policy.refuse(table, self.listed, found, p, INSTEAD)
            if elsewhere is not None and elsewhere.item():
                raise RuntimeError(f"{ELSEWHERE}. No gradient has been changed; {INSTEAD}")
        if chosen == "zero":
            found, table = self._zeroed(rule, found, table, bad, dry)
            bad = _torn(found, elsewhere, bad)
        total = tables.total_norm(table, p)
        if chosen == "skip":
            bad = bad | total.isnan()  # of finite elements too: from a loss scale of 0
        if found.names:
            state = self.rows(found.names, table.device)
            if limit is None:
                decision = self._ask(rule, found, table, total, state)
            else:  # what MaxNorm decides, without what other rules want to know
                threshold = tables.limit(limit, total.device)
                decision = Decision(tables.coefficient(total, limit), threshold, state)
            if found.contributions is not None:
                decision = decision.where_present(found.contributions.present, state)
                if chosen == "zero":
                    decision = decision.unless(bad, state)
            if self._leaves:
                if not isinstance(rule, MaxNorm):
                    bad = bad | self._unusable(decision, dry)
                decision = decision.unless(bad, state)
        else:
            total, decision = torch.zeros_like(total), _nothing(rule, limit, table)
        own = tables.result_dtype(found.tensors)
        dtype = own if found.united is None else found.united.dtype
        return Decided(self.settings, self.loss_scale, found, table, dtype, total, decision, bad)

    def _read(self) -> tuple[Gradients, Tensor, Tensor | None]:
        """The gradients and their table; and whether an element elsewhere is not finite."""
        rule, _, chosen = self.settings
        # by unit they are of the gradients as they were before any was zeroed
        by_unit = chosen != "zero" and getattr(rule, "by_unit", False)
        found, table = self.measure(self.listed, self.loss_scale.inv_scale, by_unit)
        if self.groups is not None:
            elsewhere = self.loss_scale.found_elsewhere(self.groups.device)
            if chosen == "zero" and found.contributions is not None:  # of a mesh, for the others
                elsewhere = found.contributions.torn()
            return self.groups.unite(found, table, elsewhere)
        if found.spread is None or not self.loss_scale.enabled:
            return found, table, self.loss_scale.found_elsewhere(table.device)
        flag = torch.ones((), dtype=torch.bool, device=table.device)
        try:
            elsewhere = self.loss_scale.found_elsewhere(table.device)
        except BaseException:
            found.spread.agree(flag)  # the others wait, and are not to step
            raise
        return found, table, found.spread.agree(~flag if elsewhere is None else elsewhere)

    def _agree_on(self, limit: float | Tensor | None) -> None:
        """Have the exchanges compare what has to be the same on all ranks."""
        if self.groups is None and self.listed.spread is None:
            return
        from fastclip.distributed import combine
        from fastclip.distributed.meeting import described

        options = (described(self.settings), limit, self.number, self.loaded)
        scaled = self.loss_scale.enabled, self.loss_scale.inv_scale is None
        self.listed.agree_on(*options, *scaled)
        if self.groups is not None:
            self.groups.agreed = combine.agreed((*options, *scaled))

    def _zeroed(
        self, rule: Rule, found: Gradients, table: Tensor, bad: Tensor, dry: bool
    ) -> tuple[Gradients, Tensor]:
        p = self.settings.p
        if dry:
            return policy.zeroed(found, table, p)
        if found.names and not isinstance(rule, MaxNorm) and tables.peek(bad) != 0:
            # for what it raises, while nothing is written; the answer that counts comes after
            # The gradients are measured once more: a rank that raises here is waited for there.
            if self.listed.spread is not None:
                self.listed.spread.begun.clear()
            if self.groups is not None:
                self.groups.begin()
            state = self.rows(found.names, table.device)
            self._ask(rule, found, table, tables.total_norm(table, p), state)
        return found, policy.zero_(found, table, p)

    def _unusable(self, decision: Decision, dry: bool) -> Tensor:
        """Whether a coefficient is not finite, which then the rule has made so, 0-d bool."""
        found = decision.nonfinite()
        if self.settings.policy == "error" and not dry and found.item():
            raise RuntimeError(
                f"{type(self.settings.rule).__name__} gave a coefficient that is not finite for "
                f"gradients that are. No gradient has been changed; {INSTEAD}"
            )
        return found

    def _ask(
        self, rule: Rule, found: Gradients, table: Tensor, total: Tensor, state: State
    ) -> Decision:
        parameters: Sequence[Tensor] = ()
        if not found.united:
            parameters = _of_rows(self.held, self.listed, found)
        measured = Measured(
            total,
            tables.norms(table, self.settings.p),
            self.number,
            parameters,
            () if found.united else found.tensors,
            self.loss_scale.inv_scale,
            found.unit_norms,
        )
        # by unit, processes tell each other what the table does not
        by_unit = rule.per_tensor and getattr(rule, "by_unit", False)
        spread = found.spread if by_unit and not found.united else None
        asked = False
        try:
            if spread is not None:
                own = _of_rows(self.parameters, self.listed, found)
                measured = spread.with_units(measured, own)
            asked = True
            decision = rule.decide(measured, state)
            require_decision(rule, decision, measured, state)
        except BaseException as error:
            if spread is not None and (asked or isinstance(error, UnsuitableGradient)):
                # the others wait, and are not to go on with this step
                spread.least(table.new_full((len(table), 2), math.nan))
            if not isinstance(error, UnsuitableGradient):
                raise
            name = found.names[error.row]
            raise TypeError(f"{self.listed.called(name)} {error.reason}") from None
        if spread is not None:
            return self._of_all(decision, spread)
        if decision.units is not None:
            _refuse_units(rule, found)
        return decision

    def _of_all(self, decision: Decision, spread: "Spread") -> Decision:
        """What a rule that goes by unit has decided, with the smallest of all processes."""
        coef = decision.coef
        if self._leaves:  # an infinity too must be known to all
            coef = coef.masked_fill(decision.nonfinite(), math.nan)
        least = spread.least(torch.stack([coef, decision.threshold], 1))
        return decision._replace(coef=least[:, 0], threshold=least[:, 1])


class Decided(NamedTuple):
    """What a step has found, and decided."""

    settings: Settings
    loss_scale: WithoutScaler
    found: Gradients
    table: Tensor
    dtype: torch.dtype  # of the norms that are returned
    total: Tensor
    decision: Decision
    # 0-d bool: an element is not finite, of these gradients or of the optimizers'; with
    # nonfinite="zero", copies of a gradient have become different
    bad: Tensor

    def foldable(self, listed: Listed) -> bool:
        """Whether an optimizer could apply the coefficient, a float32 number to it."""
        return self.dtype == torch.float32 and folding.suits(self.found, listed)

    def leave_(self, listed: Listed) -> Tensor:
        """What the optimizer is to divide the gradients by; they are written only if one float32
        number is not enough."""
        coef = self.decision.coef
        inv_scale = self.loss_scale.inv_scale
        factor = coef if inv_scale is None else coef * inv_scale.to(coef.device)
        rest, grad_scale = folding.split(factor)
        if tables.peek(rest) != 1:
            passes.active(listed).rescale_(listed, rest)
        return grad_scale

    def write_(self) -> None:
        """Rescale in place."""
        if self.decision.units is not None:
            factors = list(map(self._factor, self.decision.units))
            passes.active(self.found).scale_units_(self.found.tensors, factors)
        else:
            passes.active(self.found).scale_(self.found, self._factor(self.decision.coef))
        left = self.bad if self.settings.policy != "propagate" else torch.zeros_like(self.bad)
        self.loss_scale.unscale_others_(left)

    def _factor(self, coef: Tensor) -> Tensor:
        inv_scale = self.loss_scale.inv_scale
        if inv_scale is None:
            return coef
        factor = coef * inv_scale.to(coef.device)
        if self.settings.policy == "propagate":
            return factor
        return factor.masked_fill(self.bad.to(coef.device), 1.0)

    def stats(self) -> GradStats:
        never = torch.zeros_like(self.bad)
        chosen, scaled = self.settings.policy, self.loss_scale.enabled
        coef = self.decision.coef
        if chosen == "propagate" and scaled:  # the scaler skips a step that has been written
            coef = coef.masked_fill(self.bad, 1.0)
        return GradStats.decided(
            self.found,
            self.table,
            self.settings.p,
            self.dtype,
            self.total,
            coef,
            self.decision.threshold,
            skipped=self.bad if scaled or chosen != "propagate" else never,
            found_inf=self.bad,
            inv_scale=self.loss_scale.inverse,
        )


def _rule(max_norm: Any, rule: Any) -> Rule:
    if hasattr(max_norm, "decide"):
        kind = max_norm.__name__ if isinstance(max_norm, type) else type(max_norm).__name__
        raise TypeError(f"max_norm must be a threshold, got the rule {kind}: pass it as rule=")
    if rule is None:
        return MaxNorm(1.0 if max_norm is None else max_norm)
    if max_norm is not None:
        raise TypeError("max_norm and rule are two ways to say when to clip: pass one of them")
    if isinstance(rule, type):
        raise TypeError(f"rule must be a rule, got the class {rule.__name__}: call it")
    if not all(hasattr(rule, name) for name in ("per_tensor", "init", "decide")):
        raise TypeError(
            "rule must have per_tensor, init and decide, as those of fastclip.rules have; got "
            f"{type(rule).__name__}"
        )
    return rule


def _refuse_units(rule: Rule, found: Gradients) -> None:
    """Raise `ValueError` if `rule`, which has decided by unit, may not have seen whole units."""
    if found.united is not None:
        raise ValueError(
            f"{type(rule).__name__} gave units, of which it has seen none: with a "
            "process_group, rules get norms and no tensors"
        )
    if found.spread is not None:
        raise ValueError(
            f"{type(rule).__name__} gave units of DTensors, of which several processes may have "
            "parts: a rule that sets by_unit = True is told the norms of whole_units"
        )


def _torn(found: Gradients, elsewhere: Tensor | None, bad: Tensor) -> Tensor:
    """Whether elements were not finite in some copies of a gradient only, 0-d bool: those who hold
    the others do not know which to zero."""
    torn = torch.zeros_like(bad) if elsewhere is None else elsewhere
    return torn if found.contributions is None else torn | found.contributions.torn()


def _nothing(rule: Rule, limit: float | Tensor | None, table: Tensor) -> Decision:
    """About no gradients, which a rule is not asked about; `limit` is that of `MaxNorm`."""
    one = torch.ones((0,) if rule.per_tensor else (), dtype=torch.float64, device=table.device)
    cap = rule.max_norm if isinstance(rule, _CAPPED) else limit
    return Decision(one, one * math.inf if cap is None else tables.limit(cap, one.device), {})


def _of_rows(parameters: Sequence[Tensor], listed: Listed, found: Gradients) -> Sequence[Tensor]:
    """The parameters of the rows."""
    if len(found.names) == len(parameters):
        return parameters
    pairs = zip(parameters, listed.tensors, strict=True)
    own = [parameter for parameter, gradient in pairs if gradient is not None]
    if len(found.names) < len(own):  # some share a gradient, of which there is one row
        of_label = dict(zip(reversed(listed.labels()), reversed(own), strict=True))
        own = [of_label[name] for name in found.names]
    return own
