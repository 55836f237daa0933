"""How often a watch measures."""


def whole_every(every: int) -> int:
    """`every` if that is a number of steps, else `ValueError`."""
    if type(every) is not int or every < 1:
        raise ValueError(f"every must be a whole number of at least 1, got {every!r:.80}")
    return every
