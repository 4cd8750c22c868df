"""kernels <- workbench <- experiments <- notebooks: a package imports only what stands to its left."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["kernels", "workbench", "experiments", "notebooks"]

# Inside workbench: a module imports nothing that stands to its right. Folders stand for all their files.
ROOMS = [
    "errors",
    "layout",
    "chunks",
    "events",
    "policies",
    "codecs",
    "tiers",
    "orders",
    "engine",
    "connectors",
    "widgets",
]
ROOM_OF = {
    "errors": "errors", "layout": "layout", "chunks": "chunks", "events": "events", "policies": "policies",
    "codecs": "codecs", "files": "layout", "record": "chunks", "tiers": "tiers", "index": "tiers", "orders": "orders",
    "control": "engine", "transfers": "engine",
    "turns": "errors", "explain": "engine", "engine": "engine", "config": "errors",
    "connectors": "connectors", "widgets": "widgets",
}  # fmt: skip
FORBIDDEN_NAMES = {"utils", "common", "helpers", "managers", "factory", "manager", "backend", "handler", "helper"}


def imports_of(path: Path, *, module_level_only: bool = False) -> set[str]:
    """Dotted names that a file imports, relative ones resolved; without those under `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text())
    package = path.relative_to(ROOT).parts[:-1]
    names: set[str] = set()
    for node in ast.walk(tree) if not module_level_only else _run_on_import(tree.body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [above, node.module]))
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def _run_on_import(body):
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        for part in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                inner = getattr(node, part, [])
                yield from _run_on_import(inner if isinstance(inner, list) else [])


def files_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_left(package):
    to_the_right = set(PACKAGES[PACKAGES.index(package) + 1 :])
    for path in files_of(package):
        wrong = {name for name in imports_of(path) if name.split(".")[0] in to_the_right | {"tests"}}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_rooms_of_the_workbench_point_left():
    for path in files_of("workbench"):
        room = ROOM_OF.get(path.relative_to(ROOT / "workbench").with_suffix("").parts[0])
        for name in imports_of(path, module_level_only=True):
            parts = name.split(".")
            other = ROOM_OF.get(parts[1]) if parts[0] == "workbench" and len(parts) > 1 else None
            if room and other:
                assert ROOMS.index(other) <= ROOMS.index(room), f"{path.relative_to(ROOT)} imports {name}"


def test_the_parser_of_this_test_sees_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "kernels").mkdir()
    path = tmp_path / "kernels" / "a.py"
    path.write_text(
        "def f():\n    from workbench import chunks\n\nfrom . import slots\nif TYPE_CHECKING:\n    import torch\n"
    )
    assert {"workbench", "workbench.chunks", "kernels.slots", "torch"} <= imports_of(path)
    assert imports_of(path, module_level_only=True) == {"kernels", "kernels.slots"}


@pytest.mark.parametrize("module, heavy", [
    ("workbench", {"torch", "triton", "vllm", "numba", "polars", "pydantic"}),
    ("workbench.engine", {"torch", "triton", "vllm", "polars"}),
    ("workbench.tiers.disk", {"torch", "triton", "vllm", "polars"}),
    ("kernels.pages", {"torch", "triton", "vllm", "polars"}),
])  # fmt: skip
def test_importing_loads_nothing_heavy(module, heavy):
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not heavy & set(out.stdout.split())


def test_every_public_name_of_the_package_is_there():
    import workbench

    for name in workbench.__all__:
        assert getattr(workbench, name) is not None
    with pytest.raises(AttributeError, match="it has"):
        _ = workbench.CacheEngin


def test_files_are_named_after_one_thing_each():
    for package in PACKAGES[:3]:
        for path in files_of(package):
            assert not FORBIDDEN_NAMES & set(path.stem.split("_")), path
