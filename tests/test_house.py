"""How the house is kept: sizes that stay readable, and lines that know their room. Exceptions are named here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "phalanx"
FILES = sorted(PACKAGE.rglob("*.py"))

MOST_LINES = 400
MOST_LINES_OF_A_FUNCTION = 60
MOST_PARAMETERS = 6
MOST_LINES_OF_THE_TRAINER = 300

LONG_FILES: set[str] = set()
LONG_FUNCTIONS: set[str] = set()
MANY_PARAMETERS: set[str] = set()
"""Exceptions, as "room/file.py" or "room/file.py:function"; each is a debt."""

ENVIRONMENT = "host/env.py"
"""The only file that knows environment variables."""


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def functions() -> Iterator[tuple[str, str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name(path), f"{name(path)}:{node.name}", node


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    taken = function.args
    count = len(taken.posonlyargs) + len(taken.args) + len(taken.kwonlyargs) + bool(taken.vararg) + bool(taken.kwarg)
    first = (taken.posonlyargs + taken.args)[:1]
    return count - (1 if first and first[0].arg in ("self", "cls") else 0)


def kept(found: set[str], exceptions: set[str], rule: str) -> None:
    assert found <= exceptions, f"{rule}: {sorted(found - exceptions)}"
    assert exceptions <= found, f"no longer exceptions, so take them off the list: {sorted(exceptions - found)}"


def test_there_is_a_package() -> None:
    assert len(FILES) > 50 and PACKAGE / "training" / "trainer.py" in FILES


def test_files_are_short() -> None:
    lengths = {name(path): len(path.read_text().splitlines()) for path in FILES}
    kept({file for file, length in lengths.items() if length > MOST_LINES}, LONG_FILES, f"over {MOST_LINES} lines")
    assert lengths["training/trainer.py"] <= MOST_LINES_OF_THE_TRAINER


def test_functions_are_short() -> None:
    found = {
        place for _, place, node in functions() if node.end_lineno and node.end_lineno - node.lineno >= MOST_LINES_OF_A_FUNCTION
    }
    kept(found, LONG_FUNCTIONS, f"over {MOST_LINES_OF_A_FUNCTION} lines")


def test_functions_take_few_parameters() -> None:
    # A verb of the command line declares one parameter per option.
    verbs = {place for file, place, node in functions() if file.endswith("_cmd.py") and not node.name.startswith("_")}
    found = {place for _, place, node in functions() if parameters(node) > MOST_PARAMETERS} - verbs
    kept(found, MANY_PARAMETERS, f"over {MOST_PARAMETERS} parameters")


@pytest.mark.parametrize("path", FILES, ids=name)
def test_file_opens_with_a_docstring(path: Path) -> None:
    if path.read_text():  # a package's empty __init__ has nothing to say
        assert ast.get_docstring(tree(path)), "a file opens with what it is and who calls it"


def test_no_globals() -> None:
    found = {f"{name(path)}:{node.lineno}" for path in FILES for node in ast.walk(tree(path)) if isinstance(node, ast.Global)}
    assert not found


def environment_lines(module: ast.Module) -> Iterator[int]:
    """Where a module touches the environment, however it was imported."""
    for node in ast.walk(module):
        attribute = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv", "unsetenv")
        imported = (
            isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & {"environ", "getenv"}
        )
        if attribute or imported:
            yield node.lineno


def test_only_one_file_knows_the_environment() -> None:
    found = {name(path) for path in FILES if any(environment_lines(tree(path)))}
    assert found == {ENVIRONMENT}


def test_environment_is_found_however_it_is_spelled() -> None:
    for code in (
        "import os\nos.environ['A']",
        "import os\nos.getenv('A')",
        "from os import environ",
        "from os import getenv as g",
    ):
        assert list(environment_lines(ast.parse(code)))
    assert not list(environment_lines(ast.parse("import os\nos.getpid()")))


def test_nothing_is_left_for_later_in_comments() -> None:
    unfinished = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = {f"{name(p)}:{n}" for p in FILES for n, line in enumerate(p.read_text().splitlines(), 1) if unfinished.search(line)}
    assert not found
