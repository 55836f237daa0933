"""Measuring gradients during backward, each as soon as it is final, while caches still hold it.

A post-accumulate hook on each large parameter measures its gradient and keeps the row with a stamp:
which tensor and storage the gradient is, its version, address and number of elements. When the step
comes, a row is used if the stamp still fits; whatever else there is goes through `passes.measure`.
The result is that of `passes.measure`: bit by bit in the backends ``reference`` and ``cpu`` (below
2**29 elements in all), elsewhere up to the order in which float64 numbers are added.

Measure before use: on one thread of a Zen 4, with hooks backward and clip took 3 % longer for a
small GPT, 10 % for an MLP. A hook reads 4 MiB in 0.12 ms, the step in 0.19; Python around it: 0.1.

Some writes leave no mark on a tensor: by ``GradScaler.unscale_``, a fused optimizer, a collective,
through ``.data`` or numpy. So a few elements of each gradient, spread over it, are kept and
compared as well, with one more that is finite and not 0, if there is any: a multiplication of the
gradient by anything but 1, as the first two do, changes that one or no element at all. (To find it
costs another read: on the CPU only where the spread elements have none, elsewhere always.) On the
CPU a difference sends all gradients through the plain pass. So it does on other devices, where the
host waits for the comparisons until one has found nothing; later ones are read when they have
arrived, and a difference then is an error.

What is not seen is a write that leaves no mark and all these elements as they were: of other
elements alone, by ``.data``, numpy, DLPack, a view of the ``.data`` or a kernel of one's own. Write
to the gradient itself instead, or call `Overlap.forget`.

Beside a process group there are no hooks: collectives change gradients after these have run, DDP
those in its buckets, FSDP makes them later still. A backward that something records (a compiled
autograd, a dispatch mode, a CUDA graph) is left alone. Gradients that are views of one buffer have
one version for all, so that only the last of them keeps its row.

With a loss scale, norms of orders other than 0, 1, 2 and inf are measured by the step alone: powers
of the scaled elements, which a hook sees, may overflow.

Streams: a hook runs on the stream on which the gradient was accumulated, and the end of backward
makes the caller's stream wait for that one. On other devices than the CPU this has not been run.
"""

import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fastclip import backends, passes, sampling
from fastclip import table as tables
from fastclip.backends import Backend
from fastclip.gradients import Gradients, Listed, Row

LEAST = {"cpu": 1 << 20}  # bytes of a gradient that gets a hook
LEAST_ELSEWHERE = 1 << 20

_PLAIN = (Tensor, torch.nn.Parameter)
_REQUIRES_GRAD = attrgetter("requires_grad")


NO_HOOK_RAN = (
    "overlap=True has had no effect so far: no hook has run. Either no backward has made these "
    "gradients, or every backward ran within accumulating()"
)
ALL_CHANGED = (
    "overlap=True had no effect: after the hooks had measured them, all gradients were changed or "
    "another backend was chosen, so that they were measured again"
)
UNSEEN = (
    "gradients were changed after backward in a way that leaves no mark on them "
    "(GradScaler.unscale_, a fused optimizer, a collective, .data or numpy): {}. Pass the scaler "
    "to clip_ or step instead of calling unscale_, write to the gradients themselves, or leave out "
    "overlap=True"
)


class _Stamp(NamedTuple):
    tensor: int  # address of the TensorImpl
    storage: int  # address of the StorageImpl
    version: int
    data: int
    numel: int


class _Record(NamedTuple):
    # Not to the tensor: torch.utils.swap_tensors refuses one with weak references. While this one
    # lives no other storage gets its address, and the gradient's memory is free to go.
    storage: StorageWeakRef
    stamp: "_Stamp"
    backend: Backend
    row: Tensor
    place: Tensor | None  # of one more element to compare, in memory: int64, [1]
    sample: Tensor


class _Hook:
    """The hook of one parameter. The parameter owns it: nothing here keeps a parameter alive."""

    __slots__ = ("__weakref__", "handle", "overlap", "ran", "record")

    def __init__(self, overlap: "Overlap", parameter: Tensor) -> None:
        self.overlap = weakref.ref(overlap)
        self.record: _Record | None = None
        self.ran = True  # since the last watch
        self.handle = parameter.register_post_accumulate_grad_hook(self)

    def __call__(self, parameter: Tensor) -> None:
        self.ran = True
        overlap = self.overlap()
        if overlap is not None:
            self.record = overlap._measured(parameter.grad)


class Overlap:
    """Measures the gradients of the parameters it watches while backward runs.

    `p` is the order of the norm; a gradient of less than `least` bytes (None: `LEAST`) is left to
    the plain pass.

    `reason` says why no hooks are in place, and is None if they are. Of the gradients of the last
    `measure`, `served` has the number whose rows came from hooks, and how many there were.
    """

    def __init__(self, p: float, least: int | None = None) -> None:
        self.p = p
        self.least = least
        self.reason: str | None = "no parameter has been watched yet"
        self.served = (0, 0)
        self._hooks: weakref.WeakValueDictionary[int, _Hook] = weakref.WeakValueDictionary()
        self._accumulating = 0
        self._fired = 0  # hooks that have measured since the last step
        self._fired_ever = False
        self._warned: set[str] = set()
        self._comparisons = _Comparisons()
        self._looked: list[list[int]] | None = None  # at the last watch
        self._n_hooks = 0  # since then
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Put hooks on those of `parameters` that have none yet. To be called at every step: what
        was added or unfrozen since is served from the next backward on."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.close()
            self.reason = (
                "torch.distributed is initialised, and collectives may change gradients after "
                "their hooks have run"
            )
            self._warn(f"overlap=True has no effect: {self.reason}")
            return
        self._renew(parameters)
        # Not compared with the last time by id alone: one may be that of a new parameter, and a
        # lazy one, or one whose data is replaced, grows. A dead one's hook has left `_hooks`.
        looked = [
            list(map(id, parameters)),
            list(map(_REQUIRES_GRAD, parameters)),
            _sizes(parameters),
        ]
        if looked == self._looked and len(self._hooks) == self._n_hooks:
            return
        self._looked = looked
        for parameter in parameters:
            if id(parameter) not in self._hooks and self._takes(parameter):
                self._hooks[id(parameter)] = _Hook(self, parameter)
        self._n_hooks = len(self._hooks)
        none = "no parameter is a plain leaf tensor, trainable and large enough to be worth a hook"
        self.reason = None if self._hooks else none

    def _renew(self, parameters: Sequence[Tensor]) -> None:
        """Put back into autograd the hooks that torch.utils.swap_tensors has taken out of it, where
        the parameter still lists them: that is all that is known of those that have not run."""
        hooks = dict(self._hooks)
        if all(hook.ran for hook in hooks.values()):
            for hook in hooks.values():
                hook.ran = False
            return
        for parameter in parameters:
            if (own := hooks.get(id(parameter))) is not None:
                if not own.ran:
                    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
                own.ran = False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Around the backward of every micro-batch but the last: there nothing is measured."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    def forget(self) -> None:
        """Drop all rows: for who writes to gradients and leaves no mark on them."""
        for hook in list(self._hooks.values()):
            hook.record = None

    def close(self) -> None:
        """Remove all hooks."""
        _remove(self._hooks)
        self._hooks.clear()
        self._looked = None

    @torch.no_grad()
    def measure(self, listed: Listed, inv_scale: Tensor | None = None) -> tuple[Gradients, Tensor]:
        """What ``passes.measure(listed, p, inv_scale)`` returns; reads what no hook has read.

        Raises `RuntimeError` if, on another device than the CPU, an earlier result has turned out
        to be stale.
        """
        self._comparisons.check()
        if _traced(listed.grads[0]):
            return passes.measure(listed, self.p, inv_scale)
        records = self._records(listed.grads)
        hooked = sum(record is not None for record in records)
        merged = self._merged(listed, records, inv_scale) if hooked else None
        self.served = (hooked if merged else 0, len(records))
        if records and not hooked and self.reason is None:
            if not self._fired_ever:
                self._warn(NO_HOOK_RAN)
            elif self._fired:
                self._warn(ALL_CHANGED)
        self._fired = 0
        return merged or passes.measure(listed, self.p, inv_scale)

    def __reduce__(self) -> tuple[type["Overlap"], tuple[float, int | None]]:
        return Overlap, (self.p, self.least)  # a copy has no hooks until it watches something

    def __repr__(self) -> str:
        if self.reason is not None:
            return f"<Overlap without hooks: {self.reason}>"
        return "<Overlap: {} of {} gradients of the last step from hooks>".format(*self.served)

    def _takes(self, parameter: Tensor) -> bool:
        least = LEAST.get(parameter.device.type, LEAST_ELSEWHERE)
        return (
            type(parameter) in _PLAIN
            and parameter.requires_grad
            and parameter.is_leaf
            and parameter.layout == torch.strided
            and parameter.nbytes >= (least if self.least is None else self.least)
        )

    def _measured(self, gradient: Tensor | None) -> _Record | None:
        """In a hook: the record of a gradient, if one can be made."""
        if self._accumulating or gradient is None or not _is_plain(gradient) or _traced(gradient):
            return None
        self._fired += 1
        self._fired_ever = True
        storage = StorageWeakRef(gradient.untyped_storage())
        stamp = _stamp(gradient)  # before reading: so a write meanwhile is seen
        backend = backends.choose(gradient.device)
        with torch.no_grad():
            row = backend.measure([gradient], self.p, None)[0]
            place = sampling.place(gradient)
            sample = sampling.sample(gradient, place)
        return _Record(storage, stamp, backend, row, place, sample)

    def _records(self, gradients: Sequence[Tensor]) -> list[_Record | None]:
        """For each gradient its record, if all that is known of it is as it was then."""
        hooks = list(self._hooks.values())
        known = {hook.record.stamp: hook.record for hook in hooks if hook.record is not None}
        tensors = {stamp.tensor for stamp in known}  # of dead ones too: no more than a quick test
        devices = {record.row.device for record in known.values()}
        chosen = {device: backends.choose(device) for device in devices}

        def of(gradient: Tensor) -> _Record | None:
            record = known.get(_stamp(gradient)) if gradient._cdata in tensors else None
            if record is None or record.backend is not chosen[gradient.device]:
                return None
            return record

        return [of(gradient) for gradient in gradients]

    def _merged(
        self, listed: Listed, records: Sequence[_Record | None], inv_scale: Tensor | None
    ) -> tuple[Gradients, Tensor] | None:
        """The result from the records and a pass over the rest, or None if that is not it."""
        if inv_scale is not None and self.p not in tables.SCALABLE:
            return None  # the hooks did not know the loss scale
        pairs = list(zip(listed.grads, records, strict=True))
        hooked = [(gradient, record) for gradient, record in pairs if record is not None]
        if self._changed_unseen(hooked):
            return None
        taken = {id(gradient) for gradient, _ in hooked}
        others = [None if id(tensor) in taken else tensor for tensor in listed.tensors]
        rest = Listed(others, listed.names)  # with all places, so that labels stay the same
        rows, lines = self._rest(rest, inv_scale)
        tensors = [*(gradient for gradient, _ in hooked), *(row.tensor for row in rows)]
        if len(rows) < len(rest.grads) or not _distinct(tensors):
            return None  # a gradient reached twice has one row

        first = listed.grads[0].device
        table = torch.stack([sampling.on(first, record.row) for _, record in hooked])
        table = tables.unscale(table, self.p, inv_scale)
        by_hook, by_rest = iter(table.unbind()), iter(zip(rows, lines, strict=True))
        merged = [
            (Row(label, gradient.numel(), gradient, 1, None), next(by_hook))
            if record
            else next(by_rest)
            for label, (gradient, record) in zip(listed.labels(), pairs, strict=True)
        ]
        return (
            Gradients.of_rows([row for row, _ in merged]),
            torch.stack([sampling.on(first, line) for _, line in merged]),
        )

    def _rest(self, rest: Listed, inv_scale: Tensor | None) -> tuple[list[Row], Sequence[Tensor]]:
        if not rest.grads:
            return [], []
        found, table = passes.measure(rest, self.p, inv_scale)
        return found.rows(), table.unbind()

    def _changed_unseen(self, hooked: Sequence[tuple[Tensor, _Record]]) -> bool:
        """Whether an element differs from its sample, as far as the host may know."""
        for device in {gradient.device for gradient, _ in hooked}:
            pairs = [pair for pair in hooked if pair[0].device == device]
            now = torch.cat([sampling.sample(gradient, record.place) for gradient, record in pairs])
            then = torch.cat([sampling.on(device, record.sample) for _, record in pairs])
            differ = (now.view(torch.uint8) != then.view(torch.uint8)).any()
            if self._comparisons.tell(differ):
                self._warn(UNSEEN.format("all were measured again"))
                return True
        return False

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)


class _Comparisons:
    """Whether something differs, with as few waits for a device as can be.

    On the CPU, and on another device until the answer was no once, it is told at once. Later ones
    are copied to the host, and `check` raises when one has arrived and is yes.
    """

    def __init__(self) -> None:
        self._trusted: set[torch.device] = set()
        self._underway: deque[tuple[Tensor, torch.Event]] = deque()

    def tell(self, differ: Tensor) -> bool:
        if differ.device.type == "cpu" or differ.device not in self._trusted:
            answer = bool(differ)
            if not answer:
                self._trusted.add(differ.device)
            return answer
        copy = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
        copy.copy_(differ, non_blocking=True)
        event = torch.Event(differ.device)
        event.record()
        self._underway.append((copy, event))
        return False

    def check(self) -> None:
        while self._underway and self._underway[0][1].query():
            copy, _ = self._underway.popleft()
            if copy:
                raise RuntimeError(UNSEEN.format("an earlier step was clipped by their old norms"))


def _remove(hooks: "weakref.WeakValueDictionary[int, _Hook]") -> None:
    for hook in list(hooks.values()):
        hook.handle.remove()


def _sizes(parameters: Sequence[Tensor]) -> list[int]:
    """In bytes; 0 for those of other types, which may have none yet."""
    return [each.nbytes if type(each) in _PLAIN else 0 for each in parameters]


def _stamp(gradient: Tensor) -> _Stamp:
    storage = gradient.untyped_storage()._cdata
    return _Stamp(
        gradient._cdata, storage, gradient._version, gradient.data_ptr(), gradient.numel()
    )


def _is_plain(gradient: Tensor) -> bool:
    """Whether it fills a range of memory, as a plain tensor of numbers."""
    return (
        type(gradient) is Tensor
        and gradient.layout == torch.strided
        and (gradient.is_contiguous() or gradient.untyped_storage().nbytes() == gradient.nbytes)
        and gradient.numel() > 0
    )


def _traced(gradient: Tensor) -> bool:
    """Whether what is done now is recorded, to be done again with other numbers."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or (gradient.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _distinct(tensors: Sequence[Tensor]) -> bool:
    """Whether no two begin at one address."""
    addresses = [tensor.data_ptr() for tensor in tensors if tensor.numel() > 0]
    return len(set(addresses)) == len(addresses)
