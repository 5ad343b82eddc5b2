"""Reports about a model and its steps.

A `GPipe` or a recorded step comes in; a report goes out: a comparison with the plain loop, a diagnosis of
machine and model, a picture. It may import everything, and nothing imports it but the public names of the
package.
"""
