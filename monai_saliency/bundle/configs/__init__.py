"""The overlays: configs that go behind a bundle's own in ``--config_file``."""

from __future__ import annotations

from pathlib import Path

__all__ = ["overlay_path", "overlays"]


def overlays() -> list[str]:
    """The names of all overlays."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.yaml"))


def overlay_path(name: str) -> Path:
    """The file of an overlay."""
    if name not in overlays():
        from monai_saliency.utils.arguments import check_option  # which loads torch

        check_option("overlay", name, overlays())
    return Path(__file__).with_name(f"{name}.yaml")
