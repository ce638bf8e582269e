"""Output folders that are named by the settings of their run, such as ``method=rise,num_masks=4000``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["folder_name", "settings_of"]

_PAIR = re.compile(r"[A-Za-z_]\w*=")


def folder_name(settings: Mapping[str, Any]) -> str:
    """The name of a run's output folder, ``default`` without settings.

    Characters that a name cannot have become hyphens, and long names are cut; a checksum is added then, which keeps
    settings apart.

    Example::

        folder_name({"method": "rise", "num_masks": 4000})  # "method=rise,num_masks=4000"
    """
    pairs = ",".join(f"{id}={value}" for id, value in settings.items())
    name = (pairs.replace(", ", ",") or "default").encode()
    folder = re.sub(rb"[^][A-Za-z0-9_.,=+-]", b"-", name)[:150]
    if folder != name:
        folder += b"-" + hashlib.sha256(name + b"\n").hexdigest()[:8].encode()
    return folder.decode()


def settings_of(folder: str) -> dict[str, str]:
    """The settings that name a folder, by id, in their order; none for a folder with another kind of name."""
    # A value may have commas of its own.
    pairs = [pair.partition("=") for pair in re.split(rf",(?={_PAIR.pattern})", folder)]
    return {id: value for id, equals, value in pairs if equals} if _PAIR.match(folder) else {}
