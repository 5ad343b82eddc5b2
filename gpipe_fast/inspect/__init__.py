"""Reports about a model and its steps.

A `GPipe` or a recorded step comes in; a report goes out: a comparison with the plain loop, a diagnosis of
machine and model, or a picture. The package may import every other one, and only the public modules `doctor`,
`picture` and `verify` import it.
"""
