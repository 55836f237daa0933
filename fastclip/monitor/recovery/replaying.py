"""Run the steps to a fault twice: do the same bits come out?"""

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from fastclip.checks import require
from fastclip.monitor.recovery.checkpoints import digest
from fastclip.monitor.recovery.telling import spans

if TYPE_CHECKING:
    from fastclip.monitor.recovery.recovery import Recovery

LOSS = "the loss"

Step = dict[str, bytes]  # the bits of the loss, then of parameters and buffers by name


class Replay(NamedTuple):
    """What came of running the steps `first` to `step` twice; ``str()`` is for people to read.

    `batches` are those of this rank. `differs_at`, `rank` and `name` say at which step, on which
    rank and in which parameter or buffer the second time differed first; None if it never did.
    """

    first: int
    step: int
    batches: tuple[int, ...]
    loss: float | None  # of `step`, the second time, on this rank
    differs_at: int | None
    rank: int | None
    name: str | None

    @property
    def same(self) -> bool:
        return self.differs_at is None

    def __str__(self) -> str:
        ran = f"Steps {self.first} to {self.step} were run twice, from the checkpoint of step "
        text = f"{ran}{self.first}, with the batches {spans(self.batches)}.\n"
        if self.loss is not None:
            text += f"The loss of step {self.step} is {self.loss:g}.\n"
        if self.differs_at is None and self.loss is None:
            return (
                f"{text}Parameters and buffers were the same bits both times, on every rank. The "
                "loss was not compared: run returned None."
            )
        if self.differs_at is None:
            return (
                f"{text}Loss, parameters and buffers were the same bits both times, on every "
                "rank: what went wrong comes from the data or the model."
            )
        return (
            f"{text}At step {self.differs_at}, {self.name} on rank {self.rank} was the first to "
            "differ: look for faulty hardware, or for operations that are not deterministic "
            "(torch.use_deterministic_algorithms finds those)."
        )


def replay(recovery: "Recovery", step: int, run: Callable[[int, int], object], n: int) -> Replay:
    """See `Recovery.replay`; `n`, of how many rollbacks the run knew then."""
    ledger = recovery._ledger.first(n)
    ran = _latest(recovery)
    made = f"at most {ran}, the last one that this run can have made"
    require("step", step, made, lambda x: x <= ran, whole=True)
    before = min([step, *(each.target for each in recovery._ledger.rollbacks[n:])])
    contents, rank = recovery._contents, recovery._ranks.rank
    modules = contents.modules
    saved, scale = contents.snapshot(), recovery.lr_scale
    attached = contents.cut.attach()
    try:
        first, content = recovery._newest(before)
        batches = tuple(ledger.batch(rank, each) for each in range(first, step + 1))
        runs: list[list[Step]] = []
        # Read twice: optimizers take loaded tensors for their own, and change them.
        for loaded in (content, recovery._read(first)):
            contents.unpack(loaded)
            runs.append([])
            for each, batch in enumerate(batches, first):
                recovery.lr_scale = recovery.policy.lr_scale if ledger.cut(each) else 1.0
                loss = _loss(run(each, batch))
                runs[-1].append({LOSS: digest_of(loss), **_digests(modules)})
    finally:
        if attached:
            contents.cut.detach()
        contents.cut.restore()
        recovery.lr_scale = scale
        contents.reset(saved)
    found = recovery._ranks.gather("comparing two runs", lambda: _first(first, *runs))
    at, _, of, name = min(
        ((at, name != LOSS, of, name) for of, (at, name) in enumerate(found) if name),
        default=(None, False, None, None),
    )
    value = None if loss is None else float(loss)
    return Replay(first, step, batches, value, at, of, name)


def _latest(recovery: "Recovery") -> int:
    """The last step that can have been run, as far as checkpoints and rollbacks tell: the next
    checkpoint is missing, or two where they are written in the background."""
    known = [recovery._step or 0, *recovery._listed()]
    known += [each.step for each in recovery._ledger.rollbacks]
    return max(known) + recovery.every * (1 + recovery._asynchronous) - 1


def _first(first: int, one: list[Step], two: list[Step]) -> tuple[int, str]:
    """The step and the name of what differs first; an empty name if nothing does."""
    for step, (ours, theirs) in enumerate(zip(one, two, strict=True), first):
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                return step, name
    return 0, ""


def _loss(value: Any) -> Any:
    if value is None or (isinstance(value, Tensor) and value.numel() == 1):
        return value if value is None else value.detach()
    if isinstance(value, int | float):
        return float(value)
    raise TypeError(f"run must return the loss, a number, or None, got {value!r:.80}")


def digest_of(loss: Any) -> bytes:
    if loss is None:
        return b""
    return digest(loss) if isinstance(loss, Tensor) else struct.pack("d", loss)


def _digests(modules: dict[str, nn.Module]) -> Step:
    named = {
        f"{name}/{key}": value
        for name, module in modules.items()
        for pairs in (module.named_parameters(), module.named_buffers())
        for key, value in pairs
    }
    return {name: digest(value) for name, value in named.items()}
