"""Maps as a BIDS derivative: files that BIDS tools find by their names, each with a JSON file of how it was made."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, cast

import nibabel as nib
from monai.config import KeysCollection
from monai.transforms import MapTransform

from monai_saliency.cases import case_name
from monai_saliency.handlers.summary import summarize
from monai_saliency.storage.files import atomic_path, write_whole
from monai_saliency.storage.scans import scan_stem
from monai_saliency.transforms.save import GRID_KEY
from monai_saliency.utils.affines import affine_in_mm
from monai_saliency.utils.arguments import a_path, flag
from monai_saliency.version import __version__

logger = logging.getLogger(__name__)

#: the derivative's place in the output folder
BIDS_FOLDER = "derivatives/monai-saliency"

_LABEL = "[a-zA-Z0-9+]+"
_NAME = re.compile(
    rf"(?P<entities>(?P<subject>sub-{_LABEL})(_[a-z]+-{_LABEL})*?)(_desc-(?P<desc>{_LABEL}))?_(?P<suffix>[a-zA-Z0-9]+)"
)
_WORDS = {
    "saliency": "how much each voxel supports the score (above 0) or opposes it (below 0)",
    "standard_error": "how far the choice of masks moves each voxel of the saliency map",
    "disagreement": "standard deviation of the saliency maps of the networks of an ensemble",
}
_EVERY_MAP = {"class", "channel", "score", "quantity"}
_NOT_OF_THE_MAP = {"case", "unit"}


class SaveBidsd(MapTransform):
    """Writes the maps of scans of a BIDS dataset as a BIDS derivative, ``derivatives/monai-saliency`` in the output
    folder.

    The map of ``sub-01/anat/sub-01_T1w.nii.gz`` is ``sub-01/anat/sub-01_desc-saliency_T1w.nii.gz`` there, on the scan's
    grid (``desc-saliency1``, ``desc-saliency2``, ... for several maps), its standard error
    ``desc-standardError``. BIDS 1.11 has no suffix for such maps, so they keep the scan's. The JSON file next to each
    has the scan (``Sources``), the method, its seed, all settings, the score and its unit, and the row of
    ``summary.csv``.

    Scans with other names or in other folders, 2D images, and maps that are not on their scan are left out, with a
    warning. Place it after :class:`~monai_saliency.transforms.SaveSaliencyd` of the same keys, whose files it reads.
    Files of the case from an earlier run are removed.

    Args:
        keys: the keys of the maps ``(K, *spatial)``, the saliency map first.
        output_dir: the output folder, with the ``summary.settings.json`` of the run.
        allow_missing_keys: whether items may lack a key.
        bids: whether to write; otherwise what an earlier run has written is removed.
    """

    def __init__(
        self,
        keys: KeysCollection,
        output_dir: str | Path,
        allow_missing_keys: bool = False,
        bids: bool = True,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.output_dir = a_path("output_dir", output_dir)
        self.folder = self.output_dir / BIDS_FOLDER
        self.bids = flag("bids", bids)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        case = str(d["case"])
        self.withdraw(case)
        for key in self.key_iterator(d) if self.bids else ():
            scan = Path(os.path.abspath(case_name(d[key])))
            raw = _dataset_of(scan)
            is_scan = scan_stem(scan) == Path(case).name and GRID_KEY not in d and d[key].ndim == 4
            if raw is None or not is_scan:
                logger.warning(
                    "case %s is not in %s: its scan is not a volume of a BIDS folder (sub-01/anat/sub-01_T1w.nii.gz), "
                    "or its map is not on the scan",
                    case,
                    self.folder,
                )
                break
            self._describe(raw)
            self._save(d, key, scan.relative_to(raw))
        return d

    def withdraw(self, case: str) -> None:
        """Remove what an earlier run may have written of a case."""
        name = _NAME.fullmatch(Path(case).name)
        if name is None:
            return
        for key in self.keys:
            # With numbers.
            pattern = f"{name['subject']}/**/{_file_name(name, f'{key}*')}.*"
            for path in [*self.folder.glob(pattern)]:
                path.unlink()

    def _describe(self, raw: Path) -> None:
        """Write what the derivative is, and where the dataset is that it was made from."""
        content = {
            "Name": "Saliency maps",
            "BIDSVersion": "1.11.1",
            "DatasetType": "derivative",
            "GeneratedBy": [{"Name": "monai-saliency", "Version": __version__}],
            "DatasetLinks": {"raw": Path(os.path.relpath(raw, self.folder)).as_posix()},
        }
        _write_json(self.folder / "dataset_description.json", content)

    def _save(self, data: Mapping[Hashable, Any], key: Hashable, scan: Path) -> None:
        """Write the maps of a key with their JSON files; ``scan`` is the path below the dataset's folder."""
        name = _NAME.fullmatch(scan_stem(scan))
        assert name is not None  # as its case
        folder = self.folder / scan.parent
        image = cast(nib.Nifti1Image, nib.load(data[f"{key}_path"]))
        facts = self._facts(data, key)
        for place, facts_of_map in enumerate(facts):
            label, one = str(key), image
            if len(facts) > 1:
                label, one = f"{key}{place + 1}", image.slicer[..., place]
            stem = _file_name(name, label)
            with atomic_path(folder / f"{stem}.nii.gz") as temporary:
                nib.save(one, temporary)
            facts_of_map["Sources"] = [f"bids:raw:{scan.as_posix()}"]
            _write_json(folder / f"{stem}.json", facts_of_map)

    def _facts(self, data: Mapping[Hashable, Any], key: Hashable) -> list[dict[str, Any]]:
        """How each map of a key was made, and of what; of maps next to the saliency map only what these share."""
        explanation, maps = data.get("explanation"), data[key]
        settings = self._settings(data.get("settings"))
        rows: list[dict[str, Any]] = [{}] * len(maps)
        if explanation is not None:
            rows = summarize(str(data["case"]), explanation, maps.numpy(force=True), affine_in_mm(maps))
        facts = []
        for row in rows:
            columns = row.keys() - _NOT_OF_THE_MAP if key == self.keys[0] else row.keys() & _EVERY_MAP
            known = {
                "Description": _description(str(key)),
                "SkullStripped": False,
                "Units": row.get("unit", "arbitrary"),
                "Method": data.get("method") or settings.get("masks", "unknown"),
                "Seed": _seed(settings),
            }
            for column, value in row.items():
                if column in columns and value != "" and value == value:  # neither empty nor nan
                    known[_camel(f"_{column}")] = value
            facts.append(known | {"Settings": settings})
        return facts

    def _settings(self, mark: str | None) -> dict[str, str]:
        """The settings of a mark in ``summary.settings.json``."""
        path = self.output_dir / "summary.settings.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        settings: dict[str, str] = known.get(mark, {})
        return settings


def _description(key: str) -> str:
    """What the maps of a key are."""
    for name, words in _WORDS.items():
        if key.endswith(name):
            return words
    return key


def _seed(settings: Mapping[str, str]) -> int | str:
    """The first seed among some settings."""
    for name, value in settings.items():
        if name.endswith(".seed") and value.isdigit():
            return int(value)
    return "none"


def _dataset_of(scan: Path) -> Path | None:
    """The BIDS folder of a scan in ``sub-01/anat`` or ``sub-01/ses-1/anat``; None for other scans."""
    name = _NAME.fullmatch(scan_stem(scan))
    for folder in scan.parents[1:3]:
        if name is not None and folder.name == name["subject"]:
            return folder.parent
    return None


def _file_name(name: re.Match[str], label: str) -> str:
    """The name of a file that was made of a scan with a name, without its ending."""
    label = _camel(f"{name['desc']}_{label}" if name["desc"] else label)
    return f"{name['entities']}_desc-{label}_{name['suffix']}"


def _camel(words: str) -> str:
    """``standard_error`` as ``standardError``: labels have letters and digits only."""
    first, *others = re.split(r"[^a-zA-Z0-9*]+", words)
    return first + "".join(word[:1].upper() + word[1:] for word in others)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=1, default=str) + "\n")
