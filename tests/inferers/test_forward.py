"""The seam around a network's calls."""

from __future__ import annotations
