"""The report: a log, or two, as one HTML page that needs nothing from elsewhere.

`Run` takes in records in one pass and bounded memory, `page` makes the document of it. Figures are
plain dictionaries as plotly has them, and only its script is taken from its package, which the page
carries compressed. Needs no torch.
"""

from fastclip.monitor.report.page import page, plotly_source
from fastclip.monitor.report.run import Run

__all__ = ["Run", "page", "plotly_source"]
