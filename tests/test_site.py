"""The documentation site: it has every page and every public name, builds strictly, and is read without a network."""

import importlib
import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from helpers.paths import ROOT

import monai_saliency as ms

SITE = ROOT / "tutorials" / "site"
CONFIG = SITE / "mkdocs.yml"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


hooks = module("hooks")


def listed(nav: Any) -> list[str]:
    """The pages of a navigation."""
    if isinstance(nav, str):
        return [nav]
    return [page for each in (nav.values() if isinstance(nav, dict) else nav) for page in listed(each)]


def public() -> dict[str, Any]:
    """Every public name of the package and of its rooms, by its path there."""
    found = {f"monai_saliency.{name}": getattr(ms, name) for name in [*ms.__all__, "attach"]}
    for room in hooks.rooms():
        of_room = importlib.import_module(f"monai_saliency.{room}")
        found |= {f"{of_room.__name__}.{name}": getattr(of_room, name) for name in getattr(of_room, "__all__", [])}
    return found


def test_the_navigation_has_every_page() -> None:
    pages = [path.relative_to(ROOT / "tutorials").as_posix() for path in (ROOT / "tutorials").rglob("*.md")]
    nav = listed(yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["nav"])
    assert sorted(nav) == sorted([*pages, *hooks.FROM_ELSEWHERE])
    assert all((ROOT / source).is_file() for source in hooks.FROM_ELSEWHERE.values())


def test_the_reference_has_every_public_name() -> None:
    entries = {path for page in hooks.reference().values() for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    names = public()
    assert len(names) > 200
    assert not {name for name, value in names.items() if hooks.defined(value, name) not in entries}
    assert "monai_saliency.storage.dicom.read_series" in entries
    assert {f"reference/{name}.png" for name in ms.methods.__all__} == {*hooks.pictures()}


def test_every_notebook_has_a_page() -> None:
    """With its text and code and pictures as they are stored."""
    for path in (ROOT / "tutorials").glob("*.ipynb"):
        files = hooks.notebooks()[path.stem]
        page = str(files[f"notebooks/{path.stem}.md"])
        assert page.startswith("# ")
        assert "```python\n" in page
        pictures = [name for name in files if name.endswith(".png")]
        assert all(f"]({name.rpartition('/')[2]})" in page for name in pictures)
        assert all(bytes(files[name]).startswith(b"\x89PNG") for name in pictures)  # type: ignore[arg-type]


def test_links_lead_to_pages_of_the_site() -> None:
    text = (
        "[a](bundle/docs/README.md#the-report) [b](tutorials/pages/cost.md) [c](LICENSE) [d](https://x.org/) [e](#here)"
    )
    expected = "[a](bundle.html#the-report) [b](pages/cost.md) [c](files/LICENSE) [d](https://x.org/) [e](#here)"
    assert hooks.relinked("index.md", text) == expected.replace(".html", ".md")
    modules = "[r](../../monai_saliency/masks) [d](../../monai_saliency/storage/dicom.py) [t](../../tutorials)"
    assert hooks.relinked("pages/x.md", modules) == (
        "[r](../reference/masks.md) [d](../reference/storage.dicom.md) [t](../notebooks.md)"
    )
    assert hooks.home("reference/storage.dicom.md") == "monai_saliency/storage/dicom.py"


# The site as it is built.
@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(name, reason='needs pip install "monai-saliency[docs]"')
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", CONFIG, "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.findall(r"^(?:WARNING|ERROR).*", done.stderr, re.MULTILINE)
    return folder


class Loaded(HTMLParser):
    """What a page loads, links that are clicked aside; and the ids in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        stays = tag == "a" or given.get("rel") == "canonical"
        self.loaded += [str(given[name]) for name in ("src", "href", "data", "poster") if given.get(name) and not stays]


@pytest.mark.slow
def test_the_built_site_loads_nothing_from_a_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for path in pages:
        assert not [link for link in Loaded(path).loaded if re.match(r"(https?:)?//", link)], path
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import\s*)[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")), path


@pytest.mark.slow
def test_the_reference_shows_signatures_pictures_and_sources(site: Path) -> None:
    page = (site / "reference" / "methods.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", "", page)
    assert "rise(\n    num_masks: int | None = None,\n" in text  # ruff formats signatures
    assert all((site / "reference" / name).is_file() for name in re.findall(r'src="([^"/]+\.png)"', page))
    assert text.count("Source code in monai_saliency/methods/") == page.count(".png")  # one picture a method
    assert "Source of this page: monai_saliency/methods/__init__.py" in text


@pytest.mark.slow
def test_a_page_that_was_not_found_leads_to_others(site: Path) -> None:
    """Its links are relative to a root that it looks for, and all pages are in it."""
    page = Loaded(site / "404.html")
    text = (site / "404.html").read_text(encoding="utf-8")
    assert "<base href" in text
    assert not [link for link in page.loaded if link.startswith("/")]
    assert '"pages/methods.html"' in text
    assert '"reference/storage.dicom.html"' in text
