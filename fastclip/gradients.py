"""Whatever the caller passed -> named, flat, local gradient tensors.

In two steps, since a step of training with thousands of small tensors costs more in looking at
them from Python than in reading them: `of_parameters` lists the gradients and looks at none;
`sort_out` looks at each, for lists that a backend does not take as they are.
"""

import sys
import types
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fastclip import caller
from fastclip.ranks import Contributions
from fastclip.strides import overlaps, without_expansion

if TYPE_CHECKING:
    from fastclip.distributed.groups import United
    from fastclip.distributed.shards import Spread

Parameters = Tensor | nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
Tensors = Tensor | Iterable[Tensor | None] | Iterable[tuple[str, Tensor]]

NoneType = type(None)
_PLAIN = frozenset({Tensor, nn.Parameter})
_PLAIN_OR_NONE = _PLAIN | {NoneType}
_DTYPES = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128),
    }
)


_TRACED = (
    "gradients that are DTensors cannot be clipped or measured inside torch.compile: call fastclip "
    "outside of what is compiled"
)


class Listed:
    """The gradients as they were passed.

    `tensors` has a place for every entry, None where there is no gradient; `names` too, or is None
    if no entry had a name. `grads` are the gradients there are; `plain` tells whether each of them
    is exactly a torch.Tensor and not of a subclass. `parameters` are what they are the gradients
    of, a place for every entry, where that is known.

    Where DTensors over several processes are among them, `tensors` are what this process holds,
    and `spread` tells of what: then every parameter that requires a gradient has a tensor. The
    others are the same on all of them, or with `alone` this process's own.
    """

    def __init__(
        self,
        tensors: list[Any],
        names: Sequence[str] | None,
        parameters: Sequence[Tensor] = (),
        alone: bool = False,
    ) -> None:
        kinds = set(map(type, tensors))  # one call for thousands of tensors: 18 ns each
        self.names = names
        self.parameters = parameters
        self.spread: Spread | None = None
        if not kinds <= _PLAIN and (of_shards := _spread(tensors, self, alone)) is not None:
            tensors, self.spread = of_shards
            kinds = set(map(type, tensors))
        self.tensors: list[Tensor | None] = tensors
        self.grads: list[Tensor] = tensors
        if NoneType in kinds:
            self.grads = [tensor for tensor in tensors if tensor is not None]
        self.plain = kinds <= _PLAIN_OR_NONE

    def distinct(self) -> "Listed":
        """The same with no tensor object twice: all that can be told while torch.compile traces."""
        tensors: list[Tensor | None] = []
        for tensor in self.tensors:
            again = any(tensor is other for other in tensors)
            tensors.append(None if again else tensor)
        return Listed(tensors, self.names)

    def called(self, label: str) -> str:
        """How an error calls the gradient of that label."""
        known = self.names is not None
        return f"gradient {label!r}" if known else f"the gradient at position {label}"

    def attended(self) -> AbstractContextManager[None]:
        """Around all that is done before the processes of DTensors exchange what they have
        measured: what goes wrong on one is an error on the others, which would wait else."""
        return nullcontext() if self.spread is None else self.spread.attended(self.grads)

    def agree_on(self, *options: object) -> None:
        """Have that exchange compare options, which have to be the same on all processes."""
        if self.spread is not None:
            from fastclip.distributed import combine

            self.spread = replace(self.spread, agreed=combine.agreed(options))

    def labels(self) -> tuple[str, ...]:
        """For each gradient its name, else its 0-based position among all entries."""
        names = _labels(self.names, len(self.tensors))
        if len(self.grads) == len(self.tensors):
            return tuple(names)
        return tuple(
            name for name, tensor in zip(names, self.tensors, strict=True) if tensor is not None
        )


def _labels(names: Sequence[str] | None, n: int) -> Sequence[str]:
    return names or [str(position) for position in range(n)]


def _spread(tensors: list[Any], listed: Listed, alone: bool) -> "tuple[list[Any], Spread] | None":
    """What this process holds, and of what, if there are DTensors over several processes."""
    # nobody has a DTensor without this module
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None:
        return None
    if torch.compiler.is_compiling():
        if any(isinstance(each, distributed.DTensor) for each in tensors):
            torch._dynamo.graph_break(msg=_TRACED)  # else the raise is traced, and not raised
            raise NotImplementedError(_TRACED)
        return None
    from fastclip.distributed import lists

    names = _labels(listed.names, len(tensors))
    return lists.spread_of(tensors, listed.parameters, names, listed.called, alone)


class Row(NamedTuple):
    """One gradient, as the backends take it."""

    name: str
    numel: int  # logical elements
    tensor: Tensor  # distinct strided memory free of overlap
    repeats: int  # logical elements that each element of `tensor` stands for (expanded tensors)
    sparse: tuple[Tensor, Tensor] | None  # an uncoalesced gradient and its coalesced copy


@dataclass(frozen=True)
class Gradients:
    """The gradients as the backends take them: the fields of a `Row`, for every row of the table.

    `sparse` has only the rows, by number, of uncoalesced gradients. With `spread`, `tensors` are
    what this process holds of tensors of `numel` elements; `contributions` then tell what each
    process held when they were measured first.

    With `united`, of process groups, `names` and `numel` are of the rows of all ranks, and the
    other fields of this rank's gradients. `unit_norms`, where they were measured, are the 2-norms
    of all rows' units as stored, float64 ``[units]``.
    """

    names: tuple[str, ...]
    numel: tuple[int, ...]
    tensors: list[Tensor]
    repeats: tuple[int, ...]
    sparse: dict[int, tuple[Tensor, Tensor]]
    spread: "Spread | None" = None
    contributions: Contributions | None = None
    united: "United | None" = None
    unit_norms: Tensor | None = None

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> "Gradients":
        return cls(
            tuple(row.name for row in rows),
            tuple(row.numel for row in rows),
            [row.tensor for row in rows],
            tuple(row.repeats for row in rows),
            {number: row.sparse for number, row in enumerate(rows) if row.sparse is not None},
        )

    @classmethod
    def of_listed(cls, listed: Listed, unit_norms: Tensor | None = None) -> "Gradients":
        """Those of a list that a backend has taken as it is."""
        spread = listed.spread
        numel = map(Tensor.numel, listed.grads) if spread is None else spread.numel
        ones = (1,) * len(listed.grads)
        return cls(
            *(listed.labels(), tuple(numel), listed.grads, ones, {}, spread), unit_norms=unit_norms
        )

    def rows(self) -> list[Row]:
        """What `of_rows` makes these of."""
        fields = zip(self.names, self.numel, self.tensors, self.repeats, strict=True)
        return [Row(*field, self.sparse.get(number)) for number, field in enumerate(fields)]

    def by_device(self) -> dict[torch.device, list[int]]:
        """The row numbers on each device, in order."""
        every = [tensor.device for tensor in self.tensors]
        if every and every.count(every[0]) == len(every):
            return {every[0]: list(range(len(every)))}
        devices: dict[torch.device, list[int]] = {}
        for number, device in enumerate(every):
            devices.setdefault(device, []).append(number)
        return devices


def are_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether each is exactly a torch.Tensor or a parameter, and not of another subclass."""
    return set(map(type, tensors)) <= _PLAIN


def of_parameters(parameters: Parameters) -> Listed:
    """List the ``.grad`` of a Tensor, an iterable of Tensors or of ``(name, Tensor)`` pairs, or an
    ``nn.Module``; of a compiled one or a DistributedDataParallel under the names in what it wraps.

    Raises `TypeError` for an entry that is none of these.
    """
    if isinstance(parameters, nn.Module):
        parameters = unwrapped(parameters).named_parameters()
    entries, names = entries_of(parameters, none_allowed=False)
    return Listed([entry.grad for entry in entries], names, entries)


def unwrapped(module: nn.Module) -> nn.Module:
    """What a DistributedDataParallel or ``torch.compile`` wraps, whose parameters have the names of
    the plain model and not "module." or "_orig_mod." before each; any other module as it is."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return unwrapped(module.module)
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # nobody has a compiled one without it
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return unwrapped(module._orig_mod)
    return module


def of_tensors(tensors: Tensors) -> Listed:
    """List tensors that are themselves what is to be measured; None entries are places without."""
    if isinstance(tensors, nn.Module):
        raise TypeError(
            f"tensors must be Tensors, got the module {type(tensors).__name__}; "
            "grad_stats(module).total_norm is the norm of its gradients"
        )
    entries, names = entries_of(tensors, none_allowed=True)
    return Listed(entries, names)


def entries_of(parameters: Any, none_allowed: bool) -> tuple[list[Any], list[str] | None]:
    """The tensors of an iterable (or the Tensor itself), and their names if one of them has one.

    A warning that there are none means the user's line.
    """
    if isinstance(parameters, Tensor):
        return [parameters], None
    try:
        iterator = iter(parameters)
    except TypeError:
        raise TypeError(
            "parameters must be a Tensor, a Module, or an iterable of Tensors or (name, Tensor) "
            f"pairs, got {type(parameters).__name__}"
        ) from None
    entries = list(iterator)
    if not entries and isinstance(parameters, types.GeneratorType):
        warnings.warn(
            "parameters is an exhausted generator: there are no gradients to clip or measure",
            stacklevel=caller.line()[1],
        )
    if all(issubclass(kind, Tensor) for kind in set(map(type, entries))):
        return entries, None
    pairs = [_pair(entry, position, none_allowed) for position, entry in enumerate(entries)]
    named = any(isinstance(entry, tuple) for entry in entries)
    return [tensor for _, tensor in pairs], [name for name, _ in pairs] if named else None


def _pair(entry: object, position: int, none_allowed: bool) -> tuple[str, Tensor | None]:
    name, tensor = str(position), entry
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str):
        name, tensor = entry
    if isinstance(tensor, Tensor) or (tensor is None and none_allowed):
        return name, tensor
    raise TypeError(
        f"entry {position} of parameters must be a Tensor or a (name, Tensor) pair, "
        f"got {_kind(entry)}"
    )


def _kind(entry: object) -> str:
    """What an entry is, and what was meant if that is a usual mistake."""
    if isinstance(entry, tuple):
        return f"a tuple of ({', '.join(type(part).__name__ for part in entry)})"
    if isinstance(entry, str):
        return f"the string {entry!r:.40}; of a dict, pass its items()"
    if isinstance(entry, dict):
        return "a dict; of an optimizer's param_groups, pass each group['params']"
    return f"{type(entry).__name__}"


def whole(tensor: Tensor) -> Tensor:
    """The tensor that a DTensor is a part of; any other as it is. Detached."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach()


@torch.no_grad()
def sort_out(listed: Listed) -> Gradients:
    """Look at every gradient: local, strided, each memory once.

    Raises `TypeError` for a dtype, layout or subclass that has no meaning here and `RuntimeError`
    for memory that overlaps itself. Each names the gradient, and nothing has been changed.
    """
    rows: list[Row] = []
    places: list[int] = []
    objects: set[int] = set()
    memories: set[object] = set()
    for place, (name, grad) in enumerate(zip(listed.labels(), listed.grads, strict=True)):
        if id(grad) in objects:
            continue
        objects.add(id(grad))
        row = _row(name, grad, listed.called(name))
        memory = _memory(row)
        if memory in memories:
            continue
        memories.add(memory)
        rows.append(row)
        places.append(place)
    found = Gradients.of_rows(rows)
    if listed.spread is None:
        return found
    spread = listed.spread
    if spread.refused is not None:
        raise spread.refused
    repeats = zip(places, found.repeats, strict=True)
    return replace(
        found,
        numel=tuple(spread.numel[place] for place in places),
        repeats=tuple(1 if place in spread.partial else number for place, number in repeats),
        spread=spread.of_rows(places),
    )


def _row(name: str, grad: Tensor, what: str) -> Row:
    local = _local(grad, what)
    if local.dtype not in _DTYPES:
        raise TypeError(f"{what} has dtype {local.dtype}; it must be floating point or complex")
    if local.layout == torch.sparse_coo:
        coalesced = local.coalesce()
        pair = None if local.is_coalesced() else (local, coalesced)
        return _strided_row(name, coalesced._values(), what)._replace(sparse=pair)
    if local.layout != torch.strided or local.is_nested or local.is_quantized:
        kind = "nested" if local.is_nested else str(local.layout)
        raise TypeError(f"{what} has layout {kind}; it must be strided or sparse COO")
    return _strided_row(name, local, what)


def _strided_row(name: str, local: Tensor, what: str) -> Row:
    stored = without_expansion(local)
    if overlaps(stored):
        raise RuntimeError(
            f"{what} has elements that share memory (shape {tuple(local.shape)}, strides "
            f"{local.stride()}); rescaling in place would multiply them more than once"
        )
    repeats = local.numel() // stored.numel() if stored.numel() else 1
    return Row(name, local.numel(), stored, repeats, None)


def _local(grad: Tensor, what: str) -> Tensor:
    """The part of a gradient that this process holds, as a plain Tensor on the same memory."""
    if type(grad) in _PLAIN:
        return grad
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(grad, distributed.DTensor):
        return _local(grad.to_local(), what)  # of a mesh of one process
    # A subclass that only adds methods has ordinary memory; one that dispatches may have none.
    if type(grad).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(
            f"{what} is a {type(grad).__name__}, a Tensor subclass that is not supported"
        )
    return grad.as_subclass(Tensor)


def _memory(row: Row) -> object:
    tensor = row.tensor
    if tensor.numel() == 0:
        return object()  # no two empty tensors are the same gradient
    return (
        *(tensor.device, tensor.data_ptr(), tensor.dtype),
        *(tensor.shape, tensor.stride(), row.repeats),
    )
