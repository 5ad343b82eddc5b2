"""Stages in different processes: which processes there are, and how they agree on each run.

The input is a process group or device mesh of torch.distributed; the output is the `Ranks` of a pipeline,
which connect its process to those of other stages, and tell whether a run has succeeded in all of them.
Without a pipeline, `torchrun` reports on the processes of torchrun.
"""
