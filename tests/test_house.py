"""The rules of the house. Each is a function from a package to its violations, and each is shown to fail on a planted case."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6

ENVIRONMENT = "host/env.py"
"""The only file that reads environment variables."""
ACCELERATOR = "accelerator.py"
"""The only file that names torch.cuda, kernels aside."""
KERNELS = re.compile(r"kernels?\.py$")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """One file of a package."""

    path: Path
    name: str
    """Dotted, from the package's name on."""

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    @property
    def room(self) -> str:
        return self.name.partition(".")[2].partition(".")[0]

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]


class Package:
    """All files below a folder."""

    def __init__(self, root: Path):
        self.root = root
        self.modules: dict[str, Module] = {}
        for path in sorted(root.rglob("*.py")):
            parts = (root.name, *path.relative_to(root).with_suffix("").parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.modules[name] = Module(path, name)

    def file(self, module: Module) -> str:
        return module.path.relative_to(self.root).as_posix()

    def imports(self, module: Module) -> Iterator[tuple[str, str, str]]:
        """(imported module, imported name or "", local name) of every import of this package, lazy and type-only ones included."""
        for node in module.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in self.modules:
                        yield alias.name, "", alias.asname or alias.name
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                for alias in node.names:
                    local = alias.asname or alias.name
                    if f"{node.module}.{alias.name}" in self.modules:
                        yield f"{node.module}.{alias.name}", "", local
                    elif node.module in self.modules:
                        yield node.module, alias.name, local


# The rules.


def import_circles(package: Package) -> list[str]:
    arrows = {name: {to for to, *_ in package.imports(module) if to != name} for name, module in package.modules.items()}
    circles = []
    for component in strongly_connected(arrows):
        if len(component) > 1:
            circles.append(" → ".join(sorted(component)))
    return circles


def strongly_connected(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Tarjan's algorithm, without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []
    for root in arrows:
        work = [(root, iter(sorted(arrows[root])))] if root not in index else []
        if work:
            index[root] = low[root] = len(index)
            stack.append(root)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    work.append((target, iter(sorted(arrows[target]))))
                    break
                if target in stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    components.append(stack[at:])
                    del stack[at:]
    return components


def names_used_twice(package: Package) -> list[str]:
    files = defaultdict(list)
    for module in package.modules.values():
        if module.path.name != "__init__.py":
            files[module.path.name].append(package.file(module))
    return [", ".join(paths) for paths in files.values() if len(paths) > 1]


def mocks_and_patches(package: Package) -> list[str]:
    """unittest.mock anywhere, and assignments to what belongs to another room: `module.name = …`, `setattr(Class, …)`."""
    found = []
    for module in package.modules.values():
        foreign = {local for to, _, local in package.imports(module) if to.split(".")[1:2] != [module.room]}
        file = package.file(module)
        for node in module.nodes:
            where = f"{file}:{getattr(node, 'lineno', 0)}"
            if imports_of(node, "unittest"):
                found.append(f"{where} imports unittest.mock")
            for target in assigned(node):
                # A name in capitals is a value that its room offers to be set; anything else is that room's own code.
                if target in foreign and not target.isupper():
                    found.append(f"{where} sets an attribute of {target}")
    return found


def imports_of(node: ast.AST, package: str) -> bool:
    """Whether the node imports the package or a part of it."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{name}" for name in names]
    return any(f"{name}.".startswith(f"{package}.") for name in names)


def assigned(node: ast.AST) -> Iterator[str]:
    """Names whose attributes the node sets: `name.attribute = …` or `setattr(name, …)`."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and named(node.func) == "setattr" and node.args:
        yield from filter(None, [named(node.args[0])])
    for target in targets:
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            yield target.value.id


UNTYPED = re.compile(r"\b(dict|Mapping|MutableMapping)\[str, Any\]")


def untyped_contracts(package: Package) -> list[str]:
    """`dict[str, Any]` in the signature of a function, method or field that another room imports."""
    shared: dict[str, set[str]] = defaultdict(set)
    for module in package.modules.values():
        for to, name, local in package.imports(module):
            if package.modules[to].room == module.room:
                continue
            if name:
                shared[to].add(name)
            else:
                shared[to] |= {
                    node.attr for node in module.nodes if isinstance(node, ast.Attribute) and named(node.value) == local
                }
    found = []
    for name, names in shared.items():
        module = package.modules[name]
        for node in module.tree.body:
            if isinstance(node, Function) and node.name in names:
                found += [f"{package.file(module)}:{node.name}" for _ in untyped_annotations(node)]
            elif isinstance(node, ast.ClassDef) and node.name in names:
                for member in node.body:
                    if isinstance(member, Function) and (not member.name.startswith("_") or member.name == "__init__"):
                        if member.name in ("to_json", "from_json"):
                            continue  # JSON itself is the contract
                        found += [f"{package.file(module)}:{node.name}.{member.name}" for _ in untyped_annotations(member)]
                    elif isinstance(member, ast.AnnAssign) and UNTYPED.search(ast.unparse(member.annotation)):
                        found.append(f"{package.file(module)}:{node.name}.{ast.unparse(member.target)}")
    return sorted(set(found))


def untyped_annotations(function: Function) -> Iterator[str]:
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    for annotation in (*(argument.annotation for argument in every if argument is not None), function.returns):
        if annotation is not None and UNTYPED.search(ast.unparse(annotation)):
            yield ast.unparse(annotation)


def named(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def cuda_outside_its_file(package: Package) -> list[str]:
    found = []
    for module in package.modules.values():
        file = package.file(module)
        if file == ACCELERATOR or KERNELS.search(file):
            continue
        for node in module.nodes:
            attribute = isinstance(node, ast.Attribute) and node.attr == "cuda" and named(node.value) == "torch"
            if attribute or imports_of(node, "torch.cuda"):
                found.append(f"{file}:{getattr(node, 'lineno', 0)}")
    return found


def environment_outside_its_file(package: Package) -> list[str]:
    found = set()
    for module in package.modules.values():
        for node in module.nodes:
            attribute = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv", "unsetenv")
            imported = isinstance(node, ast.ImportFrom) and node.module == "os"
            if attribute or (imported and {alias.name for alias in node.names} & {"environ", "getenv"}):
                found.add(package.file(module))
    return sorted(found - {ENVIRONMENT})


def long_files(package: Package) -> list[str]:
    lengths = {package.file(module): len(module.text.splitlines()) for module in package.modules.values()}
    return [f"{file}: {length} lines" for file, length in lengths.items() if length > MAX_FILE_LINES]


def long_functions(package: Package) -> list[str]:
    return [
        f"{package.file(module)}:{node.name}"
        for module in package.modules.values()
        for node in module.functions
        if node.end_lineno and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]


def many_parameters(package: Package) -> list[str]:
    found = []
    for module in package.modules.values():
        for node in module.functions:
            arguments = node.args
            names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            count = len(names) + bool(arguments.vararg) + bool(arguments.kwarg) - (names[:1] in (["self"], ["cls"]))
            # A verb of the command line declares one parameter per option.
            verb = module.room == "cli" and module.path.stem.endswith("_cmd") and not node.name.startswith("_")
            # What a kernel reads and writes are its arguments; torch and Triton take no structures.
            words = {word for decorator in node.decorator_list for word in ast.unparse(decorator).replace("(", ".").split(".")}
            kernel = module.room == "kernels" and bool(words & {"jit", "operation", "register_fake"})
            if count > MAX_PARAMETERS and not verb and not kernel:
                found.append(f"{package.file(module)}:{node.name}")
    return found


def missing_docstrings(package: Package) -> list[str]:
    # An empty __init__ has nothing to say.
    return [package.file(m) for m in package.modules.values() if m.text.strip() and not ast.get_docstring(m.tree)]


def global_statements(package: Package) -> list[str]:
    return [
        f"{package.file(module)}:{node.lineno}"
        for module in package.modules.values()
        for node in module.nodes
        if isinstance(node, ast.Global)
    ]


def unfinished_work(package: Package) -> list[str]:
    unfinished = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    return [package.file(module) for module in package.modules.values() if unfinished.search(module.text)]


Files = dict[str, str]
"""Path → text."""

RULES: dict[Callable[[Package], list[str]], list[Files]] = {
    import_circles: [
        {
            "a/one.py": "def f():\n    from phalanx.a import two\n",
            "a/two.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from phalanx.a.one import f\n",
        }
    ],
    names_used_twice: [{"a/split.py": "", "b/split.py": ""}],
    mocks_and_patches: [
        {"a/one.py": "from unittest import mock\n"},
        {"a/one.py": "import unittest.mock\n"},
        {"a/one.py": "from phalanx.b import two\ntwo.f = None\n", "b/two.py": "f = 1\n"},
        {"a/one.py": "from phalanx.b.two import Thing\nsetattr(Thing, 'x', 1)\n", "b/two.py": "class Thing: ...\n"},
    ],
    untyped_contracts: [
        {"a/one.py": "from phalanx.b.two import f\n", "b/two.py": "def f() -> dict[str, Any]: ...\n"},
        {
            "a/one.py": "from phalanx.b import two\ntwo.C\n",
            "b/two.py": "class C:\n    def f(self, x: Mapping[str, Any]): ...\n",
        },
        {"a/one.py": "from phalanx.b.two import C\n", "b/two.py": "class C:\n    x: dict[str, Any]\n"},
    ],
    cuda_outside_its_file: [
        {"a/one.py": "torch.cuda.synchronize()\n"},
        {"a/one.py": "from torch import cuda\n"},
        {"a/one.py": "import torch.cuda\n"},
    ],
    environment_outside_its_file: [
        {"a/one.py": "os.environ['A']\n"},
        {"a/one.py": "os.getenv('A')\n"},
        {"a/one.py": "from os import getenv as g\n"},
    ],
    long_files: [{"a/one.py": "x = 1\n" * (MAX_FILE_LINES + 1)}],
    long_functions: [{"a/one.py": "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES}],
    many_parameters: [{"a/one.py": "def f(a, b, c, d, e, f, g): ...\n"}],
    missing_docstrings: [{"a/one.py": "x = 1\n"}],
    global_statements: [{"a/one.py": "def f():\n    global x\n    x = 1\n"}],
    unfinished_work: [{"a/one.py": "# TODO: later\n"}],
}
"""Every rule, with packages that break it."""

PHALANX = Package(Path(__file__).parents[1] / "phalanx")


def test_the_package_is_found() -> None:
    assert len(PHALANX.modules) > 100 and "phalanx.training.trainer" in PHALANX.modules


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Callable[[Package], list[str]]) -> None:
    violations = rule(PHALANX)
    assert not violations, f"{rule.__name__}:\n" + "\n".join(violations)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_fails_on_planted_violations(rule: Callable[[Package], list[str]], tmp_path: Path) -> None:
    for number, files in enumerate(RULES[rule]):
        root = tmp_path / str(number) / "phalanx"
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        assert rule(Package(root)), f"{rule.__name__} does not see {files}"
        (root / path).unlink()
        for other in root.rglob("*.py"):
            other.write_text('"""Harmless."""\n')
        assert not rule(Package(root))


def test_strongly_connected_components() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert Counter(frozenset(component) for component in strongly_connected(arrows)) == Counter(
        map(frozenset, ({"a", "b", "c"}, {"d", "e"}, {"f"}))
    )
