"""The import rules of the design, read from the source of every module, and what must start light."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import regatta

PACKAGE = Path(regatta.__file__).parent

# Imports point down only. Within a layer, modules of one package may import each other; siblings may not,
# except as SIDEWAYS says.
LAYERS = [
    {"types", "errors", "codec", "seeding", "named"},
    {"policies", "transport", "fleet", "store"},
    {"algorithms", "rollout", "runs"},
    {"crew", "dispatch", "learner", "worker", "interrupt", "account"},
    {"knobs", "config"},
    {"assemble"},
    {"cli", "dashboard"},
]
SIDEWAYS = {
    ("codec", "types"),
    ("codec", "errors"),
    ("named", "errors"),
    ("runs", "rollout"),
    ("dispatch", "crew"),
    ("account", "dispatch"),
    ("learner", "account"),
    ("learner", "dispatch"),
    ("config", "knobs"),
    ("cli", "dashboard"),
}

ANYWHERE = {"numpy", "msgspec"}
LIBRARIES = {  # each third-party library: the files, or the packages, that may import it
    "envpool": {"rollout/pool.py"},
    "gymnasium": {"rollout/"},
    "jax": {"algorithms/", "policies/"},
    "nevergrad": {"algorithms/blackbox.py"},
    "obstore": {"store/objects.py"},
    "optax": {"algorithms/"},
    "rich": {"cli/"},
    "safetensors": {"runs/checkpoint.py"},
    "scipy": {"policies/noise.py"},
    "threadpoolctl": {"assemble.py", "worker.py"},
    "typer": {"cli/main.py"},
    "zmq": {"transport/wire.py", "transport/zeromq.py"},
}
BANNED_IMPORTS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch"}
BANNED_CALLS = re.compile(
    r"(builtins\.)?(eval|exec|__import__)|(np|jnp|numpy|jax\.numpy|yaml|torch|pickle|marshal|joblib)\.(load|loads|unsafe_load)"
)


def sources() -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("regatta", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = sources()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
CHECKED = [name for name in MODULES if name != "regatta"]  # the package itself only forwards names, lazily


def imports(module: str, *, inside: bool = True) -> set[str]:
    """The dotted names a module imports at its top and, unless told otherwise, inside its functions."""
    names = set()
    for node in ast.walk(TREES[module]) if inside else TREES[module].body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively; say the whole name"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names.add(whole if whole in MODULES else str(node.module))
    return names


def part(module: str) -> str:
    """The package or file of the layer table a module belongs to."""
    return module.split(".")[1]


def layer(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def test_every_module_has_its_layer() -> None:
    assert {part(module) for module in CHECKED} <= set().union(*LAYERS)


@pytest.mark.parametrize("module", CHECKED)
def test_imports_point_down(module: str) -> None:
    here = part(module)
    for name in imports(module):
        if not name.startswith("regatta."):
            continue
        there = part(name)
        if there == here or (here, there) in SIDEWAYS:
            continue
        assert layer(there) < layer(here), f"{module} imports {name}, which is not below it"


def test_no_cycles() -> None:
    """A base that loads its backends when asked, inside a function, makes no cycle; packages make none at all."""
    modules = {module: imports(module, inside=False) & MODULES.keys() - {"regatta"} for module in CHECKED}
    packages: dict[str, set[str]] = {}
    for module in CHECKED:
        others = {part(name) for name in imports(module) if name.startswith("regatta.")}
        packages.setdefault(part(module), set()).update(others - {part(module)})
    for graph in (modules, packages):
        assert_acyclic(graph)


def assert_acyclic(graph: dict[str, set[str]]) -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("module", CHECKED)
def test_each_library_has_its_files(module: str) -> None:
    path = MODULES[module].relative_to(PACKAGE).as_posix()
    for name in {name.split(".")[0] for name in imports(module)} - {"regatta"} - ANYWHERE:
        if name in sys.stdlib_module_names:
            continue
        allowed = LIBRARIES.get(name, set())
        assert any(path == where or (where.endswith("/") and path.startswith(where)) for where in allowed), (
            f"{path} imports {name}; it is for {sorted(allowed) or 'nobody: see LIBRARIES in this test'}"
        )


def test_the_vocabulary_needs_only_numpy_and_msgspec() -> None:
    for module in CHECKED:
        if layer(part(module)) == 0:
            others = {name.split(".")[0] for name in imports(module)} - sys.stdlib_module_names
            assert others <= {"numpy", "msgspec", "regatta"}


@pytest.mark.parametrize("module", MODULES)
def test_nothing_that_can_run_what_arrives(module: str) -> None:
    for name in imports(module):
        assert name.split(".")[0] not in BANNED_IMPORTS, f"{module} imports {name}"
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert not BANNED_CALLS.fullmatch(called), f"{module}:{node.lineno} calls {called}"
        if isinstance(node, ast.keyword):
            assert node.arg != "allow_pickle", f"{module}:{node.value.lineno} mentions allow_pickle"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_left_to_do(module: str) -> None:
    left = re.findall(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b", MODULES[module].read_text())
    assert not left


# -- in fresh processes -----------------------------------------------------------------------------------


def loaded_after(code: str) -> set[str]:
    """Top-level names in sys.modules once a fresh interpreter has run `code`."""
    script = f"{code}\nimport json, sys\nprint('\\n' + json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def modules_of(*packages: str) -> list[str]:
    return [m for m in CHECKED if any(m == f"regatta.{p}" or m.startswith(f"regatta.{p}.") for p in packages)]


def optional_libraries_missing(module: str) -> bool:
    """Whether a backend's own library is not installed here."""
    libraries = {name.split(".")[0] for name in imports(module)} - {"regatta"} - sys.stdlib_module_names
    return any(importlib.util.find_spec(name) is None for name in libraries)


def test_bytes_commands_and_keys_never_start_jax() -> None:
    names = [m for m in modules_of("transport", "fleet", "store", "dashboard") if not optional_libraries_missing(m)]
    assert len(names) > 5
    loaded = loaded_after("\n".join(f"import {name}" for name in names))
    assert not loaded & {"jax", "jaxlib", "optax", "gymnasium"}


@pytest.mark.parametrize("module", ["regatta.worker", "regatta.cli.main", "regatta.config", "regatta.runs.run"])
def test_programs_start_without_jax(module: str) -> None:
    assert not loaded_after(f"import {module}") & {"jax", "jaxlib", "optax"}


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_is_light(arguments: list[str]) -> None:
    code = (
        f"import sys\nsys.argv = ['regatta', *{arguments!r}]\n"
        "from regatta.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )
    assert not loaded_after(code) & {"jax", "jaxlib", "numpy", "gymnasium", "optax", "zmq", "obstore"}


def test_the_package_itself_is_light() -> None:
    assert not loaded_after("import regatta\nassert regatta.__version__") & {"jax", "numpy", "msgspec", "gymnasium"}
