"""A model that is larger than the host's memory: built on the meta device, loaded into fake GPUs, trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.fake_cuda import large_model
from tests.fake_cuda.fake_devices import plain_loop


@pytest.mark.usefixtures("one_thread")
def test_it_trains_as_the_plain_loop(run: Callable[..., list[str]], tmp_path: Path) -> None:
    model, path = large_model.layers(), tmp_path / "model.safetensors"
    save_file(model.state_dict(), path)
    assert path.stat().st_size > large_model.LIMIT * large_model.MIB
    expected = large_model.train(model, lambda x: plain_loop(model, x, large_model.CHUNKS), "cpu")
    assert run("large_model.py", str(path), shared=1) == expected
