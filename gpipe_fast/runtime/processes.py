"""The processes of a pipeline: one, as here, or several, as `gpipe_fast.distributed.ranks.Ranks`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gpipe_fast.layers.sharded import is_sharded
from gpipe_fast.layers.structure import layer_title
from gpipe_fast.runtime.stage import Stage, Tie

if TYPE_CHECKING:
    from gpipe_fast._extension import Pipeline
    from gpipe_fast.runtime.plan import PlannedCall
    from gpipe_fast.runtime.planner import Call
    from gpipe_fast.runtime.settings import Settings


class Processes:
    """A single process that has all stages; base class of `Ranks`, whose processes wait for each other.

    Attributes:
        is_mesh: whether the user has passed a mesh, maybe of one process.
        index: the number of this process among those of a replica.
        size: the number of processes of a replica.
        replica: which of the replicas, each of which has all stages, this process belongs to.
        num_replicas: the number of replicas.
        rank: the number of this process, replica by replica.
        by_nccl: whether tensors travel between processes by NCCL.
        device: the device of this process's stage, if it is one of several.
    """

    is_mesh = False
    index, size, replica, num_replicas, rank = 0, 1, 0, 1, 0
    by_nccl = False
    device = torch.device("cpu")

    @property
    def has_last_stage(self) -> bool:
        """Whether the last stage is in this process."""
        return self.index == self.size - 1

    def stages_of(self, num_stages: int) -> range:
        """Returns the stages of this process, of all stages of a pipeline. They go round."""
        return range(self.index, num_stages, self.size)

    def check_settings(self, settings: Settings) -> None:
        """Checks that all processes can have these settings.

        Raises:
            ValueError: they cannot.
        """

    def check_balance(self, balance: Sequence[int]) -> None:
        """Checks that all processes have equally many stages, and one if there are replicas.

        Raises:
            ValueError: they do not.
        """

    def check_partitions(self, partitions: Sequence[nn.Module]) -> list[Tie]:
        """Checks that the layers can be in their processes; returns the parameters that several stages have.

        Raises:
            ValueError: they cannot.
        """
        self.check_shards([layer for partition in partitions for layer in partition.children()])
        return []

    def check_shards(self, layers: Sequence[nn.Module]) -> None:
        """Checks that parameters are sharded over processes that run the same stages, or not at all.

        Raises:
            ValueError: they are not.
        """
        for number, layer in enumerate(layers):
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
                if is_sharded(tensor):
                    raise ValueError(
                        f"{layer_title(number, layer)} has the DTensor {name!r}, and the processes that have "
                        "parts of it need to agree on each call; pass GPipe mesh=..., a mesh with the "
                        "dimension 'tp', of which parallelize_module gets mesh['tp'], or 'fsdp', of which "
                        "gpipe_fast.shard gets mesh['fsdp']"
                    )

    def own_group(self, stage: int, name: str) -> str:
        """Returns the name of the process group that a stage's collectives use in place of another group.

        Stages run at the same time. On one group, each process would start the collectives of two stages in
        the order in which its threads get there. Those of one stage are in the order of its actions, which
        all processes have in common. The group is made when the next run begins.

        Args:
            stage: the number of the stage.
            name: the name of the group in the stage's layers.

        Raises:
            ValueError: other processes of the group do not run the same stage.
        """
        raise ValueError(
            f"stage {stage} has a collective of the group {name!r}, and the processes of the group need to "
            "agree on each call; pass GPipe mesh=..., a mesh with the dimension 'tp', whose group layers use"
        )

    def note_homes(self, partitions: Sequence[nn.Module]) -> None:
        """Notes which processes have each parameter, after those of other processes became meta tensors."""

    def compiling(self) -> AbstractContextManager[None]:
        """Lets processes that wait for this one go on waiting while the block runs, however long it takes."""
        return contextlib.nullcontext()

    def reporting(self) -> AbstractContextManager[None]:
        """Reports an error of the block to the other processes, unless that has happened already."""
        return contextlib.nullcontext()

    def begin(
        self,
        pipeline: Pipeline,
        call: Call,
        plan: PlannedCall,
        stages: Sequence[Stage],
        asked: Mapping[str, str],
        seed: int,
    ) -> None:
        """Prepares a run: checks that other processes run the same plan, and connects to them.

        Args:
            pipeline: the pipeline.
            call: the call.
            plan: its plan.
            stages: the stages of the model.
            asked: what else this process and others ask for, by name; a name that one lacks is not compared.
            seed: the seed of the mini-batch, the same in all processes of a replica; 0 if it is not known.

        Raises:
            RuntimeError: another process has another plan, has failed, or does not answer.
        """

    def check_inputs(self, found: Callable[[], str]) -> None:
        """Checks that the processes of a replica, which all read elements of the inputs, find the same.

        Raises:
            RuntimeError: another process has found something else.
        """

    def with_whole(self, parameters: Sequence[Tensor], parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the tensors that programs get for parameters: of those that are gathered, the whole ones.

        Gradients of these are like the parts, and become gradients of the parameters.

        Args:
            parameters: the parameters of all layers.
            parts: those of this process, connected to the parameters in autograd's graph.

        Raises:
            RuntimeError: a process has failed, or does not answer.
        """
        return parts

    def offer_losses(self, losses: Sequence[Tensor]) -> None:
        """Tells the other processes the losses of a run, before they know whether it has succeeded."""

    def losses(self, own: Sequence[Tensor]) -> list[list[Tensor]]:
        """Returns the losses of the latest run, of each replica; only its last stage passes any."""
        return [list(own)]

    def sum_of_counts(self, count: Any) -> Any:
        """Returns the sum of what the last stage of each replica passes, added up in their order.

        Raises:
            RuntimeError: a process has failed, or does not answer.
        """
        return count

    def gather(self, name: str, own: Any) -> list[Any]:
        """Returns what each process of this replica passes, in their order; values that JSON can represent.

        Raises:
            RuntimeError: a process has failed, or does not answer.
        """
        return [own]

    def exchange(self, own: Any) -> list[tuple[Any, Any]]:
        """Returns what each process of this replica passes, in their order, with the offset of its clock.

        Args:
            own: what this process passes: numbers, strings, lists and dicts.

        Raises:
            RuntimeError: another process has failed, runs something else, or does not answer.
        """
        raise NotImplementedError

    def refuse(self, what: str, instead: str) -> None:
        """Refuses what needs all stages in one process.

        Args:
            what: what needs them.
            instead: what the user can do.

        Raises:
            ValueError: there is a mesh.
        """


ONE_PROCESS = Processes()
