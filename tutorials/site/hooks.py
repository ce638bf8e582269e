"""What MkDocs gets in addition to the pages in tutorials/: pages from elsewhere, the notebooks, and the reference.

Links in all pages lead to files of the repository, so that they work there. Here they lead to the site's pages: a link
to a module leads to its room's reference, and other files are copied.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import os
import pkgutil
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: pages from elsewhere, by their place in the site
FROM_ELSEWHERE = {
    "index.md": "README.md",
    "bundle.md": "bundle/docs/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
#: the notebooks in the order in which they are read; others follow by their names
IN_ORDER = [
    "first_map",
    "explain_a_brain",
    "explain_your_own_bundle",
    "segmentation_ct",
    "nnunet",
    "which_organ_mattered",
    "is_this_map_any_good",
    "which_method",
    "cohort_overnight",
    "sweep_on_slurm",
]
#: the methods in the order of their pictures in tutorials/pages/methods.png, row by row: the first shows the scan
PICTURED = [
    *("scan", "focused_rise", "rise", "random_grid", "mc_rise", "hierarchical_occlusion", "sliding_window"),
    *("multi_scale_window", "sliding_radial", "squared_difference", "sbsm", "drise", "region_occlusion", "shapley"),
    *("minimal_region", "hsic", "sobol", "smoothgrad", "integrated_gradients", "grad_cam", "channel_occlusion"),
]
LIKE = {"patch_windows": "sliding_window"}  # not in the picture: it needs a network that predicts by patches
LINK = re.compile(r"(?<=\]\()([^)#\s]+)(#[^)\s]*)?(?=\))")


# The reference. -------------------------------------------------------------------------------------------------------


def rooms() -> dict[str, dict[str, str]]:
    """The rooms of the package; of each its public names, and where each is defined. A room that gives no names itself
    is followed by its modules, such as ``storage.dicom``.
    """
    found = {}
    for room in _inside("monai_saliency"):
        if room not in {"__main__", "names", "version"}:
            found[room] = _names(room)
            if not found[room] and room != "bundle":
                modules = [f"{room}.{name}" for name in _inside(f"monai_saliency.{room}") if "private" not in name]
                found |= {module: _names(module) for module in modules}
    found["bundle"] = {"attach": "monai_saliency.bundle.attach.attach"}
    found["methods"]["explain"] = "monai_saliency.methods.default.explain"
    found["targets"]["AutoTarget"] = "monai_saliency.targets.auto.AutoTarget"
    return found


def _inside(package: str) -> list[str]:
    """The modules of a package."""
    return [each.name for each in pkgutil.iter_modules(importlib.import_module(package).__path__)]


def _names(room: str) -> dict[str, str]:
    """The public names of a room or of a module, and where each is defined."""
    module = importlib.import_module(f"monai_saliency.{room}")
    names = sorted(getattr(module, "__all__", []), key=str.lower)
    return {name: defined(getattr(module, name), f"{module.__name__}.{name}") for name in names}


def defined(value: Any, path: str) -> str:
    """Where a public name is defined; its path in the room where the value does not say."""
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", None)
    return f"{module}.{name}" if name and module.startswith("monai_saliency") else path


def pictures() -> dict[str, bytes]:
    """A picture for each method, cut out of the picture of all methods, by its place in the site."""
    from PIL import Image

    whole = Image.open(ROOT / "tutorials" / "pages" / "methods.png").convert("RGB")
    width, height = whole.width / 7, whole.height / 3
    # Above each row of pictures is a margin of some pixels.
    scan, *methods = [(width * (place % 7), 4 + height * (place // 7)) for place in range(len(PICTURED))]
    corners = dict(zip(PICTURED[1:], methods, strict=True))
    found = {}
    for method in [*corners, *LIKE]:
        pair = Image.new("RGB", (round(2 * width), round(height)), "white")
        for offset, (left, top) in zip((0, width), (scan, corners[LIKE.get(method, method)]), strict=True):
            box = (left, top, left + width, min(top + height, whole.height))
            pair.paste(whole.crop(tuple(map(round, box))), (round(offset), 0))
        file = io.BytesIO()
        pair.save(file, "PNG")
        found[f"reference/{method}.png"] = file.getvalue()
    return found


def reference() -> dict[str, str]:
    """The pages of the reference, by their place in the site: one for each room, with an entry for each public name."""
    pages, entered = {}, set()
    quiet = "    options: {members: false, show_root_heading: false, show_root_toc_entry: false}"
    for room, names in rooms().items():
        text = [f"# {room}\n", f"::: monai_saliency.{room}\n{quiet}\n"]
        for path in dict.fromkeys(names.values()):
            if path in entered:
                text.append(f"[{path.rpartition('.')[2]}][{path}]\n")
                continue
            entered.add(path)
            aliases = [f"`{name}`" for name in names if names[name] == path and name != path.rpartition(".")[2]]
            text.append(f"::: {path}\n" + (f"\nAlso called {', '.join(aliases)}.\n" if aliases else ""))
        pages[f"reference/{room}.md"] = "\n".join(text)
    words = "`import monai_saliency as ms` has methods, targets, fills and inputs by name, and each room as a module"
    index = f"# Reference\n\n{words}, such as `ms.masks`.\n\n"
    pages["reference/index.md"] = index + "\n".join(
        f"- [{room}]({room}.md)" + (f": {', '.join(f'`{name}`' for name in names)}" if names else "")
        for room, names in rooms().items()
    )
    return pages


# Notebooks. -----------------------------------------------------------------------------------------------------------


def notebooks() -> dict[str, dict[str, str | bytes]]:
    """The files of each notebook, by their places in the site: its page first, then its pictures. None is run."""
    found = {}
    order = {name: place for place, name in enumerate(IN_ORDER)}
    for path in sorted((ROOT / "tutorials").glob("*.ipynb"), key=lambda each: (order.get(each.stem, len(order)), each)):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        pictures: dict[str, str | bytes] = {}
        text = "\n\n".join(_cell(cell, f"notebooks/{path.stem}", pictures) for cell in cells)
        note = f"[The notebook]({path.name}), as it ran."
        heading, _, rest = text.partition("\n")
        found[path.stem] = {f"notebooks/{path.stem}.md": f"{heading}\n\n{note}\n{rest}\n", **pictures}
    return found


def _cell(cell: dict[str, Any], place: str, pictures: dict[str, str | bytes]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    if cell["cell_type"] != "code":
        return ""
    parts = [_fenced(source, "python")]
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "image/png" in data:
            name = f"{place}_{len(pictures)}.png"
            pictures[name] = base64.b64decode("".join(data["image/png"]))
            parts.append(f"![What the cell above shows]({posixpath.basename(name)})")
        elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
            # Of a line that was written over, what stood there at last.
            parts.append(_fenced("\n".join(line.split("\r")[-1] for line in text.split("\n")), "text"))
    return "\n\n".join(parts)


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, *(len(each) + 1 for each in re.findall("`+", text)), 3)
    return f"{fence}{language}\n{text}\n{fence}"


def gallery(pages: dict[str, dict[str, str | bytes]]) -> str:
    """The page that shows all notebooks: of each its title, its first words and its last picture."""
    text = [
        "# Notebooks\n",
        "Each ran from top to bottom, and its outputs are kept. In the repository they lie in `tutorials/`.\n",
    ]
    for name, files in pages.items():
        page, *pictures = files.items()
        lines = str(page[1]).split("\n\n")
        title = lines[0].lstrip("# ")
        text.append(f"## [{title}](notebooks/{name}.md)\n\n{lines[2].strip()}\n")
        if pictures:
            text.append(f"[![{title}]({pictures[-1][0]}){{ width=480 }}](notebooks/{name}.md)\n")
    return "\n".join(text)


# Links. ---------------------------------------------------------------------------------------------------------------


def home(place: str) -> str:
    """The repository's file that a page of the site comes from."""
    if place.startswith("notebooks/"):
        return f"tutorials/{Path(place).stem}.ipynb"
    if place.startswith("reference/"):
        path = f"monai_saliency/{Path(place).stem.replace('.', '/')}"
        return f"{path}.py" if (ROOT / f"{path}.py").exists() else f"{path}/__init__.py"
    return FROM_ELSEWHERE.get(place, f"tutorials/{place}")


def lead(place: str, link: str) -> str | None:
    """Where a page's link leads in the site: None for what is no file of the repository."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(home(place)), link))
    if "://" in link or target.startswith("..") or not (ROOT / target).exists():
        return None
    if target == "tutorials":
        return "notebooks.md"
    for page, source in FROM_ELSEWHERE.items():
        if source == target:
            return page
    first, _, rest = target.partition("/")
    if first == "monai_saliency" and not target.endswith(".yaml"):
        module = rest.removesuffix(".py").replace("/", ".")
        room = module if module in rooms() else module.partition(".")[0]
        return f"reference/{room}.md" if rest else "reference/index.md"
    if first == "tutorials" and target.endswith(".ipynb"):
        return f"notebooks/{Path(target).stem}.md"
    if first == "tutorials" and target.endswith((".md", ".png")):
        return rest
    return f"files/{target}"


def copied(place: str, text: str) -> Iterator[str]:
    """The files that a page links to and that are no pages."""
    for link, _ in LINK.findall(text):
        target = lead(place, link)
        if target and target.startswith("files/") and (ROOT / target.removeprefix("files/")).is_file():
            yield target


def relinked(place: str, text: str) -> str:
    """A page with its links led to the site's own pages and files."""

    def replaced(match: re.Match[str]) -> str:
        target = lead(place, match[1])
        if target is None or (target.startswith("files/") and not (ROOT / target.removeprefix("files/")).is_file()):
            return match[0]
        anchor = "" if target.startswith(("reference/", "files/")) else match[2] or ""
        return posixpath.relpath(target, posixpath.dirname(place) or ".") + anchor

    return LINK.sub(replaced, text)


# What MkDocs calls. ---------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """The notebooks and the reference join the navigation, before its last part. The environment has addresses."""
    config.site_url = os.environ.get("SITE_URL", "")
    if "REPOSITORY_URL" in os.environ:
        config.repo_url, config.repo_name = os.environ["REPOSITORY_URL"], "Sources"
    names = ["notebooks.md", *(f"notebooks/{name}.md" for name in notebooks())]
    config.nav[-1:-1] = [{"Notebooks": names}, {"Reference": sorted(reference(), key=lambda each: "index" not in each)}]
    return config


def on_files(files: Any, config: Any) -> Any:
    """The site's files: the pages that MkDocs found in tutorials/, and those from elsewhere."""
    from mkdocs.structure.files import File

    for file in list(files):
        if file.src_uri.endswith((".ipynb", ".py", ".yml", ".html")):
            files.remove(file)
    made: dict[str, str | bytes] = {
        place: (ROOT / source).read_text(encoding="utf-8") for place, source in FROM_ELSEWHERE.items()
    }
    shown = notebooks()
    for name, parts in shown.items():
        made |= parts
        made[f"notebooks/{name}.ipynb"] = (ROOT / "tutorials" / f"{name}.ipynb").read_bytes()
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    texts |= {place: text for place, text in made.items() if isinstance(text, str)}
    made |= reference() | {"notebooks.md": gallery(shown)} | pictures()
    for place, text in texts.items():
        made |= {target: (ROOT / target.removeprefix("files/")).read_bytes() for target in copied(place, text)}
    for place, content in made.items():
        files.append(File.generated(config, place, content=content))
    config.extra["all_pages"] = sorted(file.dest_uri for file in files.documentation_pages())
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links in pages that are also in the repository lead to pages of the site. The last line is the page's source."""
    place = page.file.src_uri
    if place == "notebooks.md":
        return markdown
    source = home(place)
    if config.repo_url:
        page.edit_url = f"{config.repo_url.rstrip('/')}/edit/main/{source}"
    text = markdown if place.startswith("reference/") else relinked(place, markdown)
    return f"{text}\n\n---\n\nSource of this page: `{source}`\n"


#: finds the site's root for a page that was not found: the nearest folder above it that has the site's list of objects
FIND_ROOT = """
let root = location.pathname, found = false;
while (!found && root.length > 1) {
  root = root.replace(/[^/]*\\/?$/, "");
  const request = new XMLHttpRequest();
  request.open("HEAD", root + "objects.inv", false);
  request.send();
  found = request.status === 200;
}
document.write(`<base href="${root}">`);
"""


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The page for a page that was not found. Where the site's address is not known, it finds the root by itself."""
    if template_name != "404.html" or config.site_url:
        return output_content
    relative = re.sub(r'(href|src)="/(?!/)', r'\1="', output_content.replace('"base": "/"', '"base": "."'))
    relative = relative.replace('new URL("/",location)', 'new URL(".",document.baseURI)')
    return relative.replace("<head>", f"<head><script>{FIND_ROOT}</script>", 1)
