"""What the plan of a model for tensor parallelism sends, in one process of a group of two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from gpipe_fast.from_model.tensor_plan import apply_plan
from gpipe_fast.torch_private.collectives import one_of_many
from tests.distributed.launch import needs_gloo

pytestmark = needs_gloo


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[:-1]
        return self.down(torch.tanh(self.gate(x)) * self.up(x)).view(*shape, -1)


class Residual(Gated):
    """Reads the elements of its input itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.gate(x)) * self.up(x))


class Model(nn.Module):
    tp_plan: dict[str, str]

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


@pytest.mark.parametrize(("cls", "sums"), [(Gated, 1), (Residual, 2)])
def test_projections_that_alone_read_an_input_sum_its_gradient_together(cls: type[Gated], sums: int) -> None:
    """Besides, the forward sums once behind the last projection."""
    with one_of_many(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model, plan = Model(cls()), {"inner.gate": "colwise", "inner.up": "colwise", "inner.down": "rowwise"}
        model.tp_plan = plan
        apply_plan(model, mesh)
        with CommDebugMode() as sent:
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert sent.get_total_counts() == 1 + sums
