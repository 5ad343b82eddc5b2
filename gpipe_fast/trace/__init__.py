"""A stage to a graph.

The layers of a stage and the shapes that reach them come in; a joint forward-and-backward ATen graph
(`Joint`) goes out, or the reason why the stage cannot be traced faithfully (`Untraceable`). It imports
`layers` and `randomness`; `lower` and `runtime` import it. `aot` and `fake` are the only files that call
PyTorch's private tracing API.
"""
