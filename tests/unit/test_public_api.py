"""The public API as a table of names and signatures, which every change of the API must update."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from types import FunctionType

import pytest
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.runtime.settings import Setting
from tests.programs import run_python

API = """
gpipe_fast
  class GPipe(module, balance=None, *others, devices=None, chunks=1, batch_dim=0, checkpoint='except_last',
      memory=None, deferred_batch_norm=False, grad_dtype=None, backend='auto', capture='auto',
      transport='auto', fuse=None, schedule='gpipe', mesh=None, timeout=60.0)
    properties: partitions
    properties that may be set: backend, balance, batch_dim, capture, checkpoint, chunks, devices, fuse,
        grad_dtype, memory_limit, schedule, threads_per_stage, transport
    append(module)
    cpu()
    cuda(device=None)
    evaluate(*args, target=None, loss_fn, normalizer=None, loss='exact', losses=None, return_outputs=False,
        **kwargs)
    explain(*args, device=None, **kwargs)
    extend(sequential)
    extra_repr()
    forward(*args, **kwargs)
    from_model(model, args=(), kwargs=None, *, blocks=None, balance=None, devices=None, chunks=1,
        checkpoint='except_last', memory=None, loss='exact', grad_dtype=None, backend='auto', capture='auto',
        transport='auto', fuse=None, schedule='gpipe', mesh=None, timeout=60.0)
    insert(index, module)
    load_state_dict(state_dict, strict=True, assign=False)
    load_weights(source, *, strict=True, init=None)
    memory(*args, target=None, loss_fn=None, normalizer=None, optimizer=None, device=None,
        **kwargs)
    pop(key=-1)
    prepare(*args, also=(), **kwargs)
    recording()
    report(*args, target=None, loss_fn=None, normalizer=None, check=False, **kwargs)
    state_dict(*args, prefix='', **kwargs)
    step(*args, target=None, loss_fn, normalizer=None, loss='exact', losses=None, return_outputs=False,
        optimizer=None, scaler=None, max_norm=None, **kwargs)
    stream(batches, *, depth=None)
    to(*args, **kwargs)
  build_info(...)
  built_with_cuda(...)
  doctor(model=None)
  is_checkpointing()
  is_recomputing()
  keyed_rng(module, key=None)
  replicate(value)
  shard(layers, mesh)
  simulate(schedule='gpipe', num_stages=1, num_microbatches=1, *, forward=1.0, backward=2.0, weights=None,
      recompute=None, checkpoint='except_last', transfer=0.0, latency=0.0, bandwidth=inf, boundary_bytes=0.0,
      activation_bytes=0.0, num_devices=1)
  tune(model, *args, target=None, loss_fn=None, normalizer=None, seconds=60.0, progress=None, memory=None,
      **kwargs)
  verify(model, *args, loss_fn=None, chunks=None, all=False, **kwargs)
gpipe_fast.skip
  class Namespace()
  class pop(name)
  skippable(stash=(), pop=())
  class stash(name, tensor)
  verify_skippables(module)
gpipe_fast.balance
  class LayerProfile(index, name, kind, forward_seconds, backward_seconds, flops, parameter_bytes,
      activation_bytes, boundary_bytes, threads=0)
  balance_by_cost(partitions, costs, objective='max')
  balance_by_size(partitions, module, input, *, chunks=1, param_scale=2.0, device=None)
  balance_by_time(partitions, module, sample, *, timeout=1.0, device=None)
  profile_layers(module, sample, *, device=None, timeout=1.0, chunks=1, threads=None, progress=None)
  table(profiles)
gpipe_fast.profile
  LayerProfile, as in gpipe_fast.balance
  profile_layers, as in gpipe_fast.balance
  table, as in gpipe_fast.balance
gpipe_fast.recording
  class Advice(what, settings, predicted, measured=None, of_a_new=False)
    properties: code
  class Event(action, is_wait, begin, end, run=0, boundary_bytes=0, saved_bytes=0, scratch_bytes=0,
      transit=0.0)
  class Gap(rank, begin, end, seconds)
  class MemoryChoice(settings, seconds, bytes)
    properties: code
  class MemoryChoices(choices)
    properties: code; to_dict()
  class MemoryReport(stages, optimizer, devices, unknown=())
    properties: totals; to_dict()
  class Phase(schedule, events, waits, python=(), undisturbed=mappingproxy({}))
    properties: window; interpreted(stage=None); replay(faster=mappingproxy({})); seconds(); transit(send)
  class Recording()
    properties: has_backward, latest; bubble(); critical_path(); phases(); report(); seconds(); span()
  class Report(phases, step, between, stages, recompute, blame, critical_path, path_seconds, busy_bound,
      gaps, memory=(), advice=(), spread=(), python=(), withheld=(), others='', clock_error=0.0)
    properties: bubble, bubble_of_equal_stages, num_microbatches, num_ranks; headline(); of(phases, sizes=(),
        clock_error=0.0); save(path, *, title=''); tables(); timeline(); to_dict()
  class StageBytes(parameters, buffers, gradients, boundary, saved, intermediates, under_way, waiting)
    properties: total
  class StageMemory(parameters, gradients, boundary, saved, scratch)
    properties: activations
  class StageTimes(busy, copying, waiting, idle)
  class Trial(settings, predicted, measured, failure='')
  class Tuning(trials, settings, before, after, is_complete)
    properties: code; to_dict()
gpipe_fast.explanation
  class Explanation(device, settings, notes, stages)
    to_dict()
  class FusedGroup(operators, kernels, layers, saved_bytes)
  class LeftGroup(operator, count, layers, bytes, reason)
  class ProgramExplanation(direction, microbatches, bytes_before, bytes_after, launches_before,
      launches_after, fused, left)
  class StageExplanation(index, layers, first_layer, device, note, programs)
gpipe_fast.schedule
  class Action(stage, kind, microbatch)
    parse(text)
  BACKWARD: tuple
  enum Kind: F, R, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B
  SCHEDULES: dict
  class Schedule(ranks, num_microbatches, slots)
    properties: defers_weights; backward_part(); critical_path(seconds=tick); csv(); forward_part();
        from_csv(text); of(ranks, num_microbatches=None, *, slots=None, recomputed=None); order();
        order_around(stage, early, late=_none); parse(text, *, slots=None); slots_needed(seconds=tick);
        times(seconds=tick, transit=_no_time); waits(); with_fewer_slots(slots)
  ScheduleChoice: UnionType
  class Simulation(schedule, begins, ends, peak_bytes=())
    properties: bubble; of(schedule, seconds=tick, transit=None); to_dict()
  TRANSFERS: tuple
  bubble(num_stages, num_microbatches)
  fill_drain(num_stages, num_microbatches, *, slots=None, backward=True, recomputed=None)
  interleaved(num_stages, num_microbatches, *, num_ranks=None, recomputed=None)
  one_f_one_b(num_stages, num_microbatches, *, recomputed=None)
  schedule_for(choice, num_stages, num_microbatches, *, num_devices=1, recomputed=None)
  simulate, as in gpipe_fast
  zb_h1(num_stages, num_microbatches, *, recomputed=None)
gpipe_fast.verify
  class Report(rows, num_microbatches, show_all=False)
    properties: headline, ok; table(*, all=None)
  class Row(name, equal, difference=0.0, relative=0.0, note='')
  class SwitchReports(all_on, by_switch)
    properties: causes
  find_switch(model, *args, loss_fn=None, also=(), **kwargs)
  verify, as in gpipe_fast
gpipe_fast.switches
  disabled(*names)
gpipe_fast.doctor
  class Case(model, transport, checkpoint, ok, result)
  class Checkup(machine, stages, cases, seconds)
    properties: headline, ok
  check(devices=None, show=None)
  doctor, as in gpipe_fast
gpipe_fast.kernels
  cross_entropy(logits, target, *, ignore_index=-100, label_smoothing=0.0, reduction='mean', inplace=False)
  linear_cross_entropy(x, weight, target, bias=None, *, ignore_index=-100, label_smoothing=0.0,
      reduction='mean', chunk_rows=None)
"""

MODULES = re.findall(r"^gpipe_fast\S*$", API, re.MULTILINE)


def signature(function: object) -> str:
    """Returns the names and defaults of parameters; mypy checks their types."""
    try:
        found = inspect.signature(function)  # type: ignore[arg-type]
    except ValueError:  # the extension's functions have no signature
        return "(...)"
    parameters = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    text = str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", text).replace("(self, ", "(").replace("(self)", "()")


def members(cls: type) -> Iterator[str]:
    """Yields properties and public methods, including those inherited from classes of this package."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("gpipe_fast")]
    names = sorted({name for base in own for name in vars(base) if not name.startswith("_")})
    found = {name: inspect.getattr_static(cls, name) for name in names}
    properties = {name: member.fset is None for name, member in found.items() if isinstance(member, property)}
    properties |= {name: False for name, member in found.items() if isinstance(member, Setting)}
    properties = dict(sorted(properties.items()))
    for is_fixed, kind in ((True, "properties"), (False, "properties that may be set")):
        if is_fixed in properties.values():
            yield f"{kind}: {', '.join(name for name in properties if properties[name] is is_fixed)}"
    for name, member in found.items():
        if isinstance(member, (classmethod, staticmethod, FunctionType)):
            yield f"{name}{signature(getattr(cls, name))}"


def describe(name: str, value: object) -> str:
    if isinstance(value, enum.EnumMeta):
        return f"enum {name}: {', '.join(value.__members__)}"
    if isinstance(value, type):
        return "\n    ".join([f"class {name}{signature(value)}", *members(value)])
    return f"{name}{signature(value)}" if callable(value) else f"{name}: {type(value).__name__}"


def public_api() -> str:
    lines, seen = [], {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        lines.append(module_name)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            is_seen = seen.setdefault(id(value), module_name) != module_name
            lines.append(f"  {name}, as in {seen[id(value)]}" if is_seen else f"  {describe(name, value)}")
    return "\n".join(lines)


def test_the_public_api_equals_the_table() -> None:
    """In the table, members are separated by semicolons or on lines of their own, which may be continued."""
    expected = re.split(r"; |\n", re.sub(r"\n {6,}", " ", API.strip()))
    assert [line.strip() for line in public_api().split("\n")] == [line.strip() for line in expected]


def test_a_pipeline_has_only_the_listed_public_attributes() -> None:
    """Properties and methods are listed in the table above."""
    own = vars(GPipe(nn.Sequential(nn.ReLU()), [1])).keys() - vars(nn.Module()).keys()
    assert [name for name in own if not name.startswith("_")] == []


@pytest.mark.smoke
def test_importing_a_module_does_not_shadow_the_function_of_its_name() -> None:
    """Runs in a process that has imported nothing but gpipe_fast."""
    program = f"""
import importlib, gpipe_fast
before = dict(vars(gpipe_fast))
for module in {[name for name in MODULES if not name.endswith("kernels")]}:
    importlib.import_module(module)
assert all(vars(gpipe_fast)[name] is value for name, value in before.items())
assert gpipe_fast.doctor().startswith("versions"), gpipe_fast.doctor
gpipe_fast.balance, gpipe_fast.profile.table, gpipe_fast.recording, gpipe_fast.skip
"""
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
