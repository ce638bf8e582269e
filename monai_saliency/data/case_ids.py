"""Names of cases, by the paths of their files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from monai_saliency.storage.files import NIFTI, scan_stem

__all__ = ["CaseIds", "case_id", "name_hash"]


class CaseIds:
    """Names of the cases of some files: :func:`case_id`, with the suffix where two files differ in it alone."""

    def __init__(self, root: Path | None, files: Iterable[Path]) -> None:
        self._root = root
        self._names = Counter(case_id(root, Path(file)) for file in dict.fromkeys(map(os.path.abspath, files)))

    def __call__(self, file: Path) -> str:
        """The name of a file's case."""
        name = case_id(self._root, file)
        if self._names[name] < 2:
            return name
        whole = f"{name}{file.name.removeprefix(scan_stem(file))}"
        # frame.png next to frame.jpg and frame.png.nii
        return f"{whole}-{name_hash(file.name)}" if whole in self._names else whole


def case_id(root: Path | None, image: Path) -> str:
    """The name of a case: the path of its scan below a folder, without its suffix."""
    # Links are not followed: the target of a data manager's link has an arbitrary name.
    path, folder = Path(os.path.abspath(image)), None if root is None else Path(os.path.abspath(root))
    if folder is not None and folder in path.parents:
        return (path.relative_to(folder).parent / scan_stem(path)).as_posix()
    # Its outputs lie in the output folder all the same. The hash keeps equal file names apart.
    suffix = path.name[len(scan_stem(path)) :]
    source = path.parent if suffix.lower() == NIFTI.suffixes[0] else path.parent / suffix
    return f"{scan_stem(path)}-{name_hash(str(source))}"


def name_hash(name: str) -> str:
    """Eight hexadecimal digits that tell names apart, also those that are not UTF-8."""
    return sha256(os.fsencode(name)).hexdigest()[:8]
