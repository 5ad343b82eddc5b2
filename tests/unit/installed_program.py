"""Calls every public function while only the declared dependencies of gpipe_fast can be imported.

`python installed_program.py FOLDER` imports gpipe_fast from FOLDER and prints its location.
"""

import importlib.metadata
import importlib.util
import re
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path

FOLDER = sys.argv[1]
sys.path.insert(0, FOLDER)


def declared_modules() -> set[str]:
    """Returns the top-level module names of gpipe_fast's declared dependencies and of their dependencies."""
    wanted, found = ["gpipe_fast"], set[str]()
    names = importlib.metadata.packages_distributions()
    while wanted:
        name = re.match(r"[\w.-]+", wanted.pop())[0].lower().replace("-", "_")
        if name in found:
            continue
        found.add(name)
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        wanted += [each for each in requires if "extra ==" not in each]
    return {
        module
        for module, distributions in names.items()
        if any(d.lower().replace("-", "_") in found for d in distributions)
    }


class DeclaredPathFinder(PathFinder):
    """Finds modules on sys.path, but hides undeclared packages as if they were not installed."""

    installed = frozenset(importlib.metadata.packages_distributions())
    declared_modules = declared_modules()

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in cls.installed - cls.declared_modules:
            return None
        return super().find_spec(fullname, path, target)


# ruff: noqa: E402 the imports below use this finder
sys.meta_path[sys.meta_path.index(PathFinder)] = DeclaredPathFinder

import torch
from torch import nn

import gpipe_fast
from gpipe_fast import GPipe
from gpipe_fast.balance import balance_by_cost, balance_by_size, balance_by_time
from gpipe_fast.picture import draw
from gpipe_fast.profile import profile_layers, table
from gpipe_fast.schedule import fill_drain
from gpipe_fast.skip import Namespace, pop, skippable, stash, verify_skippables


@skippable(stash=["skip"])
class Down(nn.Module):
    def forward(self, x):
        yield stash("skip", x)
        return x.tanh()


@skippable(pop=["skip"])
class Up(nn.Module):
    def forward(self, x):
        return x + (yield pop("skip"))


def loss(y: torch.Tensor) -> torch.Tensor:
    return y.pow(2).mean()


name = Namespace()
layers = nn.Sequential(Down().isolate(name), nn.Linear(8, 8), nn.Dropout(0.5), Up().isolate(name))
verify_skippables(layers)
x = torch.randn(8, 8)
plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
assert sum(balance_by_time(2, plain, x, timeout=0.0)) == sum(balance_by_size(2, plain, x)) == 3
assert balance_by_cost(2, [1, 1, 2]) == [2, 1]
assert "Linear" in table(profile_layers(plain, x, timeout=None))
model = GPipe(layers, balance=[1, 3], chunks=4, devices=["cpu", "cpu"])
report = gpipe_fast.verify(model, x, loss)
assert report, report
assert "equal bit for bit" in str(report)
with model.recording() as recording:
    loss(model(x)).backward()
assert draw(recording).startswith("<svg")
assert recording.phases()[0] == fill_drain(2, 4, backward=False)
with gpipe_fast.keyed_rng(layers):
    layers(x[:2])
assert model((gpipe_fast.replicate(x[:1]), x)[1]).shape == (8, 8)
assert "stage 1 (cpu)" in gpipe_fast.doctor(model)
assert not gpipe_fast.is_checkpointing()
assert not gpipe_fast.is_recomputing()
assert gpipe_fast.built_with_cuda() == (gpipe_fast.build_info()["cuda"] != "none")
if importlib.util.find_spec("triton"):
    from gpipe_fast.kernels import cross_entropy

    assert cross_entropy(torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)).shape == ()
with tempfile.TemporaryDirectory() as folder:
    torch.save(model.state_dict(), Path(folder) / "state.pt")
    model.load_state_dict(torch.load(Path(folder) / "state.pt"))
assert Path(gpipe_fast.__file__).is_relative_to(FOLDER)
print("every public function works from", Path(gpipe_fast.__file__).parent)
