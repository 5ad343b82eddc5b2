"""Reports about a model and its steps.

Its input is a `GPipe` or a recorded step; its output is a report: a comparison with the plain loop, a
diagnosis of the machine and the model, or a picture. The package may import every other one, and only the
public modules `doctor`, `picture` and `verify` import it.
"""
