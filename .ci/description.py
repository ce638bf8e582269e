"""Rewrite README.md without its pictures and without links to files, which an index does not have."""

import re
from pathlib import Path

readme = Path("README.md").read_text(encoding="utf-8")
without_pictures = re.sub(r"^!\[[^]]*\]\([^)]*\)\n\n", "", readme, flags=re.MULTILINE)
Path("README.md").write_text(re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", without_pictures), encoding="utf-8")
