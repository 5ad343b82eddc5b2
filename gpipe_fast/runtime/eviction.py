"""Eviction: keeps what a module's plans hold within a limit of bytes, and forgets the least recently used."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpipe_fast.runtime.cache import Cache
from gpipe_fast.runtime.compile import Compiler
from gpipe_fast.runtime.compiled import CompiledStage, SegmentKey
from gpipe_fast.runtime.plan import PlannedCall

if TYPE_CHECKING:
    from gpipe_fast.runtime.planner import Planner


@dataclass
class KnownPlans:
    """The plans of one signature and checkpoint mode.

    Attributes:
        segment_keys: the keys of the compiled stages.
        by_layouts: the plans, by the latest layouts of the gradients that arrive at these stages.
    """

    segment_keys: Sequence[SegmentKey]
    by_layouts: Cache[Hashable, PlannedCall]

    def stages(self) -> set[CompiledStage]:
        """Returns the compiled stages of all plans."""
        return {stage for _, plan in self.by_layouts.entries() for stage in plan.compiled_stages()}


class Eviction:
    """The limit on the bytes of one module's plans, with their programs and graphs, and of its templates.

    What a mini-batch between forward and backward still needs stays alive, because the mini-batch refers to
    it; a plan that was evicted is made again when its signature is called again.

    Attributes:
        limit: the limit in bytes, for plans and for templates each. The latest plan is kept even if it alone
            exceeds the limit, and so are the templates of layers with a plan: without them, every further
            size would need a trace.
        num_evicted: the number of signatures evicted so far.
    """

    def __init__(self, limit: int, compiler: Compiler) -> None:
        self.limit = limit
        self.num_evicted = 0
        self._num_uncounted = 0  # the plans since bytes were counted
        self._compiler = compiler
        self._refs: list[weakref.ref[Planner]] = []  # in the order in which they were made

    def add(self, planner: Planner) -> None:
        """Counts what another planner of the compiler keeps, too, as long as the planner exists."""
        self._refs = [each for each in self._refs if each() is not None] + [weakref.ref(planner)]

    def num_bytes(self) -> int:
        """Returns an estimate of the bytes of all plans, programs and graphs, without the templates."""
        return self._compiler.num_bytes() + sum(plan.num_bytes for plan in self.plans())

    def run(self, latest: PlannedCall | None) -> None:
        """Forgets the least recently used stages, plans and templates until the rest is within the limit.

        First go stages that belong to no plan, then plans other than the latest. To count takes time for each
        plan that is kept. So of many plans, bytes are counted once for each sixteenth of them.

        Args:
            latest: the plan to keep.
        """
        self._num_uncounted += 1
        if 16 * self._num_uncounted < sum(len(planner.plans) for planner in self._planners()):
            return
        self._num_uncounted = 0
        while self.num_bytes() > self.limit and (self._forget_stage(latest) or self._forget_plan(latest)):
            pass
        while self._compiler.template_bytes() > self.limit and self._compiler.forget_oldest_template():
            pass

    def _forget_stage(self, latest: PlannedCall | None) -> bool:
        """Forgets the oldest stage without a plan, and plans found at run time, which may hold it.

        Returns:
            Whether there was one.
        """
        used = self._used()
        for stage in self._compiler.cached():
            if stage not in used:
                self._forget([stage])
                for plans, key, known in self._known():
                    if not known.segment_keys and not _has(known, latest):
                        plans.pop(key, None)
                return True
        return False

    def _forget_plan(self, latest: PlannedCall | None) -> bool:
        """Forgets the least recently used plans, those of one signature; returns whether there were any."""
        for plans, key, known in self._known():
            if not _has(known, latest):
                plans.pop(key, None)
                self._forget(list(known.stages() - self._used()))
                self.num_evicted += 1
                return True
        return False

    def _used(self) -> set[CompiledStage]:
        return {stage for plan in self.plans() for stage in plan.compiled_stages()}

    def plans(self) -> list[PlannedCall]:
        """Returns the plans that are kept."""
        return [plan for *_, known in self._known() for _, plan in known.by_layouts.entries()]

    def _planners(self) -> list[Planner]:
        return [planner for each in self._refs if (planner := each()) is not None]

    def _known(self) -> list[tuple[Cache[Any, KnownPlans], Any, KnownPlans]]:
        """Returns the plans of each signature, with the cache and the key of each."""
        return [(each.plans, key, known) for each in self._planners() for key, known in each.plans.entries()]

    def _forget(self, stages: Sequence[CompiledStage]) -> None:
        self._compiler.forget(stages)
        for segments in (each for planner in self._planners() for each in planner.segments):
            segments.forget({stage.segment_key for stage in stages})


def _has(known: KnownPlans, plan: PlannedCall | None) -> bool:
    return any(each is plan for _, each in known.by_layouts.entries())
