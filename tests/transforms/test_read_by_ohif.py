"""The maps of a DICOM series as OHIF reads them, by its own loader and adapters, in Node and in a browser.

NODE_PATH is the folder with what tests/helpers/ohif/package.json lists: npm install --ignore-scripts.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.dicom_series import expected_affine, write
from helpers.paths import ROOT
from monai.data import MetaTensor

from monai_saliency.storage.dicom import read_series
from monai_saliency.transforms import SaveDicomd

pydicom = pytest.importorskip("pydicom", reason="needs the dicom extra")

MODULES = Path(os.environ.get("NODE_PATH", "nowhere"))
WORKER = "@cornerstonejs/dicom-image-loader/dist/esm/decodeImageFrameWorker.js"
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("node") is None or not (MODULES / WORKER).exists(),
        reason="needs node, and NODE_PATH with the packages of tests/helpers/ohif/package.json",
    ),
]
SHAPE = (9, 8, 12)  # slices, rows, columns; OHIF's adapters want pixels in fours, and bits in whole pairs of bytes
PAGE = "<script>window.require = () => ({})</script><script type=module src=/out/browser.js></script>"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """The folder with the series ``in``, its map and its region, and the bundled readers ``out``; the map."""
    folder = tmp_path_factory.mktemp("ohif")
    scan = np.arange(np.prod(SHAPE), dtype=np.int16).reshape(SHAPE)
    image = read_series(write(folder / "in", voxels=scan))
    values = torch.randn(1, *image.shape, generator=torch.Generator().manual_seed(0))
    meta = image.meta | {"filename_or_obj": str(next((folder / "in").iterdir()))}
    SaveDicomd("saliency", folder, dicom_seg=0.25)({"saliency": MetaTensor(values, meta=meta), "case": "a"})
    sources = ROOT / "tests" / "helpers" / "ohif"
    builds = [
        ["--platform=node", "--format=cjs", '--define:import.meta.url="file:///"', str(sources / "node.mjs")],
        ["--format=esm", "--external:fs", "--external:path", "--external:zlib", str(sources / "browser.mjs")],
        ["--format=esm", "--external:fs", "--external:path", str(MODULES / WORKER)],
    ]
    for build in builds:
        common = ["--bundle", "--main-fields=module,main", "--log-level=error", f"--outdir={folder / 'out'}"]
        subprocess.run(["node", MODULES / "esbuild/bin/esbuild", *common, *build], check=True, timeout=120)
    return folder, values[0]


def check(read: dict[str, Any], folder: Path, saliency: torch.Tensor) -> None:
    """The viewer's voxels have the map's values at the map's places, and refer to the series."""
    columns, rows, slices = read["dimensions"]
    assert (slices, rows, columns) == SHAPE
    direction = np.reshape(read["direction"], (3, 3)).T * read["spacing"]
    found, region = (np.reshape(read[name], SHAPE) for name in ("map", "segmentation"))
    scan = np.reshape(read["scan"], SHAPE) if "scan" in read else None
    seen = set()
    for k, j, i in np.ndindex(*SHAPE):
        lps = direction @ [i, j, k] + read["origin"]
        at = np.linalg.solve(expected_affine(), [*lps * (-1, -1, 1), 1])[:3]
        place = tuple(np.rint(at).astype(int))
        assert np.abs(at - place).max() < 1e-4
        seen.add(place)
        assert found[k, j, i] == saliency[place]
        assert region[k, j, i] == (saliency[place] >= 0.25 * saliency.max())
        if scan is not None:
            column, row, number = place
            assert scan[k, j, i] == 2 * ((number * SHAPE[1] + row) * SHAPE[2] + column) - 1024
    assert len(seen) == saliency.numel()
    assert (read["label"], read["series"]) == ("saliency", "1.2.3")
    assert set(read["instances"]) == {str(pydicom.dcmread(file).SOPInstanceUID) for file in (folder / "in").iterdir()}


def test_in_node(made: tuple[Path, torch.Tensor]) -> None:
    folder, saliency = made
    names = [folder / name for name in ("out/node.js", "in", "a_saliency.dcm", "a_saliency_seg.dcm")]
    done = subprocess.run(["node", *names], check=True, capture_output=True, text=True, timeout=60)
    read = json.loads(done.stdout)
    check(read, folder, saliency)
    files = [folder / "in" / each.removeprefix("dicomfile:") for each in read["imageIds"]]
    heights = [pydicom.dcmread(file).ImagePositionPatient[2] for file in files]
    assert heights == sorted(heights)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium (apt-get install chromium)")
def test_in_a_browser(made: tuple[Path, torch.Tensor]) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    folder, saliency = made

    def serve(route: Any) -> None:
        path = folder / route.request.url.removeprefix("http://viewer/")
        kind = "text/javascript" if path.suffix == ".js" else "application/dicom"
        if path == folder:
            route.fulfill(body=PAGE, content_type="text/html")
        else:
            route.fulfill(body=path.read_bytes(), content_type=kind)

    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.route("**/*", serve)
        page.goto("http://viewer/")
        page.wait_for_function("() => !!window.readByViewer")
        slices = [f"/in/{file.name}" for file in (folder / "in").iterdir()]
        call = "names => window.readByViewer(...names)"
        read = page.evaluate(call, [slices, "/a_saliency.dcm", "/a_saliency_seg.dcm"])
    assert "scan" in read
    check(read, folder, saliency)
