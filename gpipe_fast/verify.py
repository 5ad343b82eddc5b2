"""`verify` compares one step of a `GPipe` with the plain micro-batch loop."""

from gpipe_fast.inspect.verify import Report, Row, verify

__all__ = ["Report", "Row", "verify"]
