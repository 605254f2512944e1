"""The rules that keep the tree readable: who may import whom, and what no file may do. Checked on the source text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedtailor

ROOT = Path(fedtailor.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    """``server/loop.py`` is ``server.loop``; a package is its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in MODULES.items()}


def imported_names(module: str) -> Iterator[tuple[int, str]]:
    """Every module that a file imports, also inside functions and for type checking, with its line."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join(["fedtailor", *filter(None, above), *filter(None, [base])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                whole = inner if inner.removeprefix("fedtailor.") in MODULES else base
                yield node.lineno, whole


def own_imports(module: str) -> set[str]:
    """The parts of fedtailor that a file imports, without the leading ``fedtailor.``."""
    names = (name for _, name in imported_names(module))
    return {name.removeprefix("fedtailor").lstrip(".") for name in names if name.split(".")[0] == "fedtailor"}


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def members(package: str) -> list[str]:
    return [module for module in MODULES if inside(module, package)]


def test_the_source_is_found():
    """If the walk found nothing, every rule below would hold."""
    assert len(FILES) > 40
    for package in ("elastic", "client", "server", "methods", "engines", "fleet", "data", "models"):
        assert members(package), package
    assert "elastic.cut" in own_imports("round")
    assert "methods" in own_imports("methods.fedavg")


# Which packages a package must not know.
FORBIDDEN = {
    "elastic": ["methods", "method", "round", "server", "engines", "fleet", "cli", "config", "report", "run"],
    "client": ["methods", "server.loop", "engines", "fleet", "cli", "config", "report", "run"],
    "engines": ["server.loop", "methods", "cli", "config", "report", "run"],
    "fleet": ["methods", "method", "engines", "server.loop", "cli", "config", "report", "run"],
    "data": ["methods", "method", "round", "client", "engines", "fleet", "cli", "config", "report", "run", "elastic"],
    "models": ["methods", "method", "round", "client", "server", "engines", "fleet", "cli", "config", "elastic", "run"],
    "server": ["methods", "cli", "config", "report", "run"],
    "round": ["methods", "method", "client", "engines", "fleet", "cli", "config", "report", "run", "server.loop"],
    "method": ["methods", "engines", "fleet", "cli", "config", "report", "run", "server.loop"],
}  # fmt: skip
EXCEPTIONS = {("elastic", "server.seeds"), ("elastic", "server.merging"), ("models", "server.seeds")}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package):
    wrong = [
        f"{module} imports {name}"
        for module in members(package)
        for name in own_imports(module)
        for forbidden in FORBIDDEN[package]
        if inside(name, forbidden) and (package, name) not in EXCEPTIONS and not inside(name, package)
    ]
    assert wrong == []


METHODS_MAY_IMPORT = (
    "elastic", "client", "server.merging", "server.seeds", "data.batches", "round", "method", "methods", "errors",
    "report.panel", "report.grouping", "report.coverage",  # what panels are made of
)  # fmt: skip


def test_a_method_knows_the_mathematics_and_not_the_machinery():
    wrong = [
        f"{module} imports {name}"
        for module in members("methods")
        for name in own_imports(module)
        if not any(inside(name, allowed) for allowed in METHODS_MAY_IMPORT)
    ]
    assert wrong == []


def test_nothing_imports_the_command_line():
    """``python -m fedtailor`` is the command line."""
    known = [m for m in MODULES if not inside(m, "cli") and any(inside(n, "cli") for n in own_imports(m))]
    assert known == ["__main__"]


def test_errors_stand_alone():
    assert own_imports("errors") == set()


def test_modules_import_each_other_in_no_circle():
    """At the top of files; imports for type checking and inside functions run later or never."""
    graph = {module: set(_at_the_top(module)) for module in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        for other in graph[module]:
            visit(other, (*path, module))
        done.add(module)

    # The package of methods imports its members, and they import ``register`` from it: by design, the one circle.
    graph["methods"] = set()
    for module in graph:
        visit(module, ())


def _at_the_top(module: str) -> Iterator[str]:
    own = {node.lineno for node in TREES[module].body if isinstance(node, ast.Import | ast.ImportFrom)}
    for line, name in imported_names(module):
        inner = name.removeprefix("fedtailor").lstrip(".")
        if line in own and name.startswith("fedtailor.") and inner in MODULES and inner != module:
            yield inner


# What is read is data, never code. The one exception reads what this process wrote into memory for its own child.
MAY_PICKLE = {"engines.luggage"}
UNWANTED = {
    "torchvision",
    "timm",
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "shelve",
    "marshal",
    "joblib",
    "random",
}


def test_no_file_imports_what_the_project_does_without():
    wrong = [
        f"{module}, line {line}: {name}"
        for module in MODULES
        for line, name in imported_names(module)
        if name.split(".")[0] in (UNWANTED - {"pickle"} if module in MAY_PICKLE else UNWANTED)
    ]
    assert wrong == []


def dotted(node: ast.AST) -> str:
    """``torch.random.manual_seed`` of an attribute chain; empty where it starts with something else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


RUNS_CODE = {"eval", "exec", "compile", "__import__", "torch.load", "torch.jit.load", "os.system", "os.popen"}


def code_runners(tree: ast.AST) -> Iterator[str]:
    """``torch.load`` is no boundary even with ``weights_only``; ``np.load`` is one only without pickles."""
    for name, call in calls(tree):
        words = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if (
            name in RUNS_CODE
            or words.get("allow_pickle", "False") != "False"
            or words.get("shell", "False") != "False"
        ):
            yield f"line {call.lineno}: {name}"


def test_no_file_runs_code_that_it_read():
    assert [f"{module}, {found}" for module, tree in TREES.items() for found in code_runners(tree)] == []


DRAWS = {
    "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson",
    "rand_like", "randn_like", "randint_like",
}  # fmt: skip
DRAWS_IN_PLACE = {
    "random_",
    "uniform_",
    "normal_",
    "bernoulli_",
    "exponential_",
    "geometric_",
    "cauchy_",
    "log_normal_",
}
GENERATORS = {"default_rng", "Generator", "SeedSequence", "PCG64", "Philox"}  # of NumPy: explicit, not global


SEEDING = {"manual_seed", "manual_seed_all", "seed", "set_rng_state", "default_generator"}


def global_draws(tree: ast.AST) -> Iterator[str]:
    """Everything that reads or sets the state of a global generator."""
    for name, call in calls(tree):
        owner, _, last = name.rpartition(".")
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        seeded = any(word.arg == "generator" for word in call.keywords)
        legacy = owner in ("np.random", "numpy.random") and last not in GENERATORS
        unseeded = owner in ("np.random", "numpy.random") and last == "default_rng" and not call.args
        drawn = owner == "torch" and last in DRAWS and not seeded
        in_place = (
            method in DRAWS_IN_PLACE and not seeded and owner.split(".")[-1] != "init"
        )  # nn.init: inside a scope
        if legacy or unseeded or drawn or in_place or (owner.split(".")[0] == "torch" and last in SEEDING):
            yield f"line {call.lineno}: {name or method}"


def test_randomness_is_derived_and_never_global():
    others = {module: tree for module, tree in TREES.items() if module != "server.seeds"}
    assert [f"{module}, {found}" for module, tree in others.items() for found in global_draws(tree)] == []


def test_the_one_place_that_seeds_pytorch_is_seen_by_the_rule():
    assert [line.partition(": ")[2] for line in global_draws(TREES["server.seeds"])] == ["torch.manual_seed"]


BAD = """
eval(text)
torch.load(path, weights_only=True)
np.load(path, allow_pickle=True)
subprocess.run(line, shell=True)
np.random.seed(0)
np.random.rand(3)
np.random.default_rng()
torch.rand(3)
torch.manual_seed(0)
weight.data.normal_()
torch.cuda.manual_seed_all(1)
"""
GOOD = """
pattern.compile(text)
np.load(path)
np.load(path, allow_pickle=False)
np.random.default_rng(0)
torch.rand(3, generator=generator)
weight.normal_(generator=generator)
nn.init.normal_(weight)
generator.manual_seed(0)
"""


def test_the_rules_see_what_they_should():
    tree = ast.parse(BAD)
    seen = [*code_runners(tree), *global_draws(tree)]
    assert [int(line.split(":")[0].removeprefix("line ")) for line in seen] == list(range(2, 13))
    tree = ast.parse(GOOD)
    assert [*code_runners(tree), *global_draws(tree)] == []


LARGEST_FILE, LARGEST_FUNCTION = 400, 60
LARGEST = {"method": 150, **dict.fromkeys(members("methods"), 250)}


def test_files_and_functions_stay_readable():
    """The limits of the architecture, in lines: method.py 150, a method 250, any file 400, a function 60."""
    wrong = []
    for module, path in MODULES.items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > LARGEST.get(module, LARGEST_FILE):
            wrong.append(f"{module}: {lines} lines")
        for node in ast.walk(TREES[module]):
            length = node.end_lineno - node.lineno + 1 if isinstance(node, ast.FunctionDef) else 0
            if length > LARGEST_FUNCTION:
                wrong.append(f"{module}.{node.name}: {length} lines")
    assert wrong == []
