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
    assert len(FILES) > 150
    assert "elasticity.cutting.cut" in own_imports("messages")
    assert "methods.registry" in own_imports("methods.fedavg")


# From the ground up. A room may import from lower floors alone: not from its own, not from above, at no time and for no
# purpose (imports inside functions and for type checking count).
FLOORS: list[set[str]] = [
    {"errors", "seeds", "record", "cards", "steps", "toml_text"},  # what everyone needs and what needs nobody
    {"importing"},
    {"data", "models", "trackers"},
    {"objective"},
    {"elasticity"},  # module -> groups -> cut -> patch; what pieces cost, and how they run
    {"messages", "charts"},
    {"client", "fleet", "merging"},
    {"method"},
    {"methods", "storage"},
    {"privacy"},
    {"secure"},  # it shares the sums of private rounds
    {"engines", "audit"},
    {"server"},
    {"anchoring"},
    {"config"},
    {"report"},  # made from run folders alone
    {"progress"},
    {"run"},
    {"sweep", "flower", "deploying", "attacks"},
    {"cli"},
    {"__main__"},
]
# The same inside rooms that have rooms of their own.
INNER_FLOORS: dict[str, list[set[str]]] = {
    "elasticity": [
        {"groups"},
        {"cutting"},
        {"tracing"},
        {"running"},
        {"costing"},
        {"explain"},
        {"model"},
        {"check", "own_loss"},
        {"adapters"},
        {"front_door"},
    ],
    "methods": [
        {"registry", "dropping", "nested", "pruning", "masks"},
        {
            "apfl",
            "auto",
            "depth",
            "fedavg",
            "federated_dropout",
            "fiarse",
            "fjord",
            "flanc",
            "heterofl",
            "low_rank",
            "ofa_fl",
            "splitmix",
            "uniprob",
        },
        {"fedrolex", "flado", "tailor"},  # they extend HeteroFL, UniProb and FjORD
    ],
    "deploying": [
        {"inputs", "int8"},
        {"network"},
        {"formats"},
        {"memory", "scoring", "card", "picking", "wanted"},
        {"making"},
        {"bundle"},
        {"checking"},
    ],
    "engines": [
        {"settings", "answers"},
        {"protocol"},
        {"values"},
        {"in_process", "workers", "flower"},
        {"automatic"},
        {"opening"},
    ],
}


def room_of(module: str, package: str) -> str:
    """The child of a package that a module lies in; empty for the package itself and for what lies elsewhere."""
    if package and not module.startswith(f"{package}."):
        return ""
    return module.removeprefix(f"{package}." if package else "").split(".")[0]


def wrong_imports(package: str, floors: list[set[str]]) -> list[str]:
    number = {room: floor for floor, rooms in enumerate(floors) for room in rooms}
    there = {room for module in MODULES if module and (room := room_of(module, package))}
    assert there == set(number), (
        f"rooms of {package or 'the house'} that stand on no floor, or floors without a room"
    )
    return [
        f"{module} imports {name}"
        for module in MODULES
        if module and (room := room_of(module, package))
        for name in own_imports(module)
        if (other := room_of(name, package)) in number and other != room and number[other] >= number[room]
    ]


def test_every_room_imports_from_lower_floors_alone():
    assert wrong_imports("", FLOORS) == []


@pytest.mark.parametrize("package", INNER_FLOORS)
def test_rooms_inside_a_room_have_floors_too(package):
    assert wrong_imports(package, INNER_FLOORS[package]) == []


def test_an_import_from_the_same_floor_or_above_is_seen(monkeypatch):
    monkeypatch.setitem(TREES, "seeds", ast.parse("def f():\n    from fedtailor.run.interface import train"))
    monkeypatch.setitem(
        TREES, "record", ast.parse("if TYPE_CHECKING:\n    from fedtailor.errors import require")
    )
    assert wrong_imports("", FLOORS) == [
        "record imports errors",
        "seeds imports run.interface",
    ]


PACKAGES = sorted({module.rpartition(".")[0] for module in MODULES})


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_holds_a_ring(package):
    """Of its files and folders, whether they have floors above or not."""
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        room = room_of(module, package) if module != package else ""
        if not room or (not package and not module):
            continue
        rooms = {room_of(name, package) for name in own_imports(module) if name != package}
        graph.setdefault(room, set()).update(rooms - {room, ""})
    done: set[str] = set()

    def visit(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, " -> ".join([*path[path.index(room) :], room])
        if room not in done:
            for other in graph.get(room, ()):
                visit(other, (*path, room))
            done.add(room)

    for room in graph:
        visit(room, ())


# A method knows the mathematics and not the machinery: floors alone would allow it more.
METHODS_MAY_IMPORT = (
    "charts", "client", "data.batches", "elasticity", "errors", "importing", "merging", "messages", "method", "methods",
    "objective", "seeds",
)  # fmt: skip


def test_a_method_knows_the_mathematics_and_not_the_machinery():
    wrong = [
        f"{module} imports {name}"
        for module in members("methods")
        for name in own_imports(module)
        if not any(inside(name, allowed) for allowed in METHODS_MAY_IMPORT)
    ]
    assert wrong == []


EXTENDED_BY = {"fjord": {"tailor"}}


def test_a_paper_is_a_folder_that_nobody_else_knows():
    """Deleting the folder deletes the method: only what extends it imports it, and that is a method too."""
    papers = [path.parent.name for path in ROOT.glob("methods/*/__init__.py")]
    known = ["apfl", "depth", "fiarse", "fjord", "flado", "flanc", "low_rank", "ofa_fl", "tailor"]
    assert sorted(papers) == known
    for paper in papers:
        home = f"methods.{paper}"
        outside = [m for m in MODULES if not inside(m, home) and any(inside(n, home) for n in own_imports(m))]
        assert {room_of(m, "methods") for m in outside} == EXTENDED_BY.get(paper, set()), paper


# What is read is data, never code. The one exception reads what this process wrote into memory for its own child.
MAY_PICKLE = {"engines.workers.luggage"}
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
    others = {module: tree for module, tree in TREES.items() if module != "seeds"}
    assert [f"{module}, {found}" for module, tree in others.items() for found in global_draws(tree)] == []


def test_the_one_place_that_seeds_pytorch_is_seen_by_the_rule():
    found = [line.partition(": ")[2] for line in global_draws(TREES["seeds"])]
    assert found == ["torch.manual_seed", "torch.default_generator.manual_seed"]


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


LARGEST_FILE, LARGEST_FUNCTION, MOST_PARAMETERS, MOST_FILES = 350, 50, 8, 15
MAIN_FILES = [  # of methods: what a paper does, without its mathematics
    "methods.apfl.apfl", "methods.apfl.fedcs", "methods.apfl.fedpa", "methods.fiarse.fiarse",
    "methods.fjord.fjord", "methods.flado.flado", "methods.flanc.flanc", "methods.low_rank.hetlora",
    "methods.low_rank.flexlora", "methods.ofa_fl.ofa_fl",
    "methods.fedavg", "methods.federated_dropout", "methods.fedrolex", "methods.heterofl", "methods.splitmix",
    "methods.tailor.tailor", "methods.uniprob",
]  # fmt: skip
LARGEST = dict.fromkeys(MAIN_FILES, 220)
# Whose parameters are the settings of a run, and what a person says about a module.
PUBLIC_CALLS = ("run.interface.train", "elasticity.front_door.elastic")


def functions(module: str) -> Iterator[tuple[str, ast.FunctionDef, int]]:
    """Every function, with the number of its parameters, ``self`` aside; ``*args`` and ``**kwargs`` are one each."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef):
            given = node.args
            rest = [each for each in (given.vararg, given.kwarg) if each]
            names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, *rest)]
            yield f"{module}.{node.name}", node, len(names) - (names[:1] in (["self"], ["cls"]))


def test_files_and_functions_stay_readable():
    """A file 350 lines, a method's main file 220, a function 50, parameters 8."""
    wrong = []
    for module, path in MODULES.items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > LARGEST.get(module, LARGEST_FILE):
            wrong.append(f"{module}: {lines} lines")
        for name, node, parameters in functions(module):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > LARGEST_FUNCTION and name not in PUBLIC_CALLS:
                wrong.append(f"{name}: {length} lines")
            if parameters > MOST_PARAMETERS and name not in PUBLIC_CALLS:
                wrong.append(f"{name}: {parameters} parameters")
    assert wrong == []


def test_no_folder_is_full():
    counts = {folder: len(list(folder.glob("*.py"))) for folder in {path.parent for path in FILES}}
    assert {folder.name: count for folder, count in counts.items() if count > MOST_FILES} == {}
