"""Reports on a pipeline: `doctor` and its self-test, `verify`, `explain`, and where the time of a step goes.

Their input is a pipeline, a call of it or the events of a recorded step. `GPipe` has some as methods, so no
report imports it; the public modules `doctor`, `verify`, `explanation` and `recording` show them.
"""
