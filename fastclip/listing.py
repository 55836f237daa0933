"""The parameters a clipper was given, read again at every step."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from fastclip.gradients import Parameters, entries_of, unwrapped

_PARAMETERS = attrgetter("_parameters")
_MODULES = attrgetter("_modules")


class Listing:
    """An iterable is listed once. Of a module, what it holds is looked at each time: going through
    `named_parameters` takes 390 us for the 148 parameters of GPT-2 small, seeing that they are
    those of the last time 60 us.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._module: nn.Module | None = None
        self._look: _Look | None = None
        self._tensors: list[Tensor] = []
        self._names: Sequence[str] | None = None
        if isinstance(parameters, nn.Module):
            self._module = unwrapped(parameters)
        else:
            self._tensors, names = entries_of(parameters, none_allowed=False)
            self._names = names and tuple(names)

    def read(self) -> tuple[list[Tensor], Sequence[str] | None]:
        """The parameters in order, and their names; None if no entry had a name."""
        if self._module is not None:
            self._read_module(self._module)
        return self._tensors, self._names

    def labels(self) -> list[str]:
        """The names, else the positions."""
        tensors, names = self.read()
        return [str(position) for position in range(len(tensors))] if names is None else [*names]

    def _read_module(self, module: nn.Module) -> None:
        if self._look is not None and self._look.same():
            return
        pairs = list(module.named_parameters())
        self._names = tuple(name for name, _ in pairs)
        self._tensors = [tensor for _, tensor in pairs]
        self._look = _Look(module) if _is_plain(module) else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_look": None}  # it is by identity, which a copy does not share


class _Look:
    """What a tree of modules holds; the references keep each id in use."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = list(root.modules())
        self._dicts, self._values = self._now()
        self._ids = list(map(id, self._values))

    def same(self) -> bool:
        dicts, values = self._now()
        return list(map(id, values)) == self._ids and dicts == self._dicts

    def _now(self) -> tuple[list[tuple[str, ...]], list[object]]:
        """The keys of every dict of parameters and of children, and the values of all."""
        dicts = [*map(_PARAMETERS, self._modules), *map(_MODULES, self._modules)]
        return list(map(tuple, dicts)), list(chain.from_iterable(map(dict.values, dicts)))


def _is_plain(root: nn.Module) -> bool:
    """Whether parameters are where nn.Module keeps them."""
    return all(
        type(module).named_parameters is nn.Module.named_parameters
        and type(module._parameters) is dict
        and type(module._modules) is dict
        for module in root.modules()
    )


def require_distinct(labels: Sequence[str]) -> None:
    """Of a rule whose state is kept by name."""
    twice = [name for name, count in Counter(labels).items() if count > 1]
    if twice:
        raise ValueError(
            f"the name {twice[0]!r} comes more than once in parameters, and this rule remembers "
            "tensors by their names"
        )
