"""The models that the benchmarks train: the papers' models as sequences of layers, and a small MLP."""
