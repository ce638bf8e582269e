"""Docstrings in the form that the site's reference reads: roles become links, tables and examples Markdown's own."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
hooks = import_module("hooks")

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`(~?)([\w.]+)`")
RULE = re.compile(r"=+( +=+)+")


@cache
def public() -> frozenset[str]:
    """Where the public names are defined."""
    return frozenset(path for names in hooks.rooms().values() for path in names.values())


def named(module: str, name: str) -> Any:
    """What a name stands for in a module, or from the top of the package; None where that cannot be known."""
    place = [part for part in name.split(".") if part != "monai_saliency"]
    try:
        value = import_module("monai_saliency" if name.startswith("monai_saliency.") else module)
        for part in place:
            value = getattr(value, part)
    except (ImportError, AttributeError):  # a module that needs another extra
        return None
    return value


def linked(text: str, module: str) -> str:
    """Text whose roles are links, where they lead to an entry of the reference."""

    def replaced(match: re.Match[str]) -> str:
        short, name = match.groups()
        shown = f"`{name.rpartition('.')[2] if short else name}`"
        path = hooks.defined(named(module, name), name)
        return f"[{shown}][{path}]" if path in public() else shown

    return ROLE.sub(replaced, text)


def tabled(lines: list[str]) -> list[str]:
    """Lines whose tables between rules of equal signs are Markdown's."""
    rules = [i for i, line in enumerate(lines) if RULE.fullmatch(line.strip())]
    for first, second, last in zip(rules[::3], rules[1::3], rules[2::3], strict=False):
        starts = [match.start() for match in re.finditer("=+", lines[first])]
        rows = [
            [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
            for i, line in enumerate(lines[first:last], first)
            if i not in (first, second) and line.strip()
        ]
        rows.insert(1, ["---"] * len(starts))
        lines[first : last + 1] = [f"| {' | '.join(row)} |" for row in rows] + ["\0"] * (last + 1 - first - len(rows))
    return [line for line in lines if line != "\0"]


def exampled(lines: list[str]) -> list[str]:
    """Lines whose ``Example::`` is a section of its own, with the code that follows it."""
    made = []
    for i, line in enumerate(lines):
        if line.strip() != "Example::":
            made.append(line)
            continue
        following = next((each for each in lines[i + 1 :] if each.strip()), "")
        made.append("Examples:")
        if not following.strip().startswith(">>>"):
            indented = len(following) - len(following.lstrip())
            end = next(
                (j for j in range(i + 1, len(lines)) if lines[j].strip() and not lines[j].startswith(" " * indented)),
                len(lines),
            )
            lines[i + 1 : end] = [" " * indented + "```python", *lines[i + 2 : end], " " * indented + "```"]
    return [line for i, line in enumerate(made) if line.strip() or i == 0 or made[i - 1] != "Examples:"]


def pictured(lines: list[str], obj: griffe.Object) -> list[str]:
    """The lines of a method with its picture after the first paragraph."""
    if not obj.path.startswith("monai_saliency.methods.") or obj.name not in {*hooks.PICTURED, *hooks.LIKE}:
        return lines
    end = lines.index("") if "" in lines else len(lines)
    like = f" Its map looks like that of `{hooks.LIKE[obj.name]}`." if obj.name in hooks.LIKE else ""
    picture = f"![A scan with a lesion, and its map by {obj.name}]({obj.name}.png)"
    return [*lines[:end], "", picture + like, *lines[end:]]


class Docstrings(griffe.Extension):
    """What mkdocstrings reads, before it parses it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            lines = exampled(tabled(obj.docstring.value.split("\n")))
            obj.docstring.value = linked("\n".join(pictured(lines, obj)), obj.module.path)
