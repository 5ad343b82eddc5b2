"""Recordings of steps: the objects that ``with model.recording()`` yields, and reports on them."""

from gpipe_fast.reports.advice import Advice
from gpipe_fast.reports.blame import Gap, Phase
from gpipe_fast.reports.events import Event
from gpipe_fast.reports.memory_report import MemoryChoice, MemoryChoices, MemoryReport
from gpipe_fast.reports.recording import Recording
from gpipe_fast.reports.report import Report, StageMemory, StageTimes
from gpipe_fast.reports.steps import Trial, Tuning
from gpipe_fast.runtime.stage_memory import StageBytes

__all__ = [
    "Advice",
    "Event",
    "Gap",
    "MemoryChoice",
    "MemoryChoices",
    "MemoryReport",
    "Phase",
    "Recording",
    "Report",
    "StageBytes",
    "StageMemory",
    "StageTimes",
    "Trial",
    "Tuning",
]
