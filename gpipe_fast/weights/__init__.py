"""Loading of weights into layers that were built on the meta device, one tensor at a time.

Its input is a state dict, or a file that contains one; its output is layers with data on the devices of their
stages. The package imports `layers`, and only packages above it import it.
"""
