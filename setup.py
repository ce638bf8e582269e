"""The long description: the README without its pictures and without links to files, which an index does not have."""

import re
from pathlib import Path

from setuptools import setup

readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
without_pictures = re.sub(r"^!\[[^]]*\]\([^)]*\)\n\n", "", readme, flags=re.MULTILINE)
without_files = re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", without_pictures)
setup(long_description=without_files, long_description_content_type="text/markdown")
