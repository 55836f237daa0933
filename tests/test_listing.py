"""What a clipper was given is read again at every step."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fastclip.listing import Listing


def model() -> Any:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)))


def replaces(m: Any) -> None:
    m[0].weight = nn.Parameter(torch.ones(3, 2))


def moves(m: Any) -> None:
    """The same parameters in the same order, one of them in the next module."""
    m[1][0].bias, m[1][1].weight, m[1][1].bias = None, m[1][0].bias, m[1][1].weight


def renames(m: Any) -> None:
    m[0]._parameters = {("w" if k == "weight" else k): v for k, v in m[0]._parameters.items()}


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda m: None,
    "frozen": lambda m: m[0].requires_grad_(False),
    "replaced": replaces,
    "moved": moves,
    "renamed": renames,
    "removed": lambda m: delattr(m[0], "bias"),
    "set-to-none": lambda m: setattr(m[0], "bias", None),
    "added": lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(()))),
    "module-added": lambda m: m[1].append(nn.Linear(2, 2)),
    "module-removed": lambda m: m[1].pop(0),
    "module-replaced": lambda m: setattr(m, "0", nn.Linear(2, 3)),
    "tied": lambda m: setattr(m[1][1], "bias", m[1][0].bias),
    "loaded": lambda m: m.load_state_dict(model().state_dict(), assign=True),
    "converted": lambda m: m.double(),
}


def same(listing: Listing, module: nn.Module) -> bool:
    tensors, names = listing.read()
    pairs = list(module.named_parameters())
    assert names is not None
    return list(names) == [name for name, _ in pairs] and all(
        a is b for a, (_, b) in zip(tensors, pairs, strict=True)
    )


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_a_module_is_seen(change: Callable[[Any], object]) -> None:
    module = model()
    listing = Listing(module)
    assert same(listing, module)
    change(module)
    assert same(listing, module)


def test_an_unchanged_module_is_not_gone_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = model()
    listing = Listing(module)
    listing.read()
    monkeypatch.setattr(nn.Module, "named_parameters", None)
    tensors, _ = listing.read()
    assert len(tensors) == 6


class Renaming(nn.Linear):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return ((f"my.{name}", tensor) for name, tensor in super().named_parameters())


def test_a_module_may_name_its_parameters_itself() -> None:
    module = Renaming(2, 2)
    listing = Listing(module)
    assert listing.labels() == ["my.weight", "my.bias"]
    module.weight = nn.Parameter(torch.ones(2, 2))
    assert listing.read()[0][0] is module.weight


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_follows_its_own_module(again: Callable[[Any], Any]) -> None:
    module = model()
    listing = Listing(module)
    listing.read()
    module, listing = again((module, listing))
    assert same(listing, module)
    replaces(module)
    assert same(listing, module)


def test_an_iterable_is_listed_once() -> None:
    given = [torch.ones(1)]
    listing = Listing(given)
    given.append(torch.ones(1))
    assert listing.read()[0] == given[:1]
    assert listing.read()[1] is None
    assert listing.labels() == ["0"]


def test_generators_and_pairs_can_be_read_again() -> None:
    tensors = {"a": torch.ones(1), "b": torch.ones(1)}
    of_pairs, of_generator = Listing(tensors.items()), Listing(t for t in tensors.values())
    for _ in range(2):
        assert of_pairs.labels() == ["a", "b"]
        assert of_generator.labels() == ["0", "1"]
        for listing in (of_pairs, of_generator):
            assert list(map(id, listing.read()[0])) == list(map(id, tensors.values()))


def test_wrong_parameters_are_refused_at_once() -> None:
    wrong: Any = [torch.ones(1), "weight"]
    with pytest.raises(TypeError, match="entry 1 of parameters must be a Tensor"):
        Listing(wrong)
    wrong = 3
    with pytest.raises(TypeError, match="got int"):
        Listing(wrong)
