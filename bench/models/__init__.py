"""The models that the benchmarks train: those of the papers, as sequences of layers, and a small one."""
