"""A stage to a graph.

The layers of a stage and a description of the tensors that reach them come in; a joint forward-and-backward
ATen graph (`Joint`) goes out, or the reason why the stage cannot be traced faithfully (`Untraceable`). The
package imports `layers` and `randomness`; only `lower` and `runtime` import it. `aot` and `fake` call
PyTorch's private tracing API, and `symbolic` uses its fake tensors; no other file does.
"""
