"""Eviction: keeps what a module's plans hold within a limit of bytes, and forgets the least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

from gpipe_fast.runtime.cache import Cache
from gpipe_fast.runtime.compile import Compiler
from gpipe_fast.runtime.compiled import CompiledStage
from gpipe_fast.runtime.footprint import plan_bytes
from gpipe_fast.runtime.plan import PlannedCall
from gpipe_fast.runtime.segments import Segments

_Key = TypeVar("_Key", bound=tuple[Hashable, ...])  # begins with the signature


class Eviction:
    """The limit on the bytes of one module's plans, with their programs and graphs, and of its templates.

    What a mini-batch between forward and backward still needs stays alive, because the mini-batch refers to
    it; a signature that was evicted is compiled again when it is called again.

    Attributes:
        limit: the limit in bytes, for plans and for templates each. The latest plan is kept even if it alone
            exceeds the limit, and so are the templates of layers with a plan: without them, every further
            size would need a trace.
        num_evicted: the number of signatures evicted so far.
    """

    def __init__(
        self,
        limit: int,
        plans: Cache[_Key, PlannedCall],
        compiled: Cache[Any, list[list[CompiledStage]]],
        compiler: Compiler,
        segments: Sequence[Segments],
    ) -> None:
        self.limit = limit
        self.num_evicted = 0
        self._plans = plans
        self._compiled = compiled
        self._compiler = compiler
        self._segments = segments
        # By signature, the stages of its plans, in order of their creation.
        self._stages: OrderedDict[Hashable, list[CompiledStage]] = OrderedDict()

    def record(self, signature: Hashable, stages: Iterable[CompiledStage]) -> None:
        """Records the compiled stages of a signature's plan."""
        own = self._stages.setdefault(signature, [])
        own.extend(stage for stage in dict.fromkeys(stages) if stage not in own)

    def move(self, before: Hashable, now: Hashable) -> None:
        """Renames a signature."""
        if before in self._stages:
            self._stages[now] = self._stages.pop(before)

    def num_bytes(self) -> int:
        """Returns an estimate of the bytes of all plans, programs and graphs, without the templates."""
        actions = (sum(map(len, plan.schedule.stages)) for _, plan in self._plans.entries())
        return self._compiler.num_bytes() + sum(map(plan_bytes, actions))

    def template_bytes(self) -> int:
        """Returns an estimate of the bytes of the templates."""
        return self._compiler.template_bytes()

    def num_kept(self) -> int:
        """Returns the number of plans that are kept."""
        return len(self._plans)

    def run(self, latest: Hashable) -> None:
        """Forgets the least recently used stages, plans and templates until the rest is within the limit.

        First go stages that belong to no plan, then plans; `latest` is the signature whose plan is kept.
        """
        known = {key[0] for key in self._plans} | self._compiled.keys()
        for signature in [s for s in self._stages if s not in known]:
            del self._stages[signature]
        for forget_oldest in (self._forget_stage, self._forget_plan):
            while self.num_bytes() > self.limit and forget_oldest(latest):
                pass
        while self.template_bytes() > self.limit and self._compiler.forget_oldest_template():
            pass

    def _forget_stage(self, latest: Hashable) -> bool:
        """Forgets the oldest stage without a plan, and plans found at run time, which may hold it."""
        used = {id(stage) for stages in self._stages.values() for stage in stages}
        for stage in self._compiler.cached():
            if id(stage) not in used:
                self._forget([stage])
                for key in [k for k in self._plans if k[0] not in self._stages and k[0] != latest]:
                    self._plans.pop(key, None)
                return True
        return False

    def _forget_plan(self, latest: Hashable) -> bool:
        """Forgets the plans of the least recently used signature."""
        # The last use of a signature is the last use of any of its plans.
        signatures = [*self._compiled, *(key[0] for key in self._plans)]
        order = reversed(dict.fromkeys(reversed(signatures)))
        oldest = next((signature for signature in order if signature != latest), None)
        if oldest is None:
            return False
        self._compiled.pop(oldest, None)
        for key in [key for key in self._plans if key[0] == oldest]:
            self._plans.pop(key, None)
        stages = self._stages.pop(oldest, [])
        used = {id(stage) for others in self._stages.values() for stage in others}
        self._forget([stage for stage in stages if id(stage) not in used])
        self.num_evicted += 1
        return True

    def _forget(self, stages: Sequence[CompiledStage]) -> None:
        self._compiler.forget(stages)
        for segments in self._segments:
            segments.forget({stage.segment_key for stage in stages})
