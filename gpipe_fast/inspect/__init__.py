"""Reports about a model.

Its input is a `GPipe`; its output is a report: a comparison with the plain loop, or a diagnosis of the
machine and the model. The package may import every other one, and only the public modules `doctor` and
`verify`, and the command, import it.
"""
