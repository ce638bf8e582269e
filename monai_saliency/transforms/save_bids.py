"""Maps as a BIDS derivative: files that BIDS tools find by their names, each with a JSON file of how it was made."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import nibabel as nib
from monai.config import KeysCollection
from monai.transforms import MapTransform

from monai_saliency.cases import case_name
from monai_saliency.handlers.summary import summarize
from monai_saliency.storage.files import atomic_path
from monai_saliency.storage.scans import scan_stem
from monai_saliency.storage.tables import CaseTable
from monai_saliency.utils.affines import affine_in_mm
from monai_saliency.utils.arguments import a_path, flag
from monai_saliency.version import __version__

__all__ = ["BIDS_FOLDER", "SaveBidsd"]

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
_NOT_OF_THE_MAP = {"case", "unit", "seconds", "settings", "scan"}


class SaveBidsd(MapTransform):
    """Writes the maps of scans of a BIDS dataset as a BIDS derivative, ``derivatives/monai-saliency`` in the output
    folder.

    The map of ``sub-01/anat/sub-01_T1w.nii.gz`` is ``sub-01/anat/sub-01_desc-saliency_T1w.nii.gz`` there, on the scan's
    grid (``desc-saliency1``, ``desc-saliency2``, ... for several maps), its standard error
    ``desc-standardError``. BIDS 1.11 has no suffix for such maps, so they keep the scan's. The JSON file next to each
    has the scan (``Sources``), the method, its seed, all settings, the score and its unit, and the row of
    ``summary.csv``. The case's rows of the tables are ``desc-saliencyRegions_T1w.tsv``: BIDS has no name for such
    tables, so ``.bidsignore`` lists them.

    Scans with other names or in other folders, 2D images, and maps that are not on their scan are left out, with a
    warning. Place it after :class:`~monai_saliency.transforms.SaveSaliencyd` of the same keys, whose files it reads.
    Files of the case from an earlier run are removed.

    Args:
        keys: the keys of the maps ``(K, *spatial)``, the saliency map first.
        output_dir: the output folder, with the ``summary.settings.json`` of the run.
        tables: tables whose rows of the case are written too.
        allow_missing_keys: whether items may lack a key.
        grid_key: items that have this key have maps that are not on their scan, and are left out.
        bids: whether to write; otherwise what an earlier run has written is removed.
    """

    def __init__(
        self,
        keys: KeysCollection,
        output_dir: str | Path,
        tables: Sequence[CaseTable] = (),
        allow_missing_keys: bool = False,
        grid_key: Hashable | None = None,
        bids: bool = True,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.output_dir = a_path("output_dir", output_dir)
        self.tables = tables
        self.grid_key = grid_key
        self.bids = flag("bids", bids)

    @property
    def folder(self) -> Path:
        """The derivative's folder."""
        return self.output_dir / BIDS_FOLDER

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        self.withdraw(str(d["case"]))
        for key in self.key_iterator(d) if self.bids else ():
            scan = Path(os.path.abspath(case_name(d[key])))
            raw = _dataset_of(scan)
            if raw is None or scan_stem(scan) != Path(d["case"]).name or self.grid_key in d or d[key].ndim != 4:
                logger.warning(
                    "case %s is not in %s: its scan is not a volume of a BIDS folder (sub-01/anat/sub-01_T1w.nii.gz), "
                    "or its map is not on the scan",
                    *(d["case"], self.folder),
                )
                break
            self._describe(raw)
            self._save(d, key, scan.relative_to(raw))
        return d

    def withdraw(self, case: str) -> None:
        """Remove what an earlier run may have written of a case."""
        if found := _NAME.fullmatch(Path(case).name):
            for key in self.keys:
                # With numbers, and the names of tables.
                name = _file_name(found, f"{key}*")
                for path in [*self.folder.glob(f"{found['subject']}/**/{name}.*")]:
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
        with atomic_path(self.folder / ".bidsignore") as temporary:
            temporary.write_text("*.tsv\n")

    def _save(self, data: Mapping[Hashable, Any], key: Hashable, scan: Path) -> None:
        """Write the maps of a key with their JSON files, and the tables with the first one."""
        name = _NAME.fullmatch(scan_stem(scan))
        image = cast(nib.Nifti1Image, nib.load(data[f"{key}_path"]))
        assert name is not None  # as its case
        place, count = self.folder / scan.parent, len(data[key])
        for number, facts in enumerate(self._facts(data, key), 1):
            stem = _file_name(name, f"{key}{number if count > 1 else ''}")
            with atomic_path(place / f"{stem}.nii.gz") as temporary:
                nib.save(image if count == 1 else image.slicer[..., number - 1], temporary)
            _write_json(place / f"{stem}.json", facts | {"Sources": [f"bids:raw:{scan.as_posix()}"]})
        for table in self.tables if key == self.keys[0] else ():
            if rows := [row for row in table.read() if row["case"] == data["case"]]:
                _write_tsv(place / f"{_file_name(name, f'{key}_{table.path.stem}')}.tsv", rows)

    def _facts(self, data: Mapping[Hashable, Any], key: Hashable) -> Iterator[dict[str, Any]]:
        """How each map of a key was made, and of what."""
        known = self.output_dir / "summary.settings.json"
        settings = json.loads(known.read_text()).get(data.get("settings"), {}) if known.exists() else {}
        seeds = [int(value) for name, value in settings.items() if name.endswith(".seed") and value.isdigit()]
        maps, explanation = data[key], data.get("explanation")
        rows: list[dict[str, Any]] = [{}] * len(maps)
        if explanation is not None:
            rows = summarize(str(data["case"]), explanation, maps.numpy(force=True), affine_in_mm(maps))
        for row in rows:
            names = row.keys() - _NOT_OF_THE_MAP if key == self.keys[0] else row.keys() & _EVERY_MAP
            yield {
                "Description": next((_WORDS[name] for name in _WORDS if str(key).endswith(name)), str(key)),
                "SkullStripped": False,
                "Units": row.get("unit", "arbitrary"),
                "Method": data.get("method") or settings.get("masks", "unknown"),
                "Seed": seeds[0] if seeds else "none",
                **{_camel(f"_{name}"): value for name, value in row.items() if name in names and _is_known(value)},
                "Settings": settings,
            }


def _dataset_of(scan: Path) -> Path | None:
    """The BIDS folder of a scan in ``sub-01/anat`` or ``sub-01/ses-1/anat``; None for other scans."""
    subject = scan.name.partition("_")[0]
    is_named = _NAME.fullmatch(scan_stem(scan)) is not None
    return next((above.parent for above in scan.parents[1:3] if is_named and above.name == subject), None)


def _file_name(name: re.Match[str], label: str) -> str:
    """The name of a file that was made of a scan with a name, without its ending."""
    label = _camel(f"{name['desc']}_{label}" if name["desc"] else label)
    return f"{name['entities']}_desc-{label}_{name['suffix']}"


def _camel(words: str) -> str:
    """``standard_error`` as ``standardError``: labels have letters and digits only."""
    first, *others = re.split(r"[^a-zA-Z0-9*]+", words)
    return first + "".join(word[:1].upper() + word[1:] for word in others)


def _is_known(value: Any) -> bool:
    return value != "" and value == value


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def _write_tsv(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Rows without their case, as BIDS has tables: tabs, and ``n/a`` for what is not known."""
    with atomic_path(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow([*rows[0]][1:])
        writer.writerows([value or "n/a" for value in row.values()][1:] for row in rows)
