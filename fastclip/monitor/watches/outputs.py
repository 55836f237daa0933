"""What modules put out, measured by their forward hooks and kept on the device until asked for."""

import dataclasses
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils.hooks import RemovableHandle

from fastclip import backends
from fastclip import table as tables
from fastclip.gradients import unwrapped

PENDING = 1024  # calls after which their rows become one for each module

_PLAIN = (Tensor, nn.Parameter)
_SERVED = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
)


class ModuleStats(NamedTuple):
    """Of the outputs of one module: Python numbers. `nan` and `inf` count elements."""

    name: str
    max_abs: float
    nan: int
    inf: int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ActivationStats:
    """The activations of one step, on their device until `cpu` is called.

    Of n modules in order of execution, innermost first: `names` as in ``model.named_modules()``
    ("" is the model itself), and ``[n]`` each the largest magnitude `max_abs` over the finite
    elements of their outputs (float32, float64 where any output is) and `nonfinite_count` (int64).
    `activation_max` (0-d) is the largest of all: NaN if any element is NaN, else infinite if one
    is. All of it is from before the update of its step.

    Nothing waits for the device but `cpu`, which is one copy. `modules`, `worst` and `nonfinite`
    are for an object on the host and raise `RuntimeError` elsewhere.
    """

    names: tuple[str, ...]
    table: Tensor  # of `fastclip.table`, with p = inf
    dtype: torch.dtype

    @property
    def max_abs(self) -> Tensor:
        return self.table[:, tables.MAX_ABS].to(self.dtype)

    @property
    def nonfinite_count(self) -> Tensor:
        return self.table[:, tables.NAN : tables.INF + 1].sum(1).to(torch.int64)

    @property
    def activation_max(self) -> Tensor:
        return tables.total_norm(self.table, math.inf).to(self.dtype)

    def cpu(self) -> "ActivationStats":
        return dataclasses.replace(self, table=self.table.cpu())

    def modules(self) -> list[ModuleStats]:
        """A row a module, in order of execution."""
        if self.table.device.type != "cpu":
            raise RuntimeError(
                f"these activations are on {self.table.device}, and numbers are wanted on the "
                "host: call it on stats.cpu()"
            )
        rows = zip(self.names, self.table.tolist(), strict=True)
        return [ModuleStats(name, row[1], int(row[2]), int(row[3])) for name, row in rows]

    def worst(
        self, k: int = 5, by: Literal["max_abs", "nonfinite"] = "max_abs"
    ) -> list[ModuleStats]:
        """The k first modules by largest finite magnitude or number of elements that are not
        finite; ties in order of execution."""
        keys: dict[str, Callable[[ModuleStats], float]] = {
            "max_abs": lambda row: row.max_abs,
            "nonfinite": lambda row: row.nan + row.inf,
        }
        if by not in keys:
            raise ValueError(f"by must be one of {', '.join(map(repr, keys))}, got {by!r}")
        if k < 0:
            raise ValueError(f"k must be at least 0, got {k}")
        return sorted(self.modules(), key=keys[by], reverse=True)[:k]

    def nonfinite(self) -> list[str]:
        """Of modules with elements that are not finite, in order of execution: the first is where
        they came from, if not from the input or from a parameter."""
        return [row.name for row in self.modules() if row.nan + row.inf]

    def __repr__(self) -> str:
        return f"<ActivationStats of {len(self.names)} modules on {self.table.device}>"


class Outputs:
    """Measures outputs of modules, known by number: the places of their `names`."""

    def __init__(self, names: Sequence[str], every: int) -> None:
        self._names, self._every = names, every
        self._lock = threading.Lock()  # replicas of DataParallel run in threads
        self._steps = 0
        self._begin()

    def end(self) -> ActivationStats | None:
        """End a step; what was measured in it, or None if nothing was."""
        with self._lock:
            stats = None
            if self._tables:
                self._fold()
                names = tuple(self._names[number] for number in self._modules)
                dtype = torch.float64 if self._wide else torch.float32
                stats = ActivationStats(names, self._tables[0], dtype)
            self._steps += 1
            self._begin()
        return stats

    def _begin(self) -> None:
        self.wanted = (self._steps + 1) % self._every == 0  # whether to measure in this step
        self._modules: list[int] = []  # of the rows of the first of _tables
        self._tables: list[Tensor] = []
        self._calls: list[int] = []  # of the rows of the others: the modules called since
        self._forward: set[int] = set()  # modules that have run outside of backward
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self._wide = False

    def see(self, number: int, output: object) -> None:
        """Measure what a module put out."""
        if torch._C._current_graph_task_id() == -1:  # not within backward
            self._forward.add(number)
        elif number in self._forward:  # checkpointing: this has been measured
            return
        for tensor in _tensors(output):
            row = self._row(tensor, number)
            if row is None:
                continue
            with self._lock:
                self._calls.append(number)
                self._tables.append(row)
                if len(self._calls) >= PENDING:
                    self._fold()

    def _row(self, tensor: Tensor, number: int) -> Tensor | None:
        """Its table, ``[1, 5]``; None if it does not count."""
        known = self._known.get(id(tensor))
        version = -1 if tensor.is_inference() else tensor._version
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        held = _held(tensor, self._names[number])
        if held is None:
            return None
        self._wide = self._wide or held.dtype in tables.WIDE
        row = backends.choose(held.device).measure([held], math.inf, None)
        if version >= 0:  # inference tensors may have changed without a sign of it
            self._known[id(tensor)] = weakref.ref(tensor), version, row
        return row

    def _fold(self) -> None:
        """Make all tables one, with a row for each module in order of their first calls."""
        numbers = self._modules + self._calls
        modules = list(dict.fromkeys(numbers))
        device = next((t.device for t in self._tables if t.device.type != "cpu"), None)
        parts = self._tables if device is None else [_sent(t, device) for t in self._tables]
        table = torch.cat(parts)
        if len(modules) < len(numbers):
            place = {number: row for row, number in enumerate(modules)}
            rows = torch.tensor([place[number] for number in numbers], device="cpu")
            table = _combined(table, _sent(rows, table.device), len(modules))
        self._modules, self._tables, self._calls = modules, [table], []
        self._known.clear()  # else it would grow where nobody calls take


class Hook:
    """What a module calls. A copy of it, in a copied or unpickled model, does nothing."""

    def __init__(self, outputs: "weakref.ref[Outputs] | None" = None, number: int = 0) -> None:
        self._outputs, self._number = outputs, number

    @property
    def outputs(self) -> "Outputs | None":
        return None if self._outputs is None else self._outputs()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, inputs: object, output: object) -> None:
        outputs = self.outputs
        if outputs is not None and outputs.wanted and torch.is_grad_enabled():
            if not torch._C._is_tracing():  # what runs then becomes part of the trace
                outputs.see(self._number, output)

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()


@contextmanager
def unwatched(model: nn.Module) -> Iterator[None]:
    """Within, no watch measures the model's forward passes: they are of no step."""
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    found = {hook.outputs for hook in hooks if isinstance(hook, Hook)} - {None}
    measuring = [outputs for outputs in found if outputs is not None and outputs.wanted]
    for outputs in measuring:
        outputs.wanted = False
    try:
        yield
    finally:
        for outputs in measuring:
            outputs.wanted = True


def watched(
    model: nn.Module, every: int, chosen: Callable[[str, nn.Module], bool] | None
) -> tuple[Outputs, list[RemovableHandle]]:
    """Hooks on the chosen modules, and what they measure for as long as that is there."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    modules = [
        (name, module)
        for name, module in unwrapped(model).named_modules()
        if chosen is None or chosen(name, module)
    ]
    if not modules:
        raise ValueError(f"modules chose none of the modules of {type(model).__name__}")
    outputs = Outputs([name for name, _ in modules], every)
    return outputs, [
        module.register_forward_hook(Hook(weakref.ref(outputs), number))
        for number, (_, module) in enumerate(modules)
    ]


def _tensors(output: object) -> Iterator[Tensor]:
    """Those in what a module returned."""
    if isinstance(output, Tensor):
        yield output
        return
    parts: Any = ()
    if isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, list | tuple):
        parts = output
    elif dataclasses.is_dataclass(output):
        parts = [getattr(output, field.name, None) for field in dataclasses.fields(output)]
    for part in parts:
        yield from _tensors(part)


def _held(tensor: Tensor, name: str) -> Tensor | None:
    """The numbers of an output that this process has, in strided memory; None if it has none."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or isinstance(tensor, FakeTensor):
        return None
    if type(tensor) not in _PLAIN:
        tensor = _plain(tensor, name)
    if tensor.device.type == "meta" or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = _stored(tensor, name)
    # float8 has no kernels, and float32 holds all of it
    return tensor if tensor.dtype in _SERVED else tensor.to(torch.float32)


def _plain(tensor: Tensor, name: str) -> Tensor:
    """The ordinary tensor in one of a subclass."""
    distributed = sys.modules.get("torch.distributed.tensor")  # else nobody has a DTensor
    if distributed is not None:
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        from fastclip.distributed.layouts import local_of

        if isinstance(tensor, distributed.DTensor):
            tensor = local_of(tensor)
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
    if tensor.is_nested:
        return tensor.detach().values()
    # A subclass that only adds methods has ordinary memory; one that dispatches may have none.
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(_refusal(name, f"a {type(tensor).__name__}, a subclass of Tensor"))
    return tensor.as_subclass(Tensor)


def _stored(tensor: Tensor, name: str) -> Tensor:
    """The values of a sparse tensor; not coalesced, which would wait for the device."""
    if tensor.is_nested or tensor.layout == torch.jagged:
        return tensor.values()
    if tensor.layout == torch.sparse_coo:
        return tensor._values()
    raise TypeError(_refusal(name, f"a tensor of layout {tensor.layout}"))


def _refusal(name: str, what: str) -> str:
    return (
        f"the module {name!r} returned {what}, which cannot be measured; leave it out with "
        "ActivationWatch(model, modules=lambda name, module: ...)"
    )


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()  # else the copy waits for the device
    return tensor.to(device, non_blocking=True)


def _combined(table: Tensor, rows: Tensor, n: int) -> Tensor:
    """The table, ``[n, 5]``, whose row ``rows[i]`` has the elements of row i of `table`."""
    largest, counts = table[:, : tables.NAN], table[:, tables.NAN :]
    where = rows[:, None].expand_as(largest)
    return torch.cat(
        [
            largest.new_zeros(n, largest.shape[1]).scatter_reduce_(0, where, largest, "amax"),
            counts.new_zeros(n, counts.shape[1]).index_add_(0, rows, counts),
        ],
        dim=1,
    )
