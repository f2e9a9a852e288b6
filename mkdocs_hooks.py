"""What `make docs` does beyond mkdocs, so that docs/ reads the same on a code host and as a site.

docs/README.md        ──► the navigation: a heading is a section, the links of its table are the pages; those of
                          docs/NAME/ are below NAME.md
../SECURITY.md, ...   ──► pages from outside docs/ that the navigation lists
notebooks/NAME.ipynb  ──► a page of its cells
links                 ──► to pages of the site; other files of the repository: to its URL, or text if pyproject.toml has none
docstrings            ──► Markdown, with `name: meaning` lines as a list
"""

import json
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parent
INDEX = "README.md"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
"""Groups: `!` of an image, text, target, anchor."""
FENCED = re.compile(r"(^```.*?^```[^\n]*$)", flags=re.M | re.S)

Nav = list[dict[str, Any]]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")  # anchors as on GitHub
    config.nav = navigation(Path(config.docs_dir))
    return config


def navigation(docs: Path) -> Nav:
    """Section by section, and the pages of each: the links in the first column of its tables."""
    nav: Nav = [{"Home": INDEX}]
    pages: Nav = []
    for line in (docs / INDEX).read_text().splitlines():
        if line.startswith("## "):
            pages = []
            nav.append({line.removeprefix("## "): pages})
        elif line.startswith("| ["):
            for _, title, target, _ in LINK.findall(line.split(" | ")[0]):
                pages.append({title: with_folder(docs, site_path(posixpath.normpath(f"docs/{target}")))})
    return nav


def with_folder(docs: Path, page: str) -> str | list[Any]:
    """A page, or with the pages of the folder of its name, in the order in which it links to them."""
    folder = docs / page.removesuffix(".md")
    if not folder.is_dir():
        return page
    text = (docs / page).read_text()
    below = sorted(folder.glob("*.md"), key=lambda path: text.find(f"({folder.name}/{path.name}"))
    return [{"Overview": page}, *(f"{folder.name}/{path.name}" for path in below)]


def pages_of(nav: Any) -> list[str]:
    """All pages of a navigation, in its order."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(part)]


def site_path(path: str) -> str:
    """Where a file of the repository is in the site."""
    return path.removeprefix("docs/").removesuffix(".ipynb") + (".md" if path.endswith(".ipynb") else "")


def source_path(page: str) -> str:
    """Where a page of the site is in the repository."""
    return next(path for path in (f"docs/{page}", f"docs/{page[:-3]}.ipynb", page) if (ROOT / path).is_file())


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in pages_of(config.nav):
        if files.get_file_from_path(path) is None:
            source = ROOT / source_path(path)
            text = notebook_page(source) if source.suffix == ".ipynb" else source.read_text()
            files.append(File.generated(config, path, content=text))
    return files


def notebook_page(path: Path) -> str:
    """The cells of a notebook as Markdown, and a link to the file."""
    cells = json.loads(path.read_text())["cells"]
    texts = [("".join(cell["source"]), cell["cell_type"]) for cell in cells]
    title, *rest = [text if kind == "markdown" else f"```python\n{text}\n```" for text, kind in texts]
    download = f'<a href="{path.name}" download>Download this notebook ({path.name})</a>'
    return "\n\n".join([title, download, *rest])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    parts = FENCED.split(markdown)  # text, fenced block, text, ...
    parts[::2] = [_site_links(_blank_before_lists(text), page.file.src_uri, files) for text in parts[::2]]
    return "".join(parts)


def _blank_before_lists(text: str) -> str:
    """Markdown libraries disagree whether a list may follow a line of text; Python's needs a blank line."""
    return re.sub(r"^([^\s|\-*].*\n)(?=- )", r"\1\n", text, flags=re.M)


def _site_links(text: str, page: str, files: Files) -> str:
    source = source_path(page)

    def rewrite(match: re.Match[str]) -> str:
        image, label, target, anchor = match.groups("")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if "://" in target or not (ROOT / path).exists():
            return match[0]  # another host, or a broken link, which mkdocs reports
        place = site_path(path)
        if path != INDEX and files.get_file_from_path(place) is not None:
            return f"{image}[{label}]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{anchor})"
        url = repository_url()
        return f"[{label}]({url}/blob/main/{path}{anchor})" if url else label

    return LINK.sub(rewrite, text)


def repository_url() -> str | None:
    """`Repository` of the project's URLs."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    return urls.get("Repository", "").rstrip("/") or None


class FieldLists(griffe.Extension):
    """Makes lists of a docstring's `name: meaning` lines."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None and not obj.is_module:
            obj.docstring.value = with_field_lists(obj.docstring.value)


FIELD = re.compile(r"(\w+(?:, \w+)*): +(\S.*)")


def with_field_lists(docstring: str) -> str:
    paragraphs = docstring.split("\n\n")
    return "\n\n".join(_field_list(paragraph.splitlines()) or paragraph for paragraph in paragraphs)


def _field_list(lines: list[str]) -> str:
    """Markdown of a paragraph of fields; empty if it is another paragraph."""
    items: list[str] = []
    for line in lines:
        if match := FIELD.match(line):
            items.append(f"- `{match[1].replace(', ', '`, `')}`: {match[2]}")
        elif items and line.startswith(" "):
            items[-1] += f" {line.strip()}"
        else:
            return ""
    return "\n".join(items)
