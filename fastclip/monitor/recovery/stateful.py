"""What a checkpoint is made of: parts that can say what they are, and become it again."""

from collections.abc import Mapping
from typing import Any, Protocol


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
