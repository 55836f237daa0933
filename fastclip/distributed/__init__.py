"""Gradients that several processes hold, by torch.distributed. Nothing here is imported before a
DTensor over more than one process or a process group is met, or one of these names is used.
"""

TYPE_CHECKING = False

if TYPE_CHECKING:
    from fastclip.distributed.attribution import Attribution as Attribution
    from fastclip.distributed.attribution import attribution_hook as attribution_hook

__all__ = ["Attribution", "attribution_hook"]


if not TYPE_CHECKING:  # a type checker would take __getattr__ to mean that every name exists

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fastclip.distributed import attribution

        return getattr(attribution, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
