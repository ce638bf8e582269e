"""The handler that explains, with its tables in a folder."""

from pathlib import Path
from typing import Any

from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.storage.tables import CaseTable, Failures


def handler_of(folder: Path, *parts: Any, strict: bool = True, **settings: Any) -> Any:
    """A handler of an inferer, a network and a postprocessing, which raises the first failure or lists it."""
    return SaliencyHandler(
        *parts, CaseTable(folder / "summary.csv"), Failures(folder / "failures.csv", strict), **settings
    )
