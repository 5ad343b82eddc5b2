"""Layer features beyond computation: running statistics, nested values, phase queries.

Its input is the user's layers and the values that pass between them; its output describes their running
statistics and nesting. The package imports nothing of gpipe_fast; `balance`, `trace`,
`runtime` and the packages above these may import it, while `schedule` and `kernels` do without.
"""
