"""The pages of the documentation that are made from the code: every setting, every method, the Python interface.

MkDocs calls ``on_files`` (``hooks`` in mkdocs.yml): the pages exist while the site is built and are never written into
``docs``. The first page is README.md; links to files outside ``docs`` become names,
as the site does not hold those files.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import fedtailor
from fedtailor.client.local_training import LocalTraining
from fedtailor.config import RunConfig
from fedtailor.errors import FedtailorError
from fedtailor.merging.robust.settings import MergeSettings
from fedtailor.merging.settings import ServerSettings
from fedtailor.method import SECTIONS, Method
from fedtailor.methods.registry import get_method, method_card, method_names
from fedtailor.models.registry import builder_of, model_names
from fedtailor.toml_text import as_toml

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?P<image>!?)\[(?P<label>[^\]]*)\]\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")
INTRODUCTION = """# Configuration

One TOML file describes a run; `fedtailor init` writes one with comments. Every key, its default and what it means, from
the code. What a file does not say has its default, what fedtailor does not know it refuses, and `--set key=value`
changes a key for one run (`--set data.alpha=0.1`).
"""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key of a table."""

    name: str
    kind: str
    default: str
    meaning: str


def settings_of(owner: type[Any], without: frozenset[str] = frozenset()) -> list[Setting]:
    """The fields of a settings class, in their order, with what its source says about each."""
    meanings = meanings_in(owner)
    found = []
    for item in dataclasses.fields(owner):
        if item.name not in without:
            kind = str(item.type).replace("WidthLike", "number | str")
            found.append(Setting(item.name, kind, shown_default(item), meanings.get(item.name, "")))
    return found


def meanings_in(owner: type[Any]) -> dict[str, str]:
    """What a class and those above it say of their fields: the string below, the comment beside or above a field."""
    found: dict[str, str] = {}
    for each in reversed(owner.__mro__):
        if dataclasses.is_dataclass(each):
            found |= {name: text for name, text in _stated(inspect.getsource(each)).items() if text}
    return found


def _stated(source: str) -> dict[str, str]:
    lines = source.splitlines()
    body = ast.parse(inspect.cleandoc(source)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[node.target.id] = inspect.cleandoc(str(after.value.value)).replace("\n", " ")
        else:
            texts = [
                lines[number].partition("  # ")[2] for number in range(node.lineno - 1, node.end_lineno or 0)
            ]
            above = lines[node.lineno - 2].strip()
            if not any(texts) and above.startswith("# "):
                texts = [above.removeprefix("# ")]
            found[node.target.id] = " ".join(filter(None, texts))
    return found


def shown_default(item: dataclasses.Field[Any]) -> str:
    """A default as it would stand in a file."""
    if item.default_factory is not dataclasses.MISSING:
        made = item.default_factory()
        return "its own table" if dataclasses.is_dataclass(made) else as_toml(made) if made else "none"
    if item.default is None:
        return "none"
    return as_toml(str(item.default) if isinstance(item.default, Fraction) else item.default)


def table_of(settings: list[Setting]) -> str:
    """Markdown."""
    rows = [
        f"| `{each.name}` | {_cell(f'`{each.kind}`')} | `{each.default}` | {_cell(each.meaning)} |"
        for each in settings
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def sections() -> dict[str, type[Any]]:
    """The tables of a config file that have a fixed set of keys, by name."""
    hidden: dict[str, type[Any]] = {
        "training": LocalTraining,
        "server": ServerSettings,
        "merge": MergeSettings,
    }  # read by the method, which has defaults of its own
    made: dict[str, object] = {item.name: item.default_factory for item in dataclasses.fields(RunConfig)}
    known: dict[str, type[Any]] = {
        name: kind for name, kind in made.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }
    return {name: (known | hidden)[name] for name in made if name in known | hidden}


def configuration_page() -> str:
    """Every key of a config file."""
    tables = sections()
    free = {"model": _models(), "method": "`name` and the settings of that method: [methods](methods.md).\n"}
    parts = [INTRODUCTION, "## At the top of the file\n", (inspect.getdoc(RunConfig) or "") + "\n"]
    parts.append(table_of(settings_of(RunConfig, frozenset({*tables, *free}))))
    for item in dataclasses.fields(RunConfig):
        if item.name in tables:
            owner = tables[item.name]
            without = frozenset({"rounds"}) if owner is LocalTraining else frozenset[str]()
            parts += [f"\n## [{item.name}]\n", (inspect.getdoc(owner) or "") + "\n"]
            parts.append(table_of(settings_of(owner, without)))
        elif item.name in free:
            parts += [f"\n## [{item.name}]\n", free[item.name]]
    return "\n".join(parts) + "\n"


def _models() -> str:
    rows = []
    for name in model_names():
        build = builder_of(name)
        given = inspect.signature(build).parameters.values()
        options = [
            f"`{p.name} = {_plain(p.default)}`" for p in given if p.name not in ("input_shape", "num_classes")
        ]
        rows.append(
            f"| `{name}` | {_cell((inspect.getdoc(build) or '').splitlines()[0])} | {', '.join(options)} |"
        )
    own = 'or [your own](../your-own-model.md) as `"package.module:function"`, and options of that model.\n'
    return "\n".join(
        [f"`name`: one of these, {own}", "| name | what it is | options |", "|---|---|---|", *rows, ""]
    )


def _plain(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def methods_page() -> str:
    """Every method with its settings and its card."""
    shared = settings_of(Method, frozenset(SECTIONS))
    parts = [
        "# Methods\n",
        "`[method]` in a file, `--methods name:key=value` in a comparison, an object in Python. Every method has",
        "",
    ]
    parts += [
        table_of(shared),
        "\nas its settings, with defaults of its own where its table below says so.",
        "Local training is [`[training]`](configuration.md#training).\n",
    ]
    for name in method_names():
        parts += [f"\n## {name}\n", card_of(name), "\n### All settings of " + name + "\n"]
        parts.append(table_of(settings_of(get_method(name), frozenset(SECTIONS))))
    return "\n".join(parts) + "\n"


def card_of(name: str) -> str:
    """A method's card without its header and title, its headings two levels deeper."""
    card = method_card(name)
    text = card.partition("---\n")[2].partition("---\n")[2] if card.startswith("---\n") else card
    lines, inside = [], False
    for line in text.splitlines():
        inside ^= line.startswith("```")
        if inside or not line.startswith("#"):
            lines.append(line)
        elif not line.startswith("# "):
            lines.append(f"#{line} ({name})")
    return "\n".join(lines)


def python_page() -> str:
    """What ``import fedtailor`` offers."""
    parts = [
        "# Python interface\n",
        "Everything that `import fedtailor` offers, from the code. [Start](../start.md) shows it in use.\n",
    ]
    for name in fedtailor.__all__:
        thing = getattr(fedtailor, name)
        parts += [f"## fedtailor.{name}\n", _described(thing, name)]
        if inspect.isclass(thing):
            parts += list(_members(thing))
    return "\n".join(parts) + "\n"


def _described(thing: Any, name: str) -> str:
    if isinstance(thing, type) and issubclass(thing, Exception):
        return f"{_prose(inspect.getdoc(thing) or '')}\n"
    arguments = [str(each).replace("'", "") for each in inspect.signature(thing).parameters.values()]
    line = f"{name}({', '.join(arguments)})"
    called = (
        line if len(line) <= 100 else "\n".join([f"{name}(", *(f"    {each}," for each in arguments), ")"])
    )
    return f"```text\n{called}\n```\n\n{_prose(inspect.getdoc(thing) or '')}\n"


def _prose(text: str) -> str:
    """A docstring as Markdown: double back-ticks are code, examples are blocks."""
    blocks = text.replace("``", "`").split("\n\n")
    return "\n\n".join(f"```pycon\n{block}\n```" if block.startswith(">>>") else block for block in blocks)


def _members(owner: type[Any]) -> Iterator[str]:
    for name, member in vars(owner).items():
        if name.startswith("_") or not (
            inspect.isfunction(member) or isinstance(member, property | classmethod)
        ):
            continue
        documented = member.__func__ if isinstance(member, classmethod) else member
        if documented.__doc__ and owner is not Method:  # hooks have a page of their own
            call = name if isinstance(member, property) else f"{name}{_short_signature(documented)}"
            yield f"**`.{call}`** {_prose(inspect.getdoc(documented) or '')}\n"


def _short_signature(function: Any) -> str:
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    return f"({', '.join(names)})"


PAGES = {
    "reference/configuration.md": configuration_page,
    "reference/methods.md": methods_page,
    "reference/python.md": python_page,
}


def first_page() -> str:
    """README.md as the site's first page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return LINK.sub(lambda found: _from_readme(found), text)


def _from_readme(found: re.Match[str]) -> str:
    target = found["target"]
    if ":" in target or not target:
        return found[0]
    path = target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
    return f"{found['image']}[{found['label']}]({path}{found['anchor'] or ''})"


def within_site(markdown: str, page: str) -> str:
    """A page whose links to files of the repository outside ``docs`` are their names; broken ones are refused."""

    def linked(found: re.Match[str]) -> str:
        target = found["target"]
        if ":" in target or not target:
            return found[0]
        path = os.path.normpath(PurePosixPath("docs") / PurePosixPath(page).parent / target)
        if path.startswith("docs" + os.sep):
            return found[0]
        if not (ROOT / path).exists():
            raise FedtailorError(f"docs/{page} links to {target}: no such file in the repository")
        name = found["label"].strip("`")
        return f"`{path}`" if name in path else f"{found['label']} (`{path}`)"

    return LINK.sub(linked, markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """MkDocs: add the pages that are made from the code."""
    from mkdocs.structure.files import File

    for name, make in {**PAGES, "index.md": first_page}.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, **_rest: object) -> str:
    """MkDocs: what every page goes through."""
    return within_site(markdown, page.file.src_uri)
