"""The documentation: its examples run, its files and commands are accepted, its reference holds all there is."""

from __future__ import annotations

import importlib
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

import fedtailor
from fedtailor.cli.main import app
from fedtailor.config import RunConfig, make_config
from fedtailor.data import DataSettings, FederatedData, load_federated
from fedtailor.method import SECTIONS
from fedtailor.methods import registry
from fedtailor.methods.registry import get_method, method_names
from fedtailor.run.interface import run_config, train
from fedtailor.seeds import Seeds

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
SMALL = {"rounds": 1, "clients_per_round": 2, "evaluate_every": 1, "engine": {"workers": 0}}

# What a page takes for granted: names that its reader has.
GIVEN = {
    "your-own-model.md": """
        from fedtailor import elastic
        class MyNetwork(nn.Sequential):
            def __init__(self):
                super().__init__(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
        class MyGatedLayer(nn.Module): pass
        class Parts(nn.Module):
            def __init__(self):
                super().__init__()
                self.stem, self.blocks = nn.Linear(4, 16), nn.ModuleList([nn.Sequential(nn.Linear(16, 16))])
                self.position = nn.Parameter(torch.zeros(16))
                self.encoder = nn.ModuleDict({"out": nn.Linear(16, 8)})
                self.decoder = nn.ModuleDict({"in_proj": nn.Linear(16, 8)})
                self.head = nn.Linear(16, 3)
            def forward(self, x):
                x = self.blocks[0](self.stem(x) + self.position)
                return self.head(torch.cat([self.encoder["out"](x), self.decoder["in_proj"](x)], 1))
        images, labels = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])
        module, example = Parts(), (torch.randn(4, 4), torch.zeros(4).long())
    """,
    "training.md": """
        module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        data = torch.randn(60, 3), torch.arange(60) % 2
    """,
    "data.md": """
        from pathlib import Path
        import fedtailor
        from fedtailor.data import Examples, FederatedData
        path = Path("split.safetensors")
        x_train, y_train = torch.randn(20, 3), torch.arange(20) % 2
        x_test, y_test = torch.randn(6, 3), torch.arange(6) % 2
        writers, test_writers = ["ada"] * 12 + ["bob"] * 8, ["ada"] * 6
        tokens, mask, labels = torch.zeros(4, 5).long(), torch.ones(4, 5), torch.zeros(4).long()
        class Reader(nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.answer = nn.Embedding(50, 4), nn.Linear(4, 2)
            def forward(self, x):
                return self.answer(self.words(x).mean(1))
        lines = ['{"text": "what a film", "label": "good"}', '{"text": "so very dull", "label": "bad"}']
        Path("films.jsonl").write_text("\\n".join(lines * 60))
        run = fedtailor.train(Reader(), "films.jsonl")
        small = run.submodel(0.5)
    """,
    "adding-a-method.md": "module, data = small_module(), small_data()",
    "runs.md": "import fedtailor\nmodule, data = small_module(), small_data()",
    "fleet.md": "import fedtailor\nmodule, data = small_module(), small_data()",
    "choosing-a-method.md": "module, data = small_module(), small_data()",
    "deploy.md": """
        import fedtailor
        module, data = small_module(), small_data()
        run = fedtailor.train(module, data, method="fjord")
    """,
    "methods/fiarse.md": "import fedtailor\nmodule, data = small_module(), small_data()",
    "methods/ofa-fl.md": """
        import fedtailor
        from fedtailor import Budget, Fleet
        from fedtailor.fleet import Tier
        fleet = Fleet((Tier("small", Budget(density=0.2), 1), Tier("large", Budget(density=1), 1)))
        run = fedtailor.train(small_module(), small_data(), method="ofa-fl", fleet=fleet)
    """,
}
NEEDS_LONG_RUNS = {
    "adapters.md",  # needs an extra: run by tests/zoo
    "methods/flanc.md",
    "methods/apfl.md",
}  # what they read off runs of an hour is tested with the methods


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT / "docs")) if page.is_relative_to(ROOT / "docs") else page.name


def blocks(page: Path, language: str) -> list[str]:
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [textwrap.dedent(each["text"]) for each in found if each["language"] == language]


def small_module() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 5, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(20, 10)
    )


def small_data(dataset: str = "fashion-mnist-8k") -> FederatedData:
    data = load_federated(DataSettings(dataset=dataset, clients=5, limit=60), Seeds(0))
    return replace(data, test=data.test.subset(torch.arange(20)))


def small_train(module: nn.Module, data: FederatedData | str, *args: Any, **settings: Any) -> fedtailor.Run:
    """``train`` with the rounds and the examples of a test."""
    return train(module, small_data(data) if isinstance(data, str) else data, *args, **{**settings, **SMALL})


WITH_EXAMPLES = [
    page for page in PAGES if blocks(page, "python") and page.name != "python.md"
]  # has a test of its own


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The blocks of a page, one after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fedtailor, "train", small_train)
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))  # what a page registers ends with it
    if name_of(page) in NEEDS_LONG_RUNS:
        for block in blocks(page, "python"):
            compile(block, name_of(page), "exec")
        return
    if "runs/first" in page.read_text(encoding="utf-8"):
        tables = {"data": {"clients": 5, "limit": 60}, "model": {"name": "mlp", "hidden": [10]}, **SMALL}
        run_config(make_config(tables), Path("runs/first"))
    names: dict[str, Any] = {"torch": torch, "nn": nn, "small_module": small_module, "small_data": small_data}
    exec(textwrap.dedent(GIVEN.get(name_of(page), "")), names)
    for number, block in enumerate(blocks(page, "python"), 1):
        code = compile(block, f"{name_of(page)}, example {number}", "exec")
        if "from transformers" not in block or find_spec("transformers") is not None:
            exec(code, names)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=name_of)
def test_settings_are_accepted(page: Path):
    for block in blocks(page, "toml"):
        settings = tomllib.loads(block)
        if "project" not in settings:  # of a package's pyproject.toml
            make_config(settings)


def commands() -> Iterator[tuple[str, str]]:
    """Every ``fedtailor ...`` line of every page, without its comment; a backslash goes on with the next line."""
    known = "|".join([*typer.main.get_command(app).commands, "[a-z]+ --?[a-z]"])
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(rf"^(?: {{4}})?(fedtailor (?:{known}) .*)$", text, re.MULTILINE):
            yield name_of(page), line


def test_commands_are_accepted():
    """Each line is parsed by the command it names: a command or an option that is gone is found, nothing is run."""
    told = list(commands())
    assert len(told) > 40
    for page, line in told:
        words = shlex.split(line, comments=True)[1:]
        group = typer.main.get_command(app)
        context = group.context_class(group)
        while hasattr(group, "resolve_command"):
            name, group, words = group.resolve_command(context, words)
        assert group.make_context(name, words, parent=context), (page, line)


def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("reference")


def test_reference_has_every_setting_with_its_meaning(monkeypatch):
    made = reference(monkeypatch)
    page, sections = made.configuration_page(), made.sections()
    assert {"data", "fleet", "training", "stopping", "checkpoint", "engine"} <= set(sections)
    for item in fields(RunConfig):
        assert f"## [{item.name}]" in page or f"| `{item.name}` |" in page
    for name, owner in sections.items():
        part = page.partition(f"## [{name}]")[2].partition("\n## ")[0]
        for item in fields(owner):
            if (name, item.name) != ("training", "rounds"):  # the run sets it
                assert re.search(rf"^\| `{item.name}` \| .+ \| .+ \| .+ \|$", part, re.MULTILINE), (
                    name,
                    item.name,
                )


def test_reference_has_every_method_with_every_setting(monkeypatch):
    page = reference(monkeypatch).methods_page()
    assert len(method_names()) > 10
    for name in method_names():
        part = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert part, name
        for item in fields(get_method(name)):
            if item.name not in SECTIONS:
                row = rf"^\| `{item.name}` \| .+ \| .+ \| .+ \|$"
                assert re.search(row, part, re.MULTILINE), (name, item.name)


def test_reference_has_every_public_name(monkeypatch):
    page = reference(monkeypatch).python_page()
    assert [f"fedtailor.{name}" for name in fedtailor.__all__] == re.findall(
        r"^## (fedtailor\.\w+)$", page, re.MULTILINE
    )


def test_links_out_of_the_site_are_names_and_broken_ones_are_refused(monkeypatch):
    made = reference(monkeypatch)
    told = "[a](fleet.md), [the example](../examples/your_own_data.py), [`b.json`](../reproduce/fjord/results.json)"
    assert made.within_site("[a](fleet.md)", "data.md") == "[a](fleet.md)"
    assert "the example (`examples/your_own_data.py`)" in made.within_site(told, "data.md")
    with pytest.raises(fedtailor.FedtailorError, match="docs/data.md links to ../nowhere.py"):
        made.within_site("[x](../nowhere.py)", "data.md")


@pytest.mark.slow
def test_site_is_built_and_every_link_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("material")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.chdir(ROOT)
    build(load_config("mkdocs.yml", site_dir=str(tmp_path), strict=True))
    page = (tmp_path / "reference" / "configuration.html").read_text(encoding="utf-8")
    assert "clients_per_round" in page
    requests = re.compile(
        r'<(?:script|img|iframe)[^>]*src="https?:|<link[^>]*rel="stylesheet"[^>]*href="https?:'
    )
    assert not [
        path for path in tmp_path.rglob("*.html") if requests.search(path.read_text(encoding="utf-8"))
    ]
