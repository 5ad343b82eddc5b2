"""PyTorch's private parts: what it does not document, and may change in any release.

No other package imports a private name of PyTorch, which `tests/unit/torch_private/test_uses.py` checks. A
file re-exports the names of one area, and holds the functions that patch PyTorch or read its objects. The
first lines of a file say in which versions of PyTorch its names were read. The package imports PyTorch alone.
"""
