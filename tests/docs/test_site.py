"""`make docs`: the site builds strictly, needs no other host, and has every page; pictures and notebooks are up to date."""

import json
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lockstep.config.compose import load_config
from lockstep.config.placement import pools_of
from lockstep.config.ppo import PPOConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


class Assets(HTMLParser):
    """What a browser fetches for a page: scripts, styles, fonts, icons, images; and the targets of its links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video"):
            self.fetched.append(values.get("src") or "")
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.fetched.append(values.get("href") or "")
        elif tag == "a":
            self.links.append(values.get("href") or "")


@pytest.mark.slow
def test_the_site_builds_strictly_and_asks_no_other_host(tmp_path: Path) -> None:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = {path: Assets(path.read_text()) for path in tmp_path.rglob("*.html")}
    assert len(pages) > 50
    outside = re.compile(r"^(\w+:)?//")
    assert [(page, url) for page, assets in pages.items() for url in assets.fetched if outside.match(url)] == []
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text()), style
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    assert any("max_staleness" in entry["text"] for entry in index["docs"])
    assert "SECURITY.html" in pages[tmp_path / "training.html"].links
    api = (tmp_path / "api" / "train.html").read_text()
    assert "<code>model</code>: what" in api and "callbacks" in api
    assert not list(tmp_path.rglob("*.py"))


def test_every_page_is_in_the_navigation_once() -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("griffe")
    from mkdocs_hooks import navigation, pages_of, source_path

    nav = navigation(DOCS)
    assert [name for section in nav for name in section] == [
        "Home",
        *("Start", "Train", "Agents", "Scale", "Extend", "Reference"),
    ]
    listed = [source_path(page) for page in pages_of(nav)]
    pages = [str(path.relative_to(ROOT)) for suffix in ("md", "ipynb") for path in DOCS.rglob(f"*.{suffix}")]
    assert sorted(set(listed)) == sorted(listed)
    assert sorted(path for path in listed if path.startswith("docs/")) == sorted(pages)


def test_links_that_leave_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("griffe")
    import mkdocs_hooks

    class Files:
        def get_file_from_path(self, path: str) -> object:
            return {"SECURITY.md": 1, "README.md": 1, "training.md": 1, "notebooks/train_in_python.md": 1}.get(path)

    def rewritten(text: str, page: str) -> str:
        return str(mkdocs_hooks._site_links(text, page, Files()))  # type: ignore[arg-type]

    monkeypatch.setattr(mkdocs_hooks, "repository_url", lambda: None)
    assert rewritten("[s](../SECURITY.md#a)", "training.md") == "[s](SECURITY.md#a)"
    assert rewritten("[t](docs/training.md)", "SECURITY.md") == "[t](training.md)"
    assert (
        rewritten("[n](../notebooks/train_in_python.ipynb)", "tutorials/tools.md")
        == "[n](../notebooks/train_in_python.md)"
    )
    assert rewritten("[r](../README.md), [i](README.md)", "training.md") == "r, [i](README.md)"
    assert (
        rewritten("[x](https://example.com) [y](missing.md)", "training.md")
        == "[x](https://example.com) [y](missing.md)"
    )
    monkeypatch.setattr(mkdocs_hooks, "repository_url", lambda: "https://host/lockstep")
    file = "../examples/pipeline.sh"
    assert rewritten(f"[p]({file})", "training.md") == "[p](https://host/lockstep/blob/main/examples/pipeline.sh)"


def test_docstrings_become_lists() -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("griffe")
    from mkdocs_hooks import with_field_lists

    docstring = "A thing.\n\nname:   what it is,\n        and more.\na, b:   two of them.\n\nNote: it\nis text."
    assert with_field_lists(docstring) == (
        "A thing.\n\n- `name`: what it is, and more.\n- `a`, `b`: two of them.\n\nNote: it\nis text."
    )


def test_pictures_are_what_the_script_draws() -> None:
    pictures = runpy.run_path(str(DOCS / "assets" / "draw.py"))["PICTURES"]
    for name, draw in pictures.items():
        text = (DOCS / "assets" / f"{name}.svg").read_text()
        assert text == draw().svg(), f"{name}.svg: run `make docs-config`"
        names = {child.tag.rpartition("}")[2] for child in ElementTree.fromstring(text)}
        assert {"title", "desc", "text"} <= names
        assert any(f"assets/{name}.svg" in page.read_text() for page in DOCS.rglob("*.md")), f"no page shows {name}.svg"


def test_the_picture_of_placements_shows_the_pools_of_a_run() -> None:
    drawn = runpy.run_path(str(DOCS / "assets" / "draw.py"))["PLACEMENTS"]
    for placement, pools in drawn.items():
        settings = [f"trainer.placement={placement}", "trainer.n_gpus_per_node=8"]
        found = pools_of(load_config(PPOConfig, settings, run_checks=False), ["ref", "critic", "rm"])
        assert found.spec == {name: [count] for name, count, _ in pools}
        assert found.role_pools == {role.replace(" = ", "_"): name for name, _, roles in pools for role in roles}


def test_notebooks_are_stored_without_outputs() -> None:
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), path.name


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert len(outputs) >= 3
