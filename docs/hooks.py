"""MkDocs hooks: generate pages from the code and from files outside docs/, and rewrite links to these files. Promises
that every link of a page resolves on the site. The README becomes the home page. Each example becomes a page with its
source. docs/security.md gets a list of the tests that it names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from typer.testing import CliRunner

from trueroll import rollout
from trueroll.engine.config import EngineConfig
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.fleet.config import FleetConfig
from trueroll.rollout.http.config import HttpConfig
from trueroll.rollout.tools.cli import app

ROOT = Path(__file__).parent.parent
FOLDERS = ("rollout", "engine", "kernels", "weight_sync")
SETTINGS = {
    "Engine": EngineConfig,
    "Worker": WorkerConfig,
    "HTTP front end": HttpConfig,
    "Fleet": FleetConfig,
}
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""The pages that are generated from files at the root."""


def on_startup(command: str, dirty: bool) -> None:
    """Link the folders of the package into one folder: mkdocstrings reads the sources without importing them."""
    package = ROOT / "build" / "package" / "trueroll"
    package.mkdir(parents=True, exist_ok=True)
    parts = [*(ROOT / "rollout" / "trueroll").glob("*.py"), *(ROOT / name for name in FOLDERS)]
    for part in parts:
        link = package / part.name
        link.unlink(missing_ok=True)  # the link may point to a file that no longer exists
        link.symlink_to(part)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {page: (ROOT / name).read_text() for name, page in FROM_ROOT.items()}
    pages |= {
        "reference/rollout.md": api_page("trueroll.rollout", rollout.__all__),
        "reference/training.md": "# trueroll.kernels.training\n\n::: trueroll.kernels.training\n",
        "reference/importance.md": "# trueroll.kernels.importance\n\n::: trueroll.kernels.importance\n",
        "reference/commands.md": commands_page(),
        "reference/settings.md": settings_page(),
    }
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    for path in sorted(ROOT.glob("examples/**/*.py")):
        page = str(path.relative_to(ROOT)) + ".md"
        text = f"# {path.relative_to(ROOT)}\n\n```python\n{path.read_text()}```\n"
        files.append(File.generated(config, page, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave docs/, so that they point to pages of the site."""
    if page.file.src_uri in FROM_ROOT.values():
        markdown = re.sub(r"(\]\()docs/", r"\1", markdown)
        markdown = re.sub(r"\]\((\w+\.md)", lambda found: f"]({FROM_ROOT.get(found[1], found[1])}", markdown)
    markdown = re.sub(r"\]\(\.\./(\w+\.md)", lambda found: f"]({FROM_ROOT.get(found[1], found[1])}", markdown)
    markdown = re.sub(r"\]\((?:\.\./)?(examples/[\w/]+\.py)\)", r"](\1.md)", markdown)
    return with_tests(markdown)


def with_tests(markdown: str) -> str:
    """Replace references such as `[7]: ../tests/test_map.py "test_a"` with a list of tests at the end of the page."""
    reference = re.compile(r'^\[(\d+)\]: \.\./(\S+) "(\w+)"$', re.M)
    if not (tests := reference.findall(markdown)):
        return markdown
    links = reference.sub(r"[\1]: #test-\1", markdown)
    listed = "\n".join(
        f'- <span id="test-{number}"></span>[{number}] `{test}` in `{path}`' for number, path, test in tests
    )
    return f"{links}\n\n## Tests\n\n{listed}\n"


def api_page(module: str, names: list[str]) -> str:
    """Return the page of a module with its public names."""
    return f"# {module}\n\n" + "\n\n".join(f"::: {module}.{name}" for name in names) + "\n"


def commands_page() -> str:
    """Return the help of all commands."""
    names = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    environment = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    helps = ((name, CliRunner().invoke(app, [name, "--help"], env=environment).output) for name in names)
    sections = [f"## trueroll {name}\n\n```text\n{text.strip()}\n```" for name, text in helps]
    return "\n\n".join(["# Commands", *sections]) + "\n"


def settings_page() -> str:
    """Return all settings with their types and defaults."""
    parts = ["# Settings", "A command takes each setting as an option: `max_num_seqs` is `--max-num-seqs`."]
    for title, model in SETTINGS.items():
        parts += [f"## {title}", f"`{model.__module__}.{model.__name__}`", settings_table(model), indented(model)]
    return "\n\n".join(parts) + "\n"


def settings_table(model: type[BaseModel]) -> str:
    """Return a table of a model's fields."""
    rows = [
        f"| `{name}` | `{told(field.annotation)}` | {default(field)} |" for name, field in model.model_fields.items()
    ]
    return "\n".join(["| setting | type | default |", "|---|---|---|", *rows])


def indented(model: type[BaseModel]) -> str:
    """Return a model's docstring as Markdown."""
    first, _, rest = (model.__doc__ or "").partition("\n")
    return f"{first}\n" + "\n".join(line.removeprefix("    ") for line in rest.splitlines())


def told(annotation: Any) -> str:
    """Return a type in readable form, without the character `|`, which would end a table cell."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
    return text.replace(" | ", " or ")


def default(field: Any) -> str:
    """Return the default of a field."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "by device or model" if value is None else f"`{value!r}`"
