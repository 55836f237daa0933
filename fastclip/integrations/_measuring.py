"""The norm that a Trainer measures by itself, measured by fastclip."""

import weakref

from fastclip.integrations.torch import patch
from fastclip.monitor.recovery.telling import warn


class Measuring:
    """torch's functions that clip are fastclip's from `begin` to `end`, or until this goes away.

    Measuring, as a Trainer does, is clipping to infinity. torch's function then multiplies every
    gradient by 1, and by NaN as soon as one element is NaN or infinite; fastclip's writes none.
    """

    def __init__(self) -> None:
        self._undo: weakref.finalize[..., object] | None = None
        self._told = False

    def begin(self) -> None:
        """Where somebody else has replaced torch's functions they stay, after one warning."""
        self.end()
        try:
            self._undo = weakref.finalize(self, patch().undo)
        except RuntimeError as error:
            self._tell(error)

    def end(self) -> None:
        """Without a `begin` it does nothing."""
        undo, self._undo = self._undo, None
        if undo is None:
            return
        try:
            undo()
        except RuntimeError as error:
            self._tell(error)

    def _tell(self, error: RuntimeError) -> None:
        if not self._told:
            self._told = True
            warn(
                f"{error}. So the norm that the Trainer measures by itself may be torch's, which "
                "makes all gradients NaN as soon as one element is NaN or infinite"
            )
