"""Clipping for an optimizer whose step is taken by somebody else, after the clip."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from fastclip import folding, scaling
from fastclip.clipper import GradClipper
from fastclip.integrations._entries import Entries, Layers
from fastclip.policy import Policy
from fastclip.rules import Rule
from fastclip.stats import GradStats


def options_of(
    max_norm: float | Tensor | Callable[[int], float] | None,
    rule: Rule | None,
    norm_type: float | str,
    nonfinite: Policy,
) -> dict[str, Any]:
    """The options of a `GradClipper`. Raises now what it would raise when training starts."""
    options: dict[str, Any] = {"max_norm": max_norm, "rule": rule}
    options |= {"norm_type": norm_type, "nonfinite": nonfinite}
    GradClipper([], **options)
    return options


def lr_of(optimizer: Optimizer, scale: float) -> float | Tensor | None:
    """The learning rate of the first parameter group, times `scale`; None where it has none, or
    makes its own, as Adafactor does."""
    lr: float | Tensor | None = optimizer.param_groups[0].get("lr")
    return None if lr is None else lr * scale


class BeforeStep:
    """An optimizer whose step a framework takes, its clipper, and what was found lately."""

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, options: Mapping[str, Any], entries: Entries
    ) -> None:
        self.optimizer = optimizer
        self.clipper = GradClipper(_Owned(module, optimizer), **options)
        self.entries = entries
        self.found: dict[int, GradStats] = {}  # by step
        self.lr: float | Tensor | None = None  # of the newest step
        self.logged = 0  # steps of the trainer's log at the newest row
        self._policy = options["nonfinite"]
        self._skips = False  # whether the step is skipped, as far as the host knows
        self._handed = ExitStack()

    def skip_if(self, stats: GradStats, scaler: GradScaler | None) -> None:
        """Have the step that comes not taken, if the clipper says so: by the flag for those who
        heed it, else without gradients."""
        self._skips = False
        if scaler is None:
            torn = self._policy == "zero" and stats.contributions is not None
            if self._policy != "skip" and not torn:
                return
        elif not scaling.claims_flags(self.optimizer):
            return  # the scaler skips
        if folding.honours(self.optimizer) and folding.ready_to_skip(self.optimizer):
            if scaler is None:
                self._hand_flag(stats.found_inf)
        elif stats.skipped:
            self._skips = True
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _hand_flag(self, found_inf: Tensor) -> None:
        self.withdraw()
        self._handed.enter_context(folding.handed(self.optimizer, None, found_inf, restore=True))
        hook = self.optimizer.register_step_post_hook(lambda *_: self.withdraw())
        self._handed.callback(hook.remove)

    def withdraw(self) -> None:
        """Take the flag back; after a step that raised, its hook has not done so."""
        self._handed.close()

    def note(self, step: int, stats: GradStats, cut: float) -> None:
        """Keep what there is to tell of a step, whose learning rate will be multiplied by `cut`."""
        self.lr = lr_of(self.optimizer, cut)
        if self._skips or (stats.skipped.is_cpu and stats.skipped):
            self.entries.skipped.tell(step, stats)
        if stats.names:
            self.found[step] = stats

    def row(self) -> dict[str, float]:
        """What is logged of the newest step."""
        step = max(self.found)
        return self.entries.made(self.clipper, self.found[step], step)


def before_steps(
    module: nn.Module,
    optimizers: Iterable[Optimizer],
    options: Mapping[str, Any],
    layers: Layers,
    earlier: Iterable[BeforeStep],
) -> list[BeforeStep]:
    """One for each optimizer; those `earlier` hand on what they know."""
    made = [BeforeStep(module, each, options, Entries(layers)) for each in optimizers]
    for held, old in zip(made, earlier, strict=False):
        held.clipper.load_state_dict(old.clipper.state_dict())
        held.entries = old.entries
    return made


class _Owned(nn.Module):
    """The parameters that an optimizer has at the moment, by their names in a module."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        super().__init__()
        self._of = (module, optimizer)  # in a tuple, where nn.Module sees no child
        self._ids: list[int] = []
        self._pairs: list[tuple[str, nn.Parameter]] = []

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        module, optimizer = self._of
        owned = [each for group in optimizer.param_groups for each in group["params"]]
        ids = list(map(id, owned))
        if ids != self._ids:
            names = {id(each): name for name, each in module.named_parameters()}
            self._ids = ids
            self._pairs = [
                (names.get(id(each), f"parameter {place} of {type(optimizer).__name__}"), each)
                for place, each in enumerate(owned)
            ]
        return iter(self._pairs)
