"""HTML from text that nobody has checked: names of cases, classes and files, and errors."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

__all__ = ["Markup", "element", "number", "page", "table"]

# Nothing is fetched: what a page needs is in it, or in files beside it.
_POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file: 'unsafe-inline'; img-src 'self' file: data: "
    "blob:; connect-src data: blob:; worker-src blob:; base-uri 'none'; form-action 'none'"
)


class Markup(str):
    """Text that is HTML already, and so is not escaped."""


def element(name: str, /, *content: Any, **attributes: Any) -> Markup:
    """An HTML element.

    Args:
        name: its tag.
        content: what is in it. All but :class:`Markup` is escaped.
        attributes: its attributes; ``_`` at the end of a name is dropped, other ``_`` become ``-``. Those that are None
            or False are left out; True gives one without a value.

    Example::

        >>> element("td", "<ct_7>", element("br"), class_="case", title='"')
        '<td class="case" title="&quot;">&lt;ct_7&gt;<br></td>'
    """
    found = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        found.append(f" {key}" if value is True else f' {key}="{_escaped(value)}"')
    opening = f"<{name}{''.join(found)}>"
    if name in ("br", "img", "input", "link", "meta"):
        return Markup(opening)
    return Markup(opening + "".join(map(_escaped, content)) + f"</{name}>")


def page(
    title: str,
    *content: Any,
    data: Any = None,
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    mark: str = "",
) -> str:
    """A whole page.

    Args:
        title: of the window.
        content: the body.
        data: what its scripts read, as JSON under the id ``data``.
        styles: addresses of style sheets.
        scripts: addresses of scripts.
        mark: what it was made of, for :func:`~monai_saliency.visualize.report.build.write_report`.
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="made-of", content=mark),
        element("title", title),
        *(element("link", rel="stylesheet", href=each) for each in styles),
    )
    embedded = [] if data is None else [Markup(f'<script type="application/json" id="data">{_json(data)}</script>')]
    body = element("body", *content, *embedded, *(element("script", src=each) for each in scripts))
    # Bytes of a file name that are not UTF-8 have no character.
    whole = f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"
    return whole.encode(errors="replace").decode()


def table(rows: list[tuple[str, Any]], **attributes: Any) -> Markup:
    """A table of two columns, names and values; those without a value are left out."""
    lines = [element("tr", element("th", name), element("td", value)) for name, value in rows if str(value) != ""]
    return element("table", *lines, **attributes)


def number(text: Any, digits: int = 3) -> str:
    """A number from a table in a few digits; other text as it is.

    Example::

        >>> number("0.97354239"), number("-0.0000123"), number("12345.6"), number("-0.0"), number("True")
        ('0.974', '-1.23e-05', '12346', '0', 'True')
    """
    try:
        value = float(text) + 0.0  # no minus before zero
    except ValueError:
        return str(text)
    if abs(value) >= 10**digits and abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def _escaped(content: Any) -> str:
    return content if isinstance(content, Markup) else html.escape(str(content))


def _json(data: Any) -> str:
    """JSON that cannot end the element it is in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
