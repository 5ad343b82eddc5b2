"""Verification: compares one step of a `GPipe` with the plain micro-batch loop, bit for bit."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from gpipe_fast import switches
from gpipe_fast.arguments import check_inputs
from gpipe_fast.container import runner_of
from gpipe_fast.devices import devices_differ, moved
from gpipe_fast.layers.batchnorm import statistics_names
from gpipe_fast.layers.structure import ONE_TENSOR, Inputs, call_unpacked, flatten, stage_threads
from gpipe_fast.randomness.random import keyed_rng
from gpipe_fast.reports.reporting import Reporting
from gpipe_fast.reports.tables import Table
from gpipe_fast.runtime.stage import TRACING_LOCK, exact_autocast
from gpipe_fast.skip import Key, declared, skip_scope
from gpipe_fast.user_warning import no_warnings_of_idle_stages

if TYPE_CHECKING:
    from gpipe_fast.gpipe import GPipe

_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Row:
    """The comparison of one tensor.

    Attributes:
        name: ``output``, ``loss``, ``gradient of 0.weight``, ``buffer 1.running_mean`` and so on.
        equal: whether all bits are equal, where all NaN count as the same.
        difference: the largest absolute difference; infinite if the tensors cannot be subtracted.
        relative: ``difference`` divided by the largest magnitude in the plain loop's tensor.
        note: a difference in presence, dtype or shape, or the reason for a difference; may be empty.
    """

    name: str
    equal: bool
    difference: float = 0.0
    relative: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Report:
    """The result of `verify`: true if all tensors are equal; its string is a table of the others.

    Attributes:
        rows: outputs, loss, gradients and buffers, in this order.
        num_microbatches: the number of micro-batches of the compared step.
        show_all: whether the table includes equal tensors.
    """

    rows: tuple[Row, ...]
    num_microbatches: int
    show_all: bool = False

    @property
    def ok(self) -> bool:
        """Whether all tensors are equal, bit for bit."""
        return all(row.equal for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def headline(self) -> str:
        """The result in one line."""
        if self.ok:
            return f"equal bit for bit to the plain loop: {len(self.rows)} tensors"
        unequal = sum(not row.equal for row in self.rows)
        return f"{unequal} of {len(self.rows)} tensors differ from the plain loop's"

    def __str__(self) -> str:
        """Returns the headline, then the table if a tensor differs or if `show_all` is set."""
        return self.headline if self.ok and not self.show_all else f"{self.headline}\n\n{self.table()}"

    def table(self, *, all: bool | None = None) -> str:
        """Returns a table with a row for every tensor that differs.

        Args:
            all: whether to include equal tensors; by default as passed to `verify`.
        """
        shown = [row for row in self.rows if not row.equal or (self.show_all if all is None else all)]
        cells = [
            [r.name, "yes" if r.equal else "NO", f"{r.difference:.3g}", f"{r.relative:.3g}", r.note]
            for r in shown
        ]
        headers = ["tensor", "equal", "largest difference", "relative", "note"]
        return Table("", headers, cells, ["equal", "note"]).text()


def verify(
    model: Any,
    *args: Any,
    loss_fn: Callable[[Any], Tensor] | None = None,
    chunks: int | Literal["auto"] | None = None,
    all: bool = False,
    **kwargs: Any,
) -> Report:
    """Compares one step of ``model`` with one step of the plain micro-batch loop over the same layers.

    Both steps start from the same parameters, buffers and random state, in the current train or eval mode and
    autocast settings, with as many intra-op threads as a stage has. Parameters, buffers, gradients and the
    random state are restored afterwards, also after an error. The running statistics of deferred batch norm
    are not compared, since the plain loop does not compute them::

        report = gpipe_fast.verify(model, x, lambda y: F.cross_entropy(y, labels))
        assert report, report
        print(gpipe_fast.verify(model, tokens, mask=mask, loss_fn=loss_fn, all=True))

    Args:
        model: the pipeline to verify; or a model of ``GPipe.from_model``, compared with the plain model.
        args: the positional arguments of ``model``; gradients of tensors that require one are compared, too.
            The last one may be ``loss_fn``.
        loss_fn: a function from the output of ``model`` to a tensor with one element. It is called twice,
            with equal random states.
        chunks: the number of micro-batches, or 'auto'; by default ``model.chunks``.
        all: whether the printed report includes equal tensors.
        kwargs: the keyword arguments of ``model``. Pass arguments named ``model``, ``loss_fn``, ``chunks`` or
            ``all`` by position.

    Returns:
        A report that is true if all tensors are equal; ``print`` shows those that differ.

    Raises:
        TypeError: ``model`` is not a `GPipe` or does not accept the arguments, ``loss_fn`` is missing, or the
            loss is not a tensor.
        ValueError: the mini-batch cannot be split, the loss has several elements or requires no gradient, or
            a lazy module is uninitialized; run a batch through the plain layers first.
        RuntimeError: ``model`` cannot be traced and has ``backend='aten'``.
    """
    is_sequence = isinstance(model, Reporting)
    pipeline: Any = model if is_sequence else getattr(model, "pipeline", None)
    if not isinstance(pipeline, Reporting) or not (is_sequence or hasattr(model, "plain_loop")):
        raise TypeError(
            f"verify compares a GPipe with its plain loop, got {type(model).__name__}; wrap it, "
            "GPipe(nn.Sequential(...))"
        )
    args, loss_fn = _separate_loss(args, loss_fn)
    if not args and kwargs.keys() == {"input"}:  # GPipe.forward() does the same
        args, kwargs = (kwargs["input"],), {}
    inputs = Inputs.of(args, kwargs, model.batch_dim if is_sequence else 0)
    if is_sequence:
        check_inputs(inputs, model.devices)
    with contextlib.ExitStack() as stack:
        num_microbatches = stack.enter_context(_fixed_settings(model, pipeline, inputs.batch_size, chunks))
        ours = run_step(model, model, inputs, loss_fn)
        plain = _loop(model, inputs, num_microbatches) if is_sequence else model.plain_loop
        expected = run_step(model, plain, inputs, loss_fn)
    defers = runner_of(pipeline).settings.deferred_batch_norm
    not_compared = {f"buffer {name}" for name in statistics_names(model)} if defers else set()
    names = [name for name in {**expected, **ours} if name not in not_compared]
    rows = [_row(name, ours.get(name), expected.get(name)) for name in names]
    tied = {f"gradient of {name}": stages for name, stages in _tied_parameters(model, pipeline).items()}
    rows = [row if row.equal or row.name not in tied else _explain_tied(row, tied[row.name]) for row in rows]
    return Report(tuple(rows), num_microbatches, all)


def _separate_loss(
    args: tuple[Any, ...], loss_fn: Callable[[Any], Tensor] | None
) -> tuple[tuple[Any, ...], Callable[[Any], Tensor]]:
    """Returns the model's arguments and the loss function, which may be the last positional argument."""
    if loss_fn is None and args and callable(args[-1]):
        return args[:-1], args[-1]
    if callable(loss_fn):
        return args, loss_fn
    received = loss_fn if loss_fn is not None or not args else args[-1]
    raise TypeError(
        f"loss_fn must be a function from the output to the loss, got {type(received).__name__}; pass it as "
        "the last argument or as loss_fn=..."
    )


def _tied_parameters(model: nn.Module, pipeline: Any) -> dict[str, list[int]]:
    """Returns the parameters that several stages share: the indices of these stages by parameter name."""
    stages: dict[Tensor, list[int]] = {}
    for stage, partition in enumerate(pipeline.partitions):
        for parameter in partition.parameters():
            stages.setdefault(parameter, []).append(stage)
    return {name: stages[p] for name, p in model.named_parameters() if len(stages.get(p, ())) > 1}


def _explain_tied(row: Row, stages: list[int]) -> Row:
    why = (
        f"shared by stages {', '.join(map(str, stages))}: its gradient is summed within each stage first, so "
        "the last bits may differ"
    )
    return replace(row, note=f"{row.note}; {why}" if row.note else why)


@contextlib.contextmanager
def _fixed_settings(
    model: Any, pipeline: Any, batch: int, chunks: int | Literal["auto"] | None
) -> Iterator[int]:
    """Fixes all settings that affect bits, for a block; yields the number of micro-batches."""
    before = model.chunks, model.threads_per_stage, torch.get_num_threads()
    cached = torch.is_autocast_cache_enabled()
    try:
        model.chunks = pipeline.chunks = model.chunks if chunks is None else chunks
        model.threads_per_stage = stage_threads(before[1], len(pipeline.balance))
        torch.set_num_threads(model.threads_per_stage)
        # A weight in autocast's cache would accumulate the gradients of several micro-batches.
        torch.set_autocast_cache_enabled(False)
        with torch.inference_mode(False), no_warnings_of_idle_stages():  # also enables gradients
            yield len(torch.empty(batch).chunk(runner_of(pipeline).chunks_of(batch)))
    finally:
        torch.set_autocast_cache_enabled(cached)
        model.chunks, model.threads_per_stage, _ = before
        torch.set_num_threads(before[2])


def _loop(model: GPipe, inputs: Inputs, num_microbatches: int) -> Callable[..., Any]:
    """Returns the plain micro-batch loop: the pipeline's random keys, each layer on its stage's device."""
    plain = nn.Sequential(OrderedDict(model.named_children()))
    stages = zip(model.devices, model.balance, strict=True)
    devices = [device for device, size in stages for _ in range(size)]

    def run(*args: Any, **kwargs: Any) -> Any:
        parts = inputs.dims.split(Inputs.of(args, kwargs, model.batch_dim).tensors, num_microbatches)
        with keyed_rng(plain):
            outputs = [flatten(_run_layers(plain, devices, inputs.structure.build(part))) for part in parts]
        columns = zip(*(tensors for tensors, _ in outputs), strict=True)
        return outputs[0][1].build([torch.cat(column, inputs.dims.outputs) for column in columns])

    return run


def _run_layers(layers: nn.Sequential, devices: Sequence[torch.device], value: Any) -> Any:
    """Runs the layers on one micro-batch; moves its tensors, and skip tensors, to each layer's device."""
    stashed_so_far: dict[Key, Tensor | None] = {}
    for layer, before, device in zip(layers, [devices[0], *devices], devices, strict=False):
        value = _to_device(value, device) if device != before else value
        popped = {key: stashed_so_far.pop(key) for key in declared(layer)[1] if key in stashed_so_far}
        skips_on_device = {key: None if x is None else moved(x, device) for key, x in popped.items()}
        with skip_scope(skips_on_device) as stashed:
            value = call_unpacked(_on_device(layer, device), value)
        stashed_so_far |= stashed
    return value


def _to_device(value: Any, device: torch.device) -> Any:
    tensors, structure = flatten(value, deduplicate=True)
    return structure.build([moved(tensor, device) for tensor in tensors])


def _on_device(layer: nn.Module, device: torch.device) -> Callable[..., Any]:
    """Returns a layer whose parameters are on this device; those shared with another device are copied."""
    others = {name: p for name, p in layer.named_parameters() if devices_differ(p.device, device)}
    if not others:
        return layer

    def run(*args: Any, **kwargs: Any) -> Any:
        copies = {name: moved(parameter, device) for name, parameter in others.items()}
        return torch.func.functional_call(layer, copies, args, kwargs)

    return run


def run_step(
    model: nn.Module, run: Callable[..., Any], inputs: Inputs, loss_fn: Callable[[Any], Tensor]
) -> dict[str, Tensor]:
    """Runs one step of ``run``, which has the layers of ``model``, and restores all state afterwards.

    Returns:
        Outputs, loss, gradients and buffers, by name.
    """
    with _restoring_state(model, inputs.tensors), torch.random.fork_rng(devices=[]):
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs.tensors]
        output = call_unpacked(run, inputs.build(leaves))
        loss = loss_fn(output)
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"loss_fn must return a tensor with one element, got {type(loss).__name__}; compute the loss "
                "with torch, without .item()"
            )
        if loss.numel() != 1:
            raise ValueError(
                f"the loss must have one element, got shape {list(loss.shape)}; reduce it, for example by "
                ".mean()"
            )
        has_index = inputs.structure != ONE_TENSOR
        sources = {_indexed_name("gradient of input", i, has_index): x for i, x in enumerate(leaves)}
        sources |= {f"gradient of {name}": p for name, p in model.named_parameters()}
        sources = {name: tensor for name, tensor in sources.items() if tensor.requires_grad}
        if not loss.requires_grad or not sources:
            raise ValueError(
                f"the loss requires no gradient (requires_grad={loss.requires_grad}, {len(sources)} inputs "
                "and parameters that require one), so there is no backward to compare; compute the loss "
                "from the output, without detach(), and let parameters or inputs require gradients"
            )
        # backward() would add to existing gradients and run their hooks. Under autocast, the plain loop's
        # backward would round differently; the pipeline's is not affected by it.
        with exact_autocast(()):
            gradients = torch.autograd.grad(loss, list(sources.values()), allow_unused=True)
        outputs, structure = flatten(output)
        names = [_indexed_name("output", i, structure != ONE_TENSOR) for i in range(len(outputs))]
        result = {name: o.detach().clone() for name, o in zip(names, outputs, strict=True)}
        result["loss"] = loss.detach().clone()
        result |= {name: g for name, g in zip(sources, gradients, strict=True) if g is not None}
        return result | {f"buffer {name}": b.detach().clone() for name, b in model.named_buffers()}


def _indexed_name(name: str, index: int, has_index: bool) -> str:
    return f"{name} {index}" if has_index else name


@contextlib.contextmanager
def _restoring_state(model: nn.Module, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Restores parameters, buffers and inputs after the block; writes only tensors that have changed."""
    tensors = [t.detach() for t in (*inputs, *model.parameters(), *model.buffers()) if not t.is_meta]
    copies = [t.clone() for t in tensors]
    try:
        yield
    finally:
        for tensor, copy in zip(tensors, copies, strict=True):
            if not _equal(tensor, copy):
                tensor.copy_(copy)


def _row(name: str, ours: Tensor | None, expected: Tensor | None) -> Row:
    if ours is None or expected is None:
        missing = "missing in the pipeline" if ours is None else "missing in the plain loop"
        return Row(name, False, math.inf, math.inf, missing)
    for what in ("dtype", "shape"):
        found, wanted = getattr(ours, what), getattr(expected, what)
        if found != wanted:
            return Row(name, False, math.inf, math.inf, f"{what} {found}, not {wanted}")
    if _equal(ours, expected):
        return Row(name, True)
    wide_dtype = torch.complex128 if expected.is_complex() else torch.float64
    a, b = ours.to(wide_dtype), expected.to(wide_dtype)
    differences = torch.where(_same_bits(ours, expected), 0.0, (a - b).abs()).nan_to_num(nan=math.inf)
    difference, largest = float(differences.max()), float(b.abs().max())
    return Row(name, False, difference, difference / largest if largest else math.inf)


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(_same_bits(a, b).all())


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Returns, by element, whether two tensors of one dtype and shape have equal bits, or are both NaN."""
    if a.is_complex():
        return _same_bits(*(torch.view_as_real(t.resolve_conj()) for t in (a, b))).all(-1)
    integers = _INTEGER_DTYPES[a.element_size()]
    return (a.view(integers) == b.view(integers)) | (a.isnan() & b.isnan())


@dataclass(frozen=True)
class SwitchReports:
    """The result of `find_switch`; its string is a table.

    Attributes:
        all_on: the report of `verify` with all parts on.
        by_switch: the reports with one part turned off, by its name in ``gpipe_fast.switches.SWITCHES``.
    """

    all_on: Report
    by_switch: Mapping[str, Report]

    @property
    def causes(self) -> list[str]:
        """The switches that make all differences go away."""
        return [] if self.all_on.ok else [name for name, report in self.by_switch.items() if report.ok]

    def __str__(self) -> str:
        rows = {"nothing": self.all_on, **self.by_switch}
        cells = [[name, report.headline] for name, report in rows.items()]
        return Table("", ["turned off", "result"], cells, ["result"]).text()


def find_switch(
    model: GPipe,
    *args: Any,
    loss_fn: Callable[[Any], Tensor] | None = None,
    also: Sequence[Any] = (),
    **kwargs: Any,
) -> SwitchReports:
    """Runs `verify` with all parts of gpipe_fast on, and then with each part turned off in turn.

    The model traces its layers anew every time. Otherwise, it is left as it was::

        print(find_switch(model, x, lambda y: F.cross_entropy(y, labels), also=[short, long]))

    Args:
        model: the pipeline.
        args: as for `verify`.
        loss_fn: as for `verify`.
        also: mini-batches of other shapes, for which the model is prepared before (see `GPipe.prepare`). A
            template is made after two shapes of one kind, so pass two if the wrong number is in a third.
        kwargs: as for `verify`.

    Raises:
        TypeError: as for `verify`.
        ValueError: as for `verify`.
        RuntimeError: as for `verify`. Under ``backend='aten'``, capture is not turned off.
    """

    def compare(*names: str) -> Report:
        with switches.disabled(*names):
            _forget_programs(model)
            for each in also:
                model.prepare(*(each if isinstance(each, tuple) else (each,)))
            return verify(model, *args, loss_fn=loss_fn, **kwargs)

    names = [name for name in switches.SWITCHES if name != "capture" or model.backend != "aten"]
    try:
        return SwitchReports(compare(), {name: compare(name) for name in names})
    finally:
        _forget_programs(model)


def _forget_programs(model: GPipe) -> None:
    with TRACING_LOCK:
        runner_of(model).rebuild()
