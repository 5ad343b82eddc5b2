"""What other libraries saved.

A state dict of torchgpipe comes in; one with the plain Sequential's keys goes out. It imports nothing of
gpipe_fast; only the container of the layers imports it.
"""
