"""One batch under the lens: in which precision, and in which module, numbers cease to be finite."""

from fastclip.monitor.batch.faults import NonFiniteOrigin
from fastclip.monitor.batch.origin import find_first_nonfinite
from fastclip.monitor.batch.precisions import PrecisionReport, compare_precisions

__all__ = ["NonFiniteOrigin", "PrecisionReport", "compare_precisions", "find_first_nonfinite"]
