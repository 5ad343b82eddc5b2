"""Recordings of steps: the objects that ``with model.recording()`` yields."""

from gpipe_fast.runtime.recording import Event, Recording

__all__ = ["Event", "Recording"]
