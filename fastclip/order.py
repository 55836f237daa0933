"""A guard that notices clipping in the wrong place of a training loop, and says where."""

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fastclip import caller, watching

SAMPLED = 8  # parameters looked at, per optimizer: one's gradient and version take 0.25 us

Pair = tuple[Tensor, Tensor]  # a parameter and its gradient


class Event(NamedTuple):
    """A clip or a step."""

    where: str  # file:line of the user's call
    clip: bool
    thread: int
    recorded: int  # nodes that autograd had recorded on that thread


class Mark(NamedTuple):
    """A gradient as an event left it."""

    grad: weakref.ref[Tensor]
    version: int
    event: Event
    clipped: bool  # by the event or, if that is a step, before it


class Tracked:
    """An optimizer, and what last happened to the gradients of a sample of its parameters.

    A gradient is looked at only while its optimizer steps or it is itself clipped. At other times
    another thread may be running the backward that sets it, and reading it then is a crash.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.id = id(optimizer)  # a GradScaler's key for it
        self.marks: dict[int, Mark] = {}
        self._sizes: list[int] = []  # parameters in each group
        self._places: list[tuple[int, int]] = []  # of the sample: group, and place in it

    def size(self) -> int:
        return sum(self._sizes)

    def of_clip(self, ids: set[int]) -> list[Pair]:
        """Those sampled that are among `ids` and have a gradient."""
        return _pairs(p for p in self._sample() if id(p) in ids)

    def of_step(self) -> list[Pair]:
        """Those sampled that have a gradient; if none has, the sample is taken anew."""
        pairs = _pairs(self._sample())
        if not pairs:
            self._choose(lambda p: p.grad is not None)
            pairs = _pairs(self._sample())
        return pairs

    def _groups(self) -> list[list[Tensor]]:
        """The parameters; none once the optimizer is gone."""
        optimizer = self.optimizer()
        return [] if optimizer is None else [group["params"] for group in optimizer.param_groups]

    def _sample(self) -> list[Tensor]:
        groups = self._groups()
        sizes = list(map(len, groups))
        if sizes != self._sizes:
            self._sizes, self._places = sizes, []
            self._choose(lambda p: p.requires_grad)
        return [groups[number][place] for number, place in self._places]

    def _choose(self, suits: Callable[[Tensor], bool]) -> None:
        suited = [
            (number, place)
            for number, params in enumerate(self._groups())
            for place, p in enumerate(params)
            if suits(p)
        ]
        if suited:
            self._places = suited[:: -(-len(suited) // SAMPLED)]

    def clipped(self, pairs: Sequence[Pair], event: Event) -> None:
        for p, grad in pairs:
            self.marks[id(p)] = Mark(weakref.ref(grad), grad._version, event, True)

    def stepped(self, event: Event) -> None:
        for p, grad in self.of_step():
            mark = self.marks.get(id(p))
            clipped = mark is not None and mark.event.clip and mark.grad() is grad
            self.marks[id(p)] = Mark(weakref.ref(grad), grad._version, event, clipped)

    def writes(self, pairs: Sequence[Pair]) -> list[tuple[Mark, int]]:
        """For each gradient that is still the marked one, its mark and the writes since."""
        marks = [(self.marks.get(id(p)), grad) for p, grad in pairs]
        return [
            (mark, grad._version - mark.version)
            for mark, grad in marks
            if mark is not None and mark.grad() is grad
        ]


def added_to(writes: Sequence[tuple[Mark, int]]) -> Event | None:
    """The clip after which a backward has added to these gradients.

    Told without hooks on autograd: a backward writes a gradient once, and a graph was recorded
    before it. Two writes may be a zeroing and a backward, and one without a graph is arithmetic of
    the user's own.
    """
    clips = [(mark.event, count) for mark, count in writes if mark.event.clip and count]
    # If any was written twice: those zeroed and then left out by the backward were written once.
    if not clips or any(count > 1 for _, count in clips):
        return None
    clip = clips[0][0]
    same_thread = clip.thread == threading.get_ident()
    return clip if same_thread and clip.recorded < _get_sequence_nr() else None


def _pairs(sample: Iterable[Tensor]) -> list[Pair]:
    pairs = [(p, p.grad) for p in sample]
    return [(p, g) for p, g in pairs if g is not None and not g.is_inference()]  # without versions


class OrderGuard:
    """What `order_guard` returns: a context manager, and `close` where there is no block."""

    def __init__(self, optimizers: Sequence[Optimizer], scaler: GradScaler | None) -> None:
        self._tracked = [Tracked(optimizer) for optimizer in optimizers]
        self._scaler = scaler
        self._handles: list[RemovableHandle] = []
        self._warned: set[str] = set()
        self._blocks = 0  # entered and not left
        self._open()

    def close(self) -> None:
        """Stop watching: what was hooked is as it was before. Closing twice is no error."""
        watching.remove(self)
        while self._handles:
            self._handles.pop().remove()
        for tracked in self._tracked:
            tracked.marks = {}

    def __enter__(self) -> "OrderGuard":
        self._blocks += 1
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._blocks -= 1
        if self._blocks == 0:
            self.close()

    def clipping(self, ids: set[int], limit: float | None, unscales: bool) -> watching.Done | None:
        """Before a clip: warn of what is wrong with it. See `watching.Listener`."""
        if all(tracked.optimizer() is None for tracked in self._tracked):
            self.close()
        parts = []
        for tracked in self._tracked:
            pairs = tracked.of_clip(ids)
            if pairs:
                parts.append((tracked, pairs, tracked.writes(pairs)))
        if not parts:
            return None
        new = [
            tracked
            for tracked, pairs, writes in parts
            if len(writes) < len(pairs) or any(count for _, count in writes)
        ]
        if not unscales and any(map(self._is_scaled, new)):
            self._warn_of_scale(limit)
        for _, _, writes in parts:
            if clip := added_to(writes):
                self._warn_of_repetition(clip)
        # With gradients of others, the clip may be for those, and these be listed with them.
        if not new and len(ids) <= sum(tracked.size() for tracked in self._tracked):
            self._warn_of_late_clip([mark for _, _, writes in parts for mark, _ in writes])
        event = _event(clip=True)

        def done() -> None:
            for tracked, pairs, _ in parts:
                tracked.clipped(pairs, event)

        return done

    def _open(self) -> None:
        if self._handles:
            return
        watching.add(self)
        for tracked in self._tracked:
            optimizer = tracked.optimizer()
            if optimizer is not None:
                before = functools.partial(self._before_step, tracked)
                after = functools.partial(self._after_step, tracked)
                self._handles.append(optimizer.register_step_pre_hook(before))
                self._handles.append(optimizer.register_step_post_hook(after))

    def _before_step(
        self, tracked: Tracked, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.compiler.is_compiling():
            return
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:  # it makes the gradients that the step is taken with
            return
        clip = added_to(tracked.writes(tracked.of_step()))
        if clip is not None:
            self._warn(
                "added",
                "steps with gradients that a backward was added to after they were clipped at "
                f"{clip.where}: what it added is not clipped, so that the norm can be above "
                f"max_norm. {self._right_order(micro_batches=True)}",
            )

    def _after_step(
        self, tracked: Tracked, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not torch.compiler.is_compiling():
            tracked.stepped(_event(clip=False))

    def _is_scaled(self, tracked: Tracked) -> bool:
        """Whether the scaler has a scale and has not taken it out of this optimizer's gradients."""
        if self._scaler is None or not self._scaler.is_enabled() or self._scaler._scale is None:
            return False
        state = self._scaler._per_optimizer_states.get(tracked.id)
        return state is None or state["stage"] is OptState.READY

    def _warn_of_scale(self, limit: float | None) -> None:
        if self._scaler is None or self._scaler._scale is None or "scaled" in self._warned:
            return
        scale = float(self._scaler._scale)  # waits for the device, once
        if scale == 1:
            return
        amount = "" if limit is None else f" = {limit / scale:.3g} instead of {limit:g}"
        self._warn(
            "scaled",
            f"clips gradients that are still multiplied by the loss scale: their norm is "
            f"{scale:.10g} times too large, so that after unscaling they have been clipped to "
            f"max_norm / {scale:.10g}{amount}. {self._right_order()}",
        )

    def _warn_of_repetition(self, clip: Event) -> None:
        self._warn(
            "repeated",
            f"clips gradients again that were clipped at {clip.where} and that a backward was "
            "added to since, with no step between: clipped after every micro-batch, gradients of "
            "10 times max_norm count a tenth as much with each micro-batch that follows. "
            f"{self._right_order(micro_batches=True)}",
        )

    def _warn_of_late_clip(self, untouched: Sequence[Mark]) -> None:
        # Those clipped before the step: a CUDA graph writes gradients without counting.
        if any(mark.clipped for mark in untouched):
            return
        self._warn(
            "late",
            "clips gradients that the optimizer has stepped with already, at "
            f"{untouched[0].event.where}: that step was not clipped, whatever the norm, and what "
            f"is clipped now is not used. {self._right_order()}",
        )

    def _warn(self, mistake: str, text: str) -> None:
        if mistake not in self._warned:
            self._warned.add(mistake)
            where, level = caller.line()
            warnings.warn(f"{where} {text}", UserWarning, stacklevel=level)

    def _right_order(self, micro_batches: bool = False) -> str:
        calls = ["loss.backward()", "clip_grad_norm_(parameters, max_norm)", "optimizer.step()"]
        if self._scaler is not None and self._scaler.is_enabled():
            calls = ["scaler.scale(loss).backward()", "scaler.unscale_(optimizer)", calls[1]]
            calls += ["scaler.step(optimizer)", "scaler.update()"]
        if micro_batches:
            calls[0] += " for every micro-batch"
        return f"The right order: {', '.join(calls)}, optimizer.zero_grad()"


def order_guard(
    optimizer: Optimizer | Iterable[Optimizer], scaler: GradScaler | None = None
) -> OrderGuard:
    """Warn of gradients that are clipped in the wrong place of a training loop.

    >>> fastclip.order_guard(optimizer, scaler)  # stays on as long as the optimizer lives
    >>> with fastclip.order_guard(optimizer, scaler):  # or only here
    ...     train_one_epoch()

    It notices, each with one `UserWarning` at the line of the call that is wrong:

    - clipping gradients that are still multiplied by the loss scale of `scaler`;
    - clipping after the step that should have been clipped;
    - clipping every micro-batch of an accumulation instead of their sum;
    - stepping with gradients that were added to after they were clipped.

    It sees clips by ``torch.nn.utils``, under whatever name they were imported, and by fastclip,
    but none that is compiled or runs under a dispatch mode. Measuring (a threshold of infinity) is
    no mistake, nor is clipping twice in a row. All it looks at is the identity and the version of
    the gradients of up to 8 parameters of each optimizer, so nothing waits for a device.

    Where it cannot be sure it stays silent, rather than accuse a loop that is right. It takes for a
    backward what has written gradients exactly once, with a graph recorded since the clip. So it
    misses the last two mistakes where a backward writes gradients more than once (DDP outside of
    ``no_sync()`` or with ``gradient_as_bucket_view``) or runs a graph recorded before the clip.

    Args:
        optimizer: the optimizer to watch, or several.
        scaler: the GradScaler that scales the losses of these optimizers, if there is one. To the
            guard, gradients are scaled until its ``unscale_``.

    Returns:
        The guard, which is watching already. ``guard.close()`` or the end of a ``with`` block ends
        that and leaves no hook behind.

    Raises:
        TypeError: an optimizer is not a `torch.optim.Optimizer`, or `scaler` not a GradScaler.
        ValueError: there is no optimizer.
        RuntimeError: this version of torch has no place from which its functions can be watched.
    """
    optimizers = _optimizers(optimizer)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    return OrderGuard(optimizers, scaler)


def _optimizers(given: Any) -> list[Optimizer]:
    if not isinstance(given, Optimizer | Iterable):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or several, got {type(given).__name__}"
        )
    optimizers = [given] if isinstance(given, Optimizer) else list(given)
    if not optimizers:
        raise ValueError("there is no optimizer to watch: the sequence is empty")
    for position, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer {position} must be a torch.optim.Optimizer, "
                f"got {type(optimizer).__name__}"
            )
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise TypeError(
                f"optimizer {position}, a {type(optimizer).__name__}, has no step hooks, as its "
                "class does not call Optimizer.__init__; pass the optimizer that it wraps"
            )
    return list(dict.fromkeys(optimizers))


def _event(clip: bool) -> Event:
    return Event(caller.line()[0], clip, threading.get_ident(), _get_sequence_nr())
