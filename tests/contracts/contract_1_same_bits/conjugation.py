"""Random layers of operators that set, read or resolve the bits of conjugated and negated tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 4

Operator = Callable[[Any, Tensor], Tensor]
CONJUGATED = torch.randn(WIDTH, dtype=torch.complex64, generator=torch.Generator().manual_seed(1)).conj()


def _change_imaginary_part(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y.imag.add_(1)
    return y


def _change_negated_view(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y.conj().imag.add_(x.real)
    return y


def _change_real_part_of_view(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y.conj().real.mul_(m.r)
    return y.conj()


def _conjugate_in_place(m: Any, x: Tensor) -> Tensor:
    return (x * m.w[1]).conj_physical_()


def _copy_into_view(m: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.conj()[:, 1:].copy_(x[:, 1:])
    return y + x


def _track(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.tracked.mul_(0.5).add_(x.detach().conj().mean(0))
    return x * m.tracked.clone()


def _solve(m: Any, x: Tensor) -> Tensor:
    return torch.linalg.solve(m.w + 3 * torch.eye(WIDTH), x.mH).mH


def _hermitian(m: Any) -> Tensor:
    return m.w.mH @ m.w + torch.eye(WIDTH)


COMPLEX: dict[str, Operator] = {
    "conj": lambda m, x: x.conj(),
    "conj of a part": lambda m, x: torch.cat([x.conj()[:, :2], x[:, 2:]], 1),
    "times conj": lambda m, x: x * x.conj(),
    "times parameter": lambda m, x: x * m.v.conj(),
    "parameter times conj": lambda m, x: m.v * x.conj(),
    "parameter with a bit": lambda m, x: x * m.bit + m.bit.conj(),
    "product": lambda m, x: x @ m.w,
    "product with conj": lambda m, x: x @ m.w.conj(),
    "product with mH": lambda m, x: x @ m.w.mH,
    "product of conj": lambda m, x: x.conj() @ m.w,
    "product from the left": lambda m, x: (m.w.mH @ x.mT).mT,
    "product with a parameter with a bit": lambda m, x: x @ m.matrix_bit,
    "product with its adjoint": lambda m, x: (x.mH @ x)[0] * x,
    "vector product": lambda m, x: (x.conj() @ m.v)[:, None] * x,
    "einsum": lambda m, x: torch.einsum("bi,ij->bj", x, m.w.conj()),
    "linear": lambda m, x: F.linear(x.conj(), m.w.conj(), m.v),
    "addmm": lambda m, x: torch.addmm(x.conj(), x, m.w.mH),
    "bmm": lambda m, x: torch.bmm(x[:, None].conj(), m.w.mH.expand(len(x), WIDTH, WIDTH))[:, 0],
    "baddbmm": lambda m, x: torch.baddbmm(x[:, None], x[:, None].conj(), m.w.expand(len(x), -1, -1).mH)[:, 0],
    "vdot": lambda m, x: torch.vdot(x[0], m.v) * x,
    "dot": lambda m, x: torch.dot(x[0].conj(), m.v) * x.conj(),
    "vecdot": lambda m, x: torch.linalg.vecdot(x, m.v)[:, None] * x,
    "outer": lambda m, x: torch.outer(x[:, 0].conj(), m.v.conj()),
    "multi_dot": lambda m, x: torch.linalg.multi_dot([x, m.w.conj(), m.w.mH]),
    "solve": _solve,
    "cholesky": lambda m, x: x @ torch.linalg.cholesky(_hermitian(m)).mH,
    "fft": lambda m, x: torch.fft.fft(x.conj()),
    "ifft": lambda m, x: torch.fft.ifft(x).conj(),
    "cumsum": lambda m, x: x.conj().cumsum(1),
    "polar": lambda m, x: torch.polar(x.conj().abs(), x.conj().angle()),
    "index": lambda m, x: x.conj()[:, [3, 1, 0, 2]],
    "reshape": lambda m, x: x.conj().reshape(-1).view(-1, WIDTH).conj() * m.v,
    "expand": lambda m, x: x.conj()[:, :1].expand(-1, WIDTH),
    "unbind": lambda m, x: torch.stack([p.conj() for p in x.conj().unbind(1)][::-1], 1),
    "pad": lambda m, x: F.pad(x.conj()[:, 1:], (1, 0)),
    "as_strided": lambda m, x: x.resolve_conj().contiguous().conj().as_strided((len(x), WIDTH), (WIDTH, 1)),
    "pow": lambda m, x: x.conj() ** 2,
    "mean": lambda m, x: x.conj() - x.conj().mean(1, keepdim=True),
    "norm": lambda m, x: x.conj() / (1 + torch.linalg.vector_norm(x.conj(), dim=1, keepdim=True)),
    "view_as_real": lambda m, x: torch.view_as_complex(torch.view_as_real(x.resolve_conj()) * m.r[0]),
    "view_as_complex": lambda m, x: torch.view_as_complex(torch.stack([x.imag, x.conj().imag], -1)).conj(),
    "double": lambda m, x: x.conj().to(torch.complex128).to(x.dtype),
    "clone": lambda m, x: x.conj().clone() + x.conj(),
    "buffer": lambda m, x: x * m.conjugated,
    "product with a buffer": lambda m, x: x @ m.adjoint,
    "negated buffer": lambda m, x: x.conj() * m.negated,
    "constant": lambda m, x: x * CONJUGATED.to(x.dtype),
    "track": _track,
    "in place: imag": _change_imaginary_part,
    "in place: conj imag": _change_negated_view,
    "in place: real of conj": _change_real_part_of_view,
    "in place: conj_physical_": _conjugate_in_place,
    "in place: copy_": _copy_into_view,
}

TO_REAL: dict[str, Operator] = {
    "imag": lambda m, x: x.imag,
    "imag of conj": lambda m, x: x.conj().imag,
    "imag of conj times": lambda m, x: x.conj().imag * m.r,
    "imag of product": lambda m, x: (m.w[0].conj() * x).imag,
    "real": lambda m, x: x.conj().real,
    "abs": lambda m, x: (x * m.v.conj()).abs(),
    "angle": lambda m, x: x.conj().angle(),
    "column-major imag": lambda m, x: x.conj().imag.t().contiguous().t(),
    "irfft": lambda m, x: torch.fft.irfft(x.conj(), n=WIDTH),
    "imag of expanded": lambda m, x: (x * 2)[:, :1].expand(-1, WIDTH).imag,
    "expanded imag": lambda m, x: x.conj().imag[:, :1].expand(-1, WIDTH),
}

REAL: dict[str, Operator] = {
    "sin": lambda m, x: x.sin(),
    "product": lambda m, x: x @ m.real_matrix,
    "negated view": lambda m, x: torch.complex(x, x * 2).conj().imag,
    "negated view times": lambda m, x: torch.complex(x, x * 2).conj().imag * m.r,
    "product with a negated view": lambda m, x: torch.complex(x, x * 2).conj().imag @ m.real_matrix,
    "negated buffer": lambda m, x: x * m.negated,
    "matrix of a negated view": lambda m, x: x @ m.w.mH.imag,
    "resolve": lambda m, x: torch.complex(x, x).conj().imag.resolve_neg(),
}

TO_COMPLEX: dict[str, Operator] = {
    "complex": lambda m, x: torch.complex(x, 2 * x),
    "times parameter": lambda m, x: x * m.v.conj(),
    "product": lambda m, x: x.to(m.w.dtype) @ m.w.mH,
    "polar": lambda m, x: torch.polar(1 + x * x, x).conj(),
    "plus i": lambda m, x: x + 1j,
    "fft": lambda m, x: torch.fft.fft(x),
    "ihfft": lambda m, x: torch.fft.ihfft(F.pad(x, (0, 2))),
    "view": lambda m, x: torch.view_as_complex(torch.stack([x, x * 2], -1)).conj(),
}


class Composed(nn.Module):
    """Applies operators one after the other."""

    def __init__(self, operators: list[Operator], dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        real = torch.float64 if dtype is torch.complex128 else torch.float32

        def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return 0.5 * torch.randn(*shape, dtype=dtype, generator=generator)

        self.operators = operators
        self.w, self.v = nn.Parameter(draw(WIDTH, WIDTH)), nn.Parameter(draw(WIDTH))
        self.r, self.real_matrix = (
            nn.Parameter(draw(WIDTH, dtype=real)),
            nn.Parameter(draw(WIDTH, WIDTH, dtype=real)),
        )
        self.bit, self.matrix_bit = nn.Parameter(draw(WIDTH).conj()), nn.Parameter(draw(WIDTH, WIDTH).mH)
        self.register_buffer("conjugated", draw(WIDTH).conj())
        self.register_buffer("adjoint", draw(WIDTH, WIDTH).mH)
        self.register_buffer("negated", draw(WIDTH).conj().imag)
        self.register_buffer("tracked", draw(WIDTH).conj())

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the operators make of a complex or real tensor of shape (batch, WIDTH)."""
        for operator in self.operators:
            x = operator(self, x)
        return x


TABLES = {"complex": COMPLEX, "to real": TO_REAL, "real": REAL, "to complex": TO_COMPLEX}
# The operators of a layer: the name of a table, and a name in it.
Names = list[tuple[str, str]]


def names_of_operators(draw: random.Random, num_layers: int) -> list[Names]:
    """Draws the operators of layers in a row."""
    is_complex, layers = draw.random() < 0.6, []
    for _ in range(num_layers):
        names: Names = []
        for _ in range(draw.randint(1, 3)):
            stays = draw.random() < (0.8 if is_complex else 0.4)
            table = ("complex" if stays else "to real") if is_complex else ("real" if stays else "to complex")
            names.append((table, draw.choice(list(TABLES[table]))))
            is_complex = is_complex == stays
        layers.append(names)
    return layers


def layers_of(layers: Sequence[Names], dtype: torch.dtype) -> nn.Sequential:
    """Returns layers with equal parameters and buffers for equal names."""
    generator = torch.Generator().manual_seed(0)
    return nn.Sequential(
        *(Composed([TABLES[table][name] for table, name in names], dtype, generator) for names in layers)
    )


def takes_complex(layers: Sequence[Names]) -> bool:
    """Returns whether the first layer takes a complex tensor."""
    return layers[0][0][0] in ("complex", "to real")


def noise(draw: random.Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns random numbers: conjugated, negated, column-major or none of these, by chance."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    kind = dtype if dtype.is_complex else dtype.to_complex()
    found = torch.randn(tuple(shape), dtype=kind, generator=generator)
    if draw.random() < 0.3:
        found = found.t().contiguous().t()
    if draw.random() < 0.4:
        found = found.conj()
    return found if dtype.is_complex else found.imag
