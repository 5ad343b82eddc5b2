"""Recordings of steps: the objects that ``with model.recording()`` yields."""

from gpipe_fast.runtime.advice import Advice
from gpipe_fast.runtime.events import Event
from gpipe_fast.runtime.recording import Recording
from gpipe_fast.runtime.report import Report, StageTimes

__all__ = ["Advice", "Event", "Recording", "Report", "StageTimes"]
