"""Programs that count, compile or compute instead of measuring: `python -m tools NAME`."""
