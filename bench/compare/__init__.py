"""gpipe_fast beside other libraries and plain PyTorch, on the CPU."""
