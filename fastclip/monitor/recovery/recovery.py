"""From an alarm back to a checkpoint known to be good, and on without the batches at fault."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastclip.checks import require
from fastclip.monitor.monitor import Monitor
from fastclip.monitor.records import Event
from fastclip.monitor.recovery.files import Damaged
from fastclip.monitor.recovery.ledger import Decision, Ledger
from fastclip.monitor.recovery.policy import Checkpoint, Rollback, RollbackPolicy
from fastclip.monitor.recovery.stateful import Stateful, require_events, require_state
from fastclip.monitor.recovery.telling import log_rollback, warn

if TYPE_CHECKING:
    from fastclip.monitor.recovery.replaying import Replay

_POLICY = RollbackPolicy()
_COUNT = "a whole number of at least 0"


class Recovery:
    """Checkpoints of a run, and the way back to one when something went wrong.

    >>> monitor = Monitor([*default_detectors(), Skips()])
    >>> state = dict(model=model, optimizer=optimizer, scheduler=scheduler, clipper=clipper,
    ...              monitor=monitor)
    >>> recovery = Recovery("checkpoints", state)
    >>> for step, batch in recovery.steps(100_000):
    ...     loss = forward(data[batch])
    ...     loss.backward()
    ...     stats = clipper.step(optimizer)
    ...     optimizer.zero_grad()
    ...     lr = scheduler.get_last_lr()[0] * recovery.lr_scale
    ...     scheduler.step()
    ...     fields = dict(loss=loss, stats=stats, lr=lr, batch=batch)
    ...     recovery.handle(monitor.observe(step=step, **fields))

    A checkpoint of step s contains s updates. It is confirmed, and may be gone back to, once
    `policy.confirm` steps after it raised no event that calls for a rollback. One that is damaged
    is passed over with a `UserWarning` that names it. A rollback is a warning of the logger
    "fastclip".

    To the default detectors a skipped step is a warning: without `Skips` nothing rolls a run back
    that only skips. Losses near zero, or that vary by half from step to step, need the other set in
    `fastclip.monitor.detectors`.

    Args:
        directory: where the checkpoints are, and `recovery.json`, which has what a rollback does
            not take back: rollbacks, skipped batches, and how far checkpoints are confirmed.
        state: by name, anything with `state_dict` and `load_state_dict` of plain data and tensors.
            Random number generators (torch on every device, Python, NumPy if it is loaded) and the
            step are added. Optimizers among them are cut after a rollback.
        policy: when to go back, and what to skip then; `RollbackPolicy()` if it is not given.
        every: steps between two checkpoints.
        keep: the newest `keep` confirmed checkpoints stay, and every unconfirmed one.
        asynchronous: go on as soon as the state is copied to the host's memory, and write it
            meanwhile; an error in writing is raised when the next checkpoint is due.
        rewinds: whether a batch can be used again. False for a loop whose data only goes on, which
            a rollback costs all batches since its target.
        first: the step that a run without checkpoints begins with: it goes on from elsewhere.

    `lr_scale` is what this step's learning rates are multiplied by: `policy.lr_scale` after a
    rollback, else 1.0. Neither schedulers nor `param_groups` show it, and who steps without an
    optimizer of torch applies it.

    On several ranks (the default process group) each makes one with the same arguments, on a folder
    that all share, and hands `handle` the same events: then all decide the same, and `handle`
    without such an event exchanges nothing. Shared files are written by rank 0; an error on one
    rank is an error on all. Each rank has its own random state and its own count of batches.
    `TypeError` and `ValueError` say what is wrong with a setting.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        state: Mapping[str, Stateful],
        policy: RollbackPolicy = _POLICY,
        *,
        every: int = 100,
        keep: int = 3,
        asynchronous: bool = False,
        rewinds: bool = True,
        first: int = 0,
    ) -> None:
        require_state(state)
        require("every", every, "a whole number of at least 1", lambda x: x >= 1, whole=True)
        require("keep", keep, "a whole number of at least 1", lambda x: x >= 1, whole=True)
        require("first", first, _COUNT, lambda x: x >= 0, whole=True)
        from fastclip.monitor.recovery.checkpoints import Checkpoints
        from fastclip.monitor.recovery.contents import Contents
        from fastclip.monitor.recovery.ranks import Ranks

        self.policy, self.every, self.keep = policy, every, keep
        self._asynchronous, self._rewinds, self._first = asynchronous, rewinds, first
        self._ranks = Ranks()
        self._contents = Contents(state, lambda: self.lr_scale)
        folder = Path(directory).absolute()  # whatever directory the process changes to
        self._store = Checkpoints(folder, self._ranks)
        self._monitors = [each for each in state.values() if isinstance(each, Monitor)]
        self._ledger = Ledger(folder, self._ranks.size)
        self._ranks.gather("reading recovery.json", self._ledger.read)
        self._step: int | None = None  # the next one, or the one that is going on
        self._going_on = False  # whether it is; not after a `restore` in the loop's body
        self._handled = False  # whether this step's update is in the state, as far as known
        self._stored: int | None = None  # the checkpoint that the state is, bit for bit
        self._own: int | None = None  # the newest checkpoint of this attempt
        self._loop: object = None  # of the `steps` that is going on
        self._waiting: list[int] = []  # checkpoints that are not confirmed, ascending
        self.lr_scale = 1.0

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Oldest first; one that is still being written is not among them."""
        return [self._checkpoint(step) for step in self._store.steps()]

    @property
    def rollbacks(self) -> list[Rollback]:
        """Those of the whole run, oldest first, with the batches skipped on this rank."""
        rank, past = self._ranks.rank, self._ledger.rollbacks
        return [Rollback(each.step, each.onset, each.target, each.skipped[rank]) for each in past]

    @property
    def skipped(self) -> list[int]:
        """Batches never to be used again, on this rank, ascending."""
        return self._ledger.skipped(self._ranks.rank)

    def steps(self, stop: int) -> Iterator[tuple[int, int]]:
        """The steps up to but without `stop`, each with the number of its batch.

        Goes on from the newest intact checkpoint (after `restore`, from the one that it loaded),
        or saves step 0 if there is none. `RuntimeError` if there are some and none is intact.
        Before each checkpoint, and at `stop`, events that a Monitor in the state gives for records
        still on their way are handled as by `handle`. Calling it again ends the loop of before.
        """
        require("stop", stop, _COUNT, lambda x: x >= 0, whole=True)
        self._loop = loop = object()
        self._begin()
        self._contents.cut.attach()
        try:
            while self._ready(stop):
                step = self._now()
                self._going_on, self._handled, self._stored = True, False, None
                self._set_scale()
                yield step, self._ledger.batch(self._ranks.rank, step)
                if self._loop is not loop or self._step is None:
                    why = (
                        "steps() was called again" if self._loop is not loop else "restore() failed"
                    )
                    raise RuntimeError(f"{why}, and this loop cannot go on")
                self._step = self._now() + self._going_on
                self._going_on = self._handled = False
        finally:
            if self._loop is loop:
                self._contents.cut.detach()
                self._store.join()

    def handle(self, events: Iterable[Event]) -> bool:
        """Decide what to do about events; True: this step will be rolled back.

        The decision is on disk when this returns, and is carried out when the next step is asked
        for. Events of later steps than this one are of an abandoned attempt and ignored. Raises
        `RuntimeError` if the budget is used up or no checkpoint can be gone back to.
        """
        events = require_events(events)
        self._handled = True
        step = self._step
        found = [e for e in events if self.policy.matches(e) and (step is None or e.step <= step)]
        if found and self._ledger.pending is None:
            self._decide(found)
        return self._ledger.pending is not None

    def save(self) -> Checkpoint:
        """Write a checkpoint now. In the loop's body it is one of this step before `handle` is
        called, and of the next step after.

        Checkpoints of later steps than the newest of this attempt are of an abandoned one and
        removed.
        `TypeError` names what in the state is no plain data; `OSError`, if the files cannot be
        written, leaves the earlier checkpoints as they were.
        """
        if self._ledger.pending is not None:
            raise RuntimeError("this step will be rolled back, so its state is not saved")
        self._store.wait()
        present = self._listed()
        if self._step is None:
            if present:
                raise RuntimeError(
                    f"{self._store.folder} has checkpoints: call steps() or restore() before save()"
                )
            self._start()
        step = self._now() + self._handled
        if self._stored != step or step not in present:
            self._contents.cut.restore()
            packed = self._ranks.each("reading the state", self._contents.pack)
            kept = [each for each in present if each < step and each <= self._last()]
            self._store.remove(present[len(kept) :])
            if self._ledger.confirmed > (newest := max(kept, default=-1)):  # one that was removed
                self._change(confirmed=newest)
            self._store.save(step, packed, asynchronous=self._asynchronous)
            self._stored = self._own = step
            self._waiting = [each for each in kept if each > self._ledger.confirmed] + [step]
        return self._checkpoint(step)

    def restore(self, before: int | None = None) -> int:
        """Load the newest intact checkpoint of a step of at most `before`; its step. A loop that is
        going on goes on from there.

        Gradients are set to None, as in a new process. `RuntimeError` if there is none, or naming
        the part of the state that cannot load what is in it.
        """
        self._late_events()  # they are of the attempt that ends here
        pending = self._ledger.pending
        if pending is not None:
            self._store.wait()
            self._store.remove([step for step in self._listed() if step > pending])
            before = pending if before is None else min(before, pending)
        step, content = self._newest(before)
        self._step = None  # as long as the state is in part another one, it cannot be saved
        self._ranks.each("loading the state", lambda: self._contents.unpack(content))
        self._step, self._going_on, self._handled = step, False, False
        self._stored = self._own = step
        self._set_scale()
        if pending is not None:
            self._change(pending=None)
        return step

    def replay(
        self, step: int, run: Callable[[int, int], object], *, rollbacks: int | None = None
    ) -> "Replay":
        """Run up to and including `step` twice from the checkpoint before it, and compare.

        `run(step, batch)` is the loop's body, without what writes down that a step was taken
        (`observe`, `handle`), and returns the loss. It gets the batches, the random state and the
        learning rate that the run had; which those were depends on how many `rollbacks` there had
        been: None means as many as were carried out. The state is afterwards as before. Of what is
        returned `same` says whether loss, parameters and buffers came out as the same bits both
        times, `differs_at` and `name` where not; str() of it is for people to read. Raises
        `ValueError` for a step that the run cannot have made yet.
        """
        from fastclip.monitor.recovery.replaying import replay

        total = len(self._ledger.rollbacks)
        n = total - (self._ledger.pending is not None) if rollbacks is None else rollbacks
        require("rollbacks", n, f"0 to {total}", lambda x: 0 <= x <= total, whole=True)
        require("step", step, _COUNT, lambda x: x >= 0, whole=True)
        return replay(self, step, run, n)

    def _begin(self) -> None:
        if self._listed() or self._ledger.pending is not None or self._ledger.confirmed >= 0:
            if not self._ledger.path.exists():
                raise RuntimeError(
                    f"{self._ledger.path} is missing: it has the skipped batches and the rollbacks "
                    "of the run whose checkpoints are beside it"
                )
            self.restore(self._own)
        else:
            self._start()

    def _start(self) -> None:
        self._step, self._handled, self._own = self._first, False, -1
        self._change()

    def _ready(self, stop: int) -> bool:
        """Whether there is a next step, after all that is due before it."""
        self._contents.cut.restore()
        while True:
            if self._ledger.pending is not None:
                self.restore()
            self._confirm()
            step = self._now()
            if step < stop and (step - self._first) % self.every:
                return True
            if self._stored != step:
                if self.handle(self._late_events()):
                    continue
                self._handled = False
                self.save()
            if not self._asynchronous or step >= stop:
                self._store.wait()
                self._confirm()
            return step < stop

    def _late_events(self) -> list[Event]:
        """Of the records that were still on their way; waits for those."""
        return self._ranks.each(
            "flushing the monitor",
            lambda: [event for each in self._monitors for event in each.flush()],
        )

    def _decide(self, events: list[Event]) -> None:
        policy, ledger = self.policy, self._ledger
        step = max(event.step for event in events)
        onsets = [event.onset for event in events if event.onset is not None]
        onset = min([event.step for event in events] + onsets)
        used = len(ledger.rollbacks)
        if used >= policy.max_rollbacks:
            why = f"{events[0].kind}: {events[0].message}"
            raise RuntimeError(
                f"the alarm at step {step}, onset {onset}, calls for a rollback, and all are used: "
                f"{used} of at most {policy.max_rollbacks} ({why}). "
                "Look for the cause, `fastclip diagnose` tells of its log: the learning rate, the "
                "model, the machine, or a detector too sensitive for this loss "
                "(docs/monitoring.md, Detectors)"
            )
        target = self._target(step, onset)
        suspect = range(max(onset - policy.before, 0), step + policy.after + 1)
        blamed = policy.blamed(events, ledger.size)
        if not self._rewinds:
            suspect, blamed = range(target, self._now() + self._going_on), tuple(range(ledger.size))
        skipped = tuple(
            tuple(ledger.batch(rank, each) for each in suspect) if rank in blamed else ()
            for rank in range(ledger.size)
        )
        decision = Decision(step, onset, target, target + policy.lr_steps, skipped)
        changed = deepcopy(ledger)
        changed.add(decision)
        self._write(changed)
        if self._ranks.rank == 0:
            log_rollback(decision, events, policy, used + 1)

    def _target(self, step: int, onset: int) -> int:
        self._store.wait()
        newest = min(onset - self.policy.before, self._ledger.confirmed, self._last())
        for each in reversed(self._listed()):
            if each <= newest or each == self._first:
                if self._intact(each, self._store.verify):
                    return each
        raise RuntimeError(
            f"the alarm at step {step}, onset {onset}, calls for a rollback, and there is no "
            f"intact, confirmed checkpoint of a step of at most {onset - self.policy.before} "
            f"in {self._store.folder}"
        )

    def _confirm(self) -> None:
        """Confirm what has come far enough, and let go of what is then too old."""
        unseen = max((len(each.telemetry) for each in self._monitors), default=0)  # steps
        limit = min(self._now() - unseen - self.policy.confirm, self._last())
        good = [step for step in self._waiting if step <= limit]
        if not good:
            return
        self._store.wait()
        self._change(confirmed=good[-1])
        confirmed = [step for step in self._listed() if step <= good[-1]]
        self._store.remove(confirmed[: -self.keep])

    def _newest(self, before: int | None) -> tuple[int, dict[str, Any]]:
        """Step and content of the newest intact checkpoint of a step of at most `before`."""
        self._store.wait()
        for step in reversed(self._listed()):
            if before is None or step <= before:
                content = self._intact(step, self._read)
                if content is not None:
                    return step, content
        limit = "" if before is None else f" of a step of at most {before}"
        raise RuntimeError(f"{self._store.folder} has no intact checkpoint{limit}")

    def _read(self, step: int) -> dict[str, Any]:
        return self._store.read(step, self._contents.present())

    def _intact(self, step: int, job: Callable[[int], Any]) -> Any:
        """What `job` makes of a checkpoint; None, after a warning, if that is damaged."""
        try:
            return job(step)
        except Damaged as error:
            warn(f"passed over a damaged checkpoint, {error}")
            return None

    def _listed(self) -> list[int]:
        """The steps of the checkpoints that there are, as rank 0 sees them."""
        steps = self._ranks.first("listing checkpoints", self._store.steps)
        self._waiting = [step for step in steps if step > self._ledger.confirmed]
        return steps

    def _change(self, **fields: Any) -> None:
        changed = deepcopy(self._ledger)
        for name, value in fields.items():
            setattr(changed, name, value)
        self._write(changed)

    def _write(self, changed: Ledger) -> None:
        self._ranks.first("writing recovery.json", changed.write)
        self._ledger = changed

    def _checkpoint(self, step: int) -> Checkpoint:
        return Checkpoint(step, self._store.path(step), step <= self._ledger.confirmed)

    def _now(self) -> int:
        assert self._step is not None
        return self._step

    def _last(self) -> int:
        return sys.maxsize if self._own is None else self._own

    def _set_scale(self) -> None:
        self.lr_scale = self.policy.lr_scale if self._ledger.cut(self._now()) else 1.0
