"""Layer features beyond computation: running statistics, nested values, phase queries.

Its input is the user's layers and the values that pass between them; its output describes their running
statistics and nesting.
"""
