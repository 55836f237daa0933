"""What cannot be part of a compiled graph; imported where torch.compile traces, as torch._dynamo is
a second of import."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(  # type: ignore[untyped-decorator]  # torch does not annotate it
    reason="GradClipper counts and decides on the host: call it outside of what is compiled, or "
    "compile fastclip.clip_grad_norm_ instead"
)
def call(method: Callable[..., Any], *arguments: object) -> Any:
    """Call it as ever: the graph ends before, which is an error for ``fullgraph=True``."""
    return method(*arguments)
