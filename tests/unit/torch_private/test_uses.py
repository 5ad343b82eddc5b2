"""PyTorch's private names are used in `gpipe_fast/torch_private/` alone.

A name is private if a part of it begins with an underscore, or if it is in a module that PyTorch does not
document as stable. The names of operators, such as ``torch.ops.aten._to_copy``, are what graphs contain, and
may be used anywhere. Private attributes of objects, such as an operator's ``_schema``, are not found.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = "gpipe_fast/torch_private"
UNSTABLE = ("torch.fx.experimental", "torch.fx.traceback")
ASKS = ("getattr", "setattr", "hasattr", "delattr")


def is_private(name: str) -> bool:
    if f"{name}.".startswith("torch.ops."):
        return False
    parts = [part for part in name.split(".") if not part.startswith("__")]
    return any(part.startswith("_") for part in parts) or any(
        f"{name}.".startswith(f"{module}.") for module in UNSTABLE
    )


def imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields the variables that an import sets, with the dotted names of what they hold."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yields the variables that an assignment sets, with their values."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        targets = [node.target]
    else:
        return
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id, node.value
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = zip(target.elts, node.value.elts, strict=False)
            yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))


def dotted(node: ast.expr, variables: dict[str, str]) -> str | None:
    """Returns the full name of an expression of names and attributes that begins with a known variable."""
    if isinstance(node, ast.Name):
        return variables.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, variables)
        return None if owner is None else f"{owner}.{node.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKS:
        owner, asked = dotted(node.args[0], variables), node.args[1]
        text = asked.values[0] if isinstance(asked, ast.JoinedStr) and asked.values else asked
        if owner is not None and isinstance(text, ast.Constant):
            return f"{owner}.{text.value}"
    return None


def private_names(source: str) -> set[tuple[int, str]]:
    """Returns the lines and names of a source's uses of private parts of PyTorch."""
    nodes = list(ast.walk(ast.parse(source)))
    variables = {name: held for node in nodes for name, held in imported(node)}
    variables = {name: held for name, held in variables.items() if held.split(".")[0] == "torch"}
    for node in nodes:
        for name, value in assigned(node):
            held = dotted(value, variables)
            if held is not None:
                variables[name] = held
    uses = [(node.lineno, held) for node in nodes for held in uses_of(node, variables)]
    return {(line, name) for line, name in uses if is_private(name)}


def uses_of(node: ast.AST, variables: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "torch")
    elif isinstance(node, ast.ImportFrom):
        yield from (name for _, name in imported(node) if name.split(".")[0] == "torch")
    elif isinstance(node, (ast.Attribute, ast.Call)):
        name = dotted(node, variables)
        if name is not None:
            yield name


SOURCES = [
    path
    for folder in ("gpipe_fast", "kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.is_relative_to(ROOT / PACKAGE)
]


def test_private_names_are_used_in_one_package() -> None:
    assert len(SOURCES) > 100
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name} is a private part of PyTorch; import it from {PACKAGE}, "
        "and add it there if it is not"
        for path in SOURCES
        for line, name in sorted(private_names(path.read_text()))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f():\n    import torch._inductor", "torch._inductor"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch import _guards", "torch._guards"),
        ("from torch.fx.experimental import proxy_tensor", "torch.fx.experimental.proxy_tensor"),
        ("import torch.distributed as dist\ndist._x", "torch.distributed._x"),
        ("import torch\naten, get = torch.ops.aten, torch.backends\nget._x", "torch.backends._x"),
        ("import torch\nv: object = torch.autograd\nv._engine = 1", "torch.autograd._engine"),
        ("import torch\ngetattr(torch.cuda, f'_{x}')", "torch.cuda._"),
    ],
)
def test_a_private_name_is_found(source: str, name: str) -> None:
    assert (len(source.splitlines()), name) in private_names(source)


def test_a_public_name_is_not_found() -> None:
    source = "import torch\naten = torch.ops.aten\naten._softmax.default\ntorch.nn.Linear.__name__"
    assert not private_names(source)
