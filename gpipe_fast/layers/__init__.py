"""What a layer may do besides computing: skip tensors, keep statistics, nest values, ask for its phase.

The user's layers and the values that pass between them come in; a description of their skip connections,
running statistics and nesting goes out. The package imports nothing of gpipe_fast; `balance`, `trace`,
`runtime` and everything above these may import it, while `schedule` and `kernels` do without.
"""
