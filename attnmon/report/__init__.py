"""A report of one run or two, afterwards: from the event files to one HTML page and its figures as JSON."""

from attnmon.report.data import Alarm, Layer, RunData, Scalars, Section, Series
from attnmon.report.find import ReportError
from attnmon.report.read import read_run
from attnmon.report.write import write_report

__all__ = ["Alarm", "Layer", "ReportError", "RunData", "Scalars", "Section", "Series", "read_run", "write_report"]
