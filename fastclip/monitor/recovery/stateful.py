"""What a checkpoint is made of: parts that can say what they are, and become it again. And what
Recovery refuses of what it is given."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from fastclip.monitor.records import Event


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def require_state(state: Mapping[str, Stateful]) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state must be a dict of parts by name, as dict(model=model), got {state!r:.80}"
        )
    for name, each in state.items():
        for method in ("state_dict", "load_state_dict"):
            if isinstance(each, type) or not callable(getattr(each, method, None)):
                raise TypeError(f"state[{name!r}] has no {method}: {each!r:.80}")


def require_events(events: Any) -> list[Event]:
    """Those given, in a list; `TypeError` for anything else."""
    found: list[Any] = [*events] if isinstance(events, Iterable) else [None]
    if not all(isinstance(each, Event) for each in found):
        raise TypeError(
            f"events must be those that Monitor.observe returns, in a list, got {events!r:.80}"
        )
    return found
