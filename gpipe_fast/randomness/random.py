"""Keyed randomness: a random op's draw depends on its position in the model, never on when or where it runs.

A draw is a function of four numbers: the mini-batch's key, the micro-batch, the layer, and the op's ordinal
among the random ops of that layer. `KeyedRandomMode` replaces PyTorch's random ops with such draws, below
autograd, so that PyTorch's backward formulas apply unchanged::

    layer 1 = Sequential(Linear, Dropout, GELU, Dropout), micro-batch 2
                                 │              └── keyed_bernoulli(key, layer=1, ordinal=1, ...)
                                 └───────────────── keyed_bernoulli(key, layer=1, ordinal=0, ...)
    key = [minibatch_key, microbatch, first_layer] = [minibatch_key, 2, 0]

A stage whose first layer is layer 1 passes ``first_layer = 1`` and ``layer=0``, and draws the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from gpipe_fast.layers.sharded import is_sharded
from gpipe_fast.layers.structure import layer_title
from gpipe_fast.randomness.random_rules import RULES
from gpipe_fast.torch_private.autograd import top_saved_tensors_hooks
from gpipe_fast.torch_private.modes import TorchDispatchMode
from gpipe_fast.torch_private.operators import OpOverload, call_composite, has_kernel

# The layer index of random ops outside of all layers; larger than any stage's number of layers.
NO_LAYER = 0xFFFF


class UnkeyedRandomOp(RuntimeError):
    """Raised by a random op that cannot be drawn by key; the message gives the op and the reason."""


def minibatch_key() -> int:
    """Draws a mini-batch's key from PyTorch's default CPU generator, which ``torch.manual_seed`` seeds."""
    return int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu"))


class MinibatchKey:
    """A mini-batch's key: given, or drawn by the first call. Thread-safe."""

    def __init__(self, key: int | None = None, draw: Callable[[], int] = minibatch_key) -> None:
        self._lock = threading.Lock()
        self._key = key
        self._draw = draw

    def __call__(self) -> int:
        """Returns the key."""
        with self._lock:
            if self._key is None:
                self._key = self._draw()
            return self._key


def make_key(minibatch: int, microbatch: int, first_layer: int = 0) -> Tensor:
    """Returns the key tensor of one stage and micro-batch: int64, shape (3,), on the CPU."""
    return torch.tensor([minibatch, microbatch, first_layer], dtype=torch.int64, device="cpu")


class SavedGeneratorStates:
    """States of the layers' own generators, saved before each random op for the recompute."""

    def __init__(self, keep: bool) -> None:
        """Starts without states; ``keep`` says whether to save states for `for_recompute`."""
        self._save = keep
        self._saved: list[Tensor] = []
        self._states_to_replay: Iterator[Tensor] | None = None

    def for_recompute(self) -> SavedGeneratorStates:
        """Returns an object that gives the saved states to a second run of the same ops."""
        states = SavedGeneratorStates(False)
        states._states_to_replay = iter(self._saved)
        return states

    @contextlib.contextmanager
    def drawing_from(self, generator: torch.Generator) -> Iterator[None]:
        """Surrounds the next op that draws from ``generator``.

        The first run saves the generator's state, if states are kept. The second run sets the state of the
        first run, and afterwards restores the current state.
        """
        current = generator.get_state()
        if self._states_to_replay is None:
            if self._save:
                self._saved.append(current)
            yield
            return
        generator.set_state(next(self._states_to_replay))
        try:
            yield
        finally:
            generator.set_state(current)


class KeyedRandomMode(TorchDispatchMode):
    """Replaces every random op by a draw from ``torch.ops.gpipe_fast``, in eager mode and in traces.

    Args:
        key: ``[minibatch_key, microbatch, first_layer]``, int64, on the CPU; a real or fake tensor, or a
            function that returns the key.
        generators: only in eager mode; allows random ops without a keyed counterpart. Such an op draws from
            its own generator if it has one, or else from a new one, seeded by key, layer and ordinal.
        on_gpu: whether tensors may be on a GPU although PyTorch sees none: those of a trace.

    Attributes:
        clock: if set, `seconds` adds up the time in operators by it.
        seconds: as above.

    Raises:
        UnkeyedRandomOp: on a random op that can be drawn neither by key nor with ``generators``.
    """

    def __init__(
        self,
        key: Tensor | Callable[[], Tensor],
        generators: SavedGeneratorStates | None = None,
        on_gpu: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock: Callable[[], float] | None = None
        self.seconds = 0.0
        self._generators = generators
        # Only CUDA has fused attention with dropout. Elsewhere no function mode is entered, because any such
        # mode disables the fast path of Transformer layers in eval mode.
        self._attention = _UnfusedAttention() if on_gpu or torch.cuda.is_available() else None
        self.set_key(key)

    def set_key(self, key: Tensor | Callable[[], Tensor]) -> None:
        """Starts another micro-batch, outside of all layers; a function is called at the first draw."""
        self._key = key
        self._layer = NO_LAYER
        self._ordinals = {NO_LAYER: 0}

    def enter_layer(self, layer: int) -> None:
        """Starts layer ``layer``, counted from the key's first layer; the ordinals start from 0."""
        self._layer = layer
        self._ordinals[layer] = 0

    @property
    def unfused_attention(self) -> bool:
        """Whether attention with dropout has run without a fused kernel on a GPU."""
        return self._attention is not None and self._attention.on_gpu

    def leave_layer(self) -> None:
        """Ends the layer. Draws before the next layer continue the ordinals of layer ``NO_LAYER``."""
        self._layer = NO_LAYER

    def __enter__(self) -> KeyedRandomMode:
        super().__enter__()  # type: ignore[no-untyped-call]
        if self._attention is not None:
            self._attention.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if self._attention is not None:
            self._attention.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: OpOverload[Any, Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_sharded, args)) and is_random(func, args, kwargs):
            raise UnkeyedRandomOp(
                f"{func} draws random numbers for a DTensor, of which each process has a part; draw them for "
                "a local one: give the style of the layer before it use_local_output=True, or call to_local()"
            )
        rule = RULES.get(func)
        if rule is None and self._generators is not None and _is_composite(func):
            # In inference mode composite ops reach this mode undecomposed, with the random ops inside. This
            # does not call `decompose`, because PyTorch's Python decomposition of LSTM omits the dropout.
            with self:
                return call_composite(func, *args, **kwargs)
        if rule is None:
            if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
                return self._draw_unkeyed(func, args, kwargs)
            if self.clock is None:
                return func(*args, **kwargs)
            begun = self.clock()
            found = func(*args, **kwargs)
            self.seconds += self.clock() - begun
            return found
        if kwargs.get("generator") is not None:
            return self._draw_unkeyed(func, args, kwargs)
        kwargs.pop("generator", None)
        return rule(self, *args, **kwargs)

    def _draw_unkeyed(self, func: OpOverload[Any, Any], args: Any, kwargs: dict[str, Any]) -> Any:
        generator = kwargs.get("generator")
        takes_one = any(argument.name == "generator" for argument in func._schema.arguments)
        if self._generators is None or not takes_one:
            raise UnkeyedRandomOp(f"{func} has no keyed counterpart, so a recompute would draw other numbers")
        if generator is None:
            return func(*args, **kwargs | {"generator": self._seeded_generator()})
        with self._generators.drawing_from(generator):
            return func(*args, **kwargs)

    def _seeded_generator(self) -> torch.Generator:
        key, ordinal = self._next_draw()
        minibatch, microbatch, first_layer = key.tolist()
        position = (minibatch, microbatch, first_layer + self._layer, ordinal)
        digest = hashlib.blake2b(repr(position).encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))

    def draw(
        self, op: Any, size: Sequence[int], *parameters: float, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Draws the layer's next random tensor with one of the ``keyed_*`` ops."""
        if dtype.is_complex:
            raise UnkeyedRandomOp(
                f"a random tensor of {dtype} has no keyed counterpart; draw its real and imaginary parts"
            )
        key, ordinal = self._next_draw()
        drawn: Tensor = op(key, self._layer, ordinal, size, *parameters, dtype=dtype, device=device)
        return drawn

    def _next_draw(self) -> tuple[Tensor, int]:
        """Returns the key and the ordinal of the layer's next draw, and increments the ordinal."""
        if _inside_checkpoint():
            raise UnkeyedRandomOp(
                "a random op inside torch.utils.checkpoint would draw other numbers when recomputed; use "
                "GPipe's checkpoint argument instead, and switch the other off: for a model of transformers, "
                "model.gradient_checkpointing_disable()"
            )
        if not isinstance(self._key, Tensor):
            self._key = self._key()
        ordinal = self._ordinals[self._layer]
        self._ordinals[self._layer] = ordinal + 1
        return self._key, ordinal

    def draw_like(
        self, op: Any, like: Tensor, *parameters: float, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Draws a tensor with the shape and device of ``like``, and its dtype unless ``dtype`` is given."""
        return self.draw(op, like.shape, *parameters, dtype=dtype or like.dtype, device=like.device)


@functools.cache
def _is_composite(func: OpOverload[Any, Any]) -> bool:
    """Returns whether an operator is composed of other operators on every device."""
    if func.namespace == "prim":  # not registered with the dispatcher
        return False
    has = functools.partial(has_kernel, func.name())
    return has("CompositeImplicitAutograd") and not has("CPU") and not has("CUDA")


class _UnfusedAttention(TorchFunctionMode):
    """Makes attention with dropout use the unfused kernels, because fused kernels draw without a key.

    No fused kernel accepts a seed. The forwards (`_flash_attention_forward`, `_efficient_attention_forward`,
    `_cudnn_attention_forward`) take a Philox state from PyTorch's default CUDA generator on the host, under
    the generator's lock, and return seed and offset only for the backward. Setting the generator before each
    call would not help: all stages and threads of a device share it, and in a captured graph the state comes
    from memory that PyTorch fills from the generator before each replay, whatever the micro-batch's key.

    Attributes:
        on_gpu: whether such attention has run on a GPU.
    """

    on_gpu = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _attends_with_dropout(func, args, kwargs):
            self.on_gpu = self.on_gpu or _is_on_gpu(args[0] if args else kwargs["query"])
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_on_gpu(query: Tensor) -> bool:
    return query.device.type == "cuda"


def _attends_with_dropout(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if func is F.scaled_dot_product_attention:
        return bool((args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0.0)
    # A function mode does not see the calls inside F.multi_head_attention_forward.
    if func is F.multi_head_attention_forward:
        given = _MULTI_HEAD.bind(*args, **kwargs)
        given.apply_defaults()
        return bool(given.arguments["training"] and given.arguments["dropout_p"] > 0.0)
    return False


_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


def _inside_checkpoint() -> bool:
    # Non-reentrant checkpointing sets a pair of saved-tensor hooks; PyTorch has no other way to detect it.
    hooks = top_saved_tensors_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _draws(func: OpOverload[Any, Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns whether this call of a random op draws; attention without dropout, for example, does not."""
    if func is torch.ops.aten._fused_sdp_choice.default:
        return False
    arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    known = {argument.name for argument in func._schema.arguments}
    # Only operators like dropout, which inference mode does not decompose, have both p and train.
    rates = [
        name for name in ("dropout_p", "dropout", "p") if name in known and (name != "p" or "train" in known)
    ]
    return not rates or bool(arguments.get(rates[0], 0.0) and arguments.get("train", True))


def is_random(func: OpOverload[Any, Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns whether this call of an operator draws random numbers."""
    return func in RULES or (torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs))


@contextlib.contextmanager
def keyed_rng(module: nn.Sequential, key: int | None = None) -> Iterator[KeyedRandomMode]:
    """Makes a plain micro-batch loop draw the same random bits as `GPipe`.

    One context is one mini-batch. Inside it every call of ``module`` is the next micro-batch; if the layers
    are called one by one, in order, every call of the first layer starts the next micro-batch. Every random
    op draws by its layer and its position in the layer. Random ops outside of the layers draw by key, too,
    but `GPipe` has no corresponding draws::

        torch.manual_seed(0)
        with gpipe_fast.keyed_rng(model):
            y = torch.cat([model(c) for c in x.chunk(8)])
        loss(y).backward()

    After the same ``torch.manual_seed`` call, the bits are guaranteed to equal the bits of
    ``GPipe(model, chunks=8)(x)``, for any balance, checkpoint policy and number of threads.

    Args:
        module: the unpartitioned model, called through ``module(...)`` or layer by layer; or a model of
            ``GPipe.from_model``, whose ``plain()`` is called.
        key: the mini-batch's key, a signed 64-bit integer; None draws a key as `GPipe` does.

    Yields:
        The active `KeyedRandomMode`.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``.
        UnkeyedRandomOp: a random op cannot be drawn by key.
        ValueError: ``key`` is not a signed 64-bit integer.
        RuntimeError: layers are called out of order.
    """
    calls = vars(module).get("_gpipe_fast")  # of a model of `GPipe.from_model`, and of its plain one
    if calls is None and not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be an nn.Sequential, but is {type(module).__name__}")
    if key is not None and not (type(key) is int and -(2**63) <= key < 2**63):
        raise ValueError(f"key must be a signed 64-bit integer or None, got {key!r}")
    # The key is drawn lazily: without random ops PyTorch's generator does not advance, as in GPipe.
    minibatch = MinibatchKey(key)
    mode = KeyedRandomMode(lambda: make_key(minibatch(), 0), SavedGeneratorStates(False))
    layers = list(module) if calls is None else calls.blocks
    tracker = (_PositionTracker if calls is None else _BlockTracker)(mode, layers, minibatch)
    with contextlib.ExitStack() as hooks:
        hooks.callback(module.register_forward_pre_hook(tracker.begin_module, prepend=True).remove)
        hooks.callback(module.register_forward_hook(tracker.end_module, always_call=True).remove)
        for child in dict.fromkeys(layers):
            if isinstance(child, torch.jit.ScriptModule):  # it takes no hooks of its own
                begin, end = _only_of(child, tracker.begin_layer), _only_of(child, tracker.end_layer)
                hooks.callback(register_module_forward_pre_hook(begin).remove)
                hooks.callback(register_module_forward_hook(end, always_call=True).remove)
                continue
            hooks.callback(child.register_forward_pre_hook(tracker.begin_layer, prepend=True).remove)
            hooks.callback(child.register_forward_hook(tracker.end_layer, always_call=True).remove)
        with mode:
            yield mode


def _only_of(module: nn.Module, hook: Callable[..., None]) -> Callable[..., None]:
    """Returns a hook of all modules that is called for one of them."""

    def called(other: nn.Module, *args: Any) -> None:
        if other is module:
            hook(other, *args)

    return called


class _PositionTracker:
    """Hooks of a Sequential and its layers that tell a `KeyedRandomMode` which micro-batch and layer run."""

    def __init__(
        self, mode: KeyedRandomMode, layers: Sequence[nn.Module], minibatch: Callable[[], int]
    ) -> None:
        self._mode = mode
        self._layers = list(layers)
        self._minibatch = minibatch
        self._microbatch = 0
        self._next_layer = 0
        self._depth = 0  # nested calls of layers; above 1, a layer itself calls another layer
        self._in_module = False  # whether ``module`` runs; if not, layers are called one by one

    def begin_module(self, module: nn.Module, args: Any) -> None:
        self._in_module, self._depth = True, 0
        self._begin_microbatch()

    def end_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._in_module = False

    def _begin_microbatch(self) -> None:
        microbatch = self._microbatch
        self._mode.set_key(lambda: make_key(self._minibatch(), microbatch))
        self._microbatch += 1
        self._next_layer = 0

    def begin_layer(self, child: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        first, expected = self._layers[0] is child, self._is_next(child)
        if first and not self._in_module and (self._next_layer == 0 or not expected):
            self._begin_microbatch()
        elif not expected:
            raise RuntimeError(self._out_of_order(child))
        self._mode.enter_layer(self._next_layer)
        self._next_layer += 1

    def _is_next(self, child: nn.Module) -> bool:
        return self._next_layer < len(self._layers) and self._layers[self._next_layer] is child

    def _out_of_order(self, child: nn.Module) -> str:
        layer, wanted = self._next_layer, []
        if layer < len(self._layers):
            wanted.append(layer_title(layer, self._layers[layer]))
        if not self._in_module:
            wanted.append(f"{layer_title(0, self._layers[0])} for the next micro-batch")
        return (
            f"layers were called out of order: got a {type(child).__name__}, expected "
            f"{' or '.join(wanted) or 'no layer'}"
        )

    def end_layer(self, child: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._mode.leave_layer()


class _BlockTracker(_PositionTracker):
    """Hooks of a plain model and its blocks, for the layers of `GPipe.from_model`.

    Layer 0 ends where the first block begins, layer k where block k ends.
    """

    def begin_module(self, module: nn.Module, args: Any) -> None:
        super().begin_module(module, args)
        self._mode.enter_layer(0)

    def end_module(self, module: nn.Module, args: Any, output: Any) -> None:
        super().end_module(module, args, output)
        self._mode.leave_layer()

    def begin_layer(self, child: nn.Module, args: Any) -> None:
        if not self._is_next(child):
            raise RuntimeError(self._out_of_order(child))
        if self._next_layer == 0:
            self._mode.enter_layer(1)

    def end_layer(self, child: nn.Module, args: Any, output: Any) -> None:
        self._next_layer += 1
        self._mode.enter_layer(self._next_layer + 1)
