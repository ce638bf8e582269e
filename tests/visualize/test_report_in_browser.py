"""The report, opened from disk in headless Chromium, and used as a reader does."""

import csv
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from helpers.reports import blobs, head, page_of, write_case, write_failure
from helpers.scans import OBLIQUE

from monai_saliency.visualize.report import write_report

CHROMIUM = shutil.which("chromium")
try:
    from playwright.sync_api import Page, expect, sync_playwright
except ImportError:
    sync_playwright = None

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium (apt-get install chromium)"),
    pytest.mark.skipif(sync_playwright is None, reason="needs pip install playwright"),
]

# WebGL without a GPU.
ARGUMENTS = ["--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist"]
SHAPE = (46, 54, 38)
FEW, MANY = (1280, 720), (1440, 900)  # laptop and desktop
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CT with two classes, a photograph, two more scans and a failure."""
    out = tmp_path_factory.mktemp("report") / "out"
    scan = np.rint(head(SHAPE, -1000, 1200))
    maps = np.stack(
        [
            blobs(SHAPE, ((0.4, 0.6, 0.5), 0.5), ((0.6, 0.4, 0.5), -0.25), ((0.5, 0.3, 0.6), 0.04)),
            blobs(SHAPE, ((0.55, 0.35, 0.6), 0.3)),
        ]
    )
    label = (maps[0] > 0.2).astype(np.uint8)
    write_case(out, "ct/one", scan, maps, OBLIQUE, errors=0.1 * maps.clip(0) + 0.01, label=label, score=0.5)
    nib.save(nib.Nifti1Image(scan, OBLIQUE), out / "scan.nii.gz")
    for case, score in (("b", 0.75), ("c", 0.25)):
        write_case(out, case, head(SHAPE, 0, 1), maps[:1], OBLIQUE, score=score)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 3)).astype(np.float32)
    write_case(out, "photo", pixels, blobs((40, 30), ((0.5, 0.2), 0.5))[None], np.eye(4), rows_down=True, score=0.1)
    write_failure(out, "broken", "its file is empty")
    write_report(out)
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS, "--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a page of a report. At the end no error and no request to a network has been seen."""
    seen: list[str] = []
    reports, pages = set(), []

    def open_(path: Path, size: tuple[int, int] = MANY) -> Page:
        page = browser.new_page(viewport={"width": size[0], "height": size[1]})
        pages.append(page)
        page.set_default_timeout(90_000)
        page.on("console", lambda message: seen.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: seen.append(f"error: {error}"))
        page.on("request", lambda request: seen.append(f"request: {request.url[:200]}"))
        reports.add((path.parent.parent if path.parent.name == "cases" else path.parent).as_uri())
        page.goto(path.as_uri())
        if path.parent.name == "cases":
            ready(page)
        return page

    yield open_
    for page in pages:
        page.close()
    known = *(f"request: {report}/" for report in reports), "request: data:", "request: blob:"
    assert not [each for each in seen if not each.startswith(known)]
    assert any(each.endswith(("case.js", "cohort.js")) for each in seen)


def ready(page: Any) -> None:
    page.wait_for_selector("body[data-state=ready]", state="attached")
    page.wait_for_timeout(100)  # a frame is drawn


def change(page: Any, control: str, value: Any) -> None:
    """Set a slider, box or choice, as a hand does."""
    found = page.locator(f"#{control}")
    if isinstance(value, bool):
        found.set_checked(value)
    elif found.evaluate("each => each.tagName") == "SELECT":
        found.select_option(value)
    else:
        found.fill(str(value))
    ready(page)


def read(page: Any) -> dict[str, list[float]]:
    """What is shown at the crosshair."""
    found = {}
    for name in ("mm", "voxel", "pixel", "scan", "map", "standard-error", "label"):
        cell = page.locator(f"#at-{name}")
        if cell.count():
            found[name] = [float(each) for each in re.findall(r"-?\d[\d.]*(?:e-?\d+)?", cell.inner_text())]
    return found


def check_crosshair(page: Any, folder: Path, number: int = 0) -> tuple[int, ...]:
    """What is shown at the crosshair is what the NIfTI files have there."""
    shown = read(page)
    voxel = tuple(map(int, shown["voxel"]))
    maps = nib.load(folder / "ct/one_saliency.nii.gz")
    errors = nib.load(folder / "ct/one_standard_error.nii.gz")
    scan = nib.load(folder / "scan.nii.gz")
    assert shown["mm"] == pytest.approx(nib.affines.apply_affine(maps.affine, voxel).tolist(), abs=0.06)
    assert shown["scan"] == pytest.approx([scan.dataobj[voxel]], abs=2)
    for name, image in (("map", maps), ("standard-error", errors)):
        whole = np.asarray(image.dataobj)[..., number]
        assert shown[name] == pytest.approx([whole[voxel]], abs=1.1e-3 * float(np.abs(whole).max()))
    assert shown["label"] == [float(np.asarray(maps.dataobj)[..., 0][voxel] > 0.2)]
    return voxel


def test_the_table_sorts_and_filters(open_page: Open, folder: Path) -> None:
    page = open_page(folder / "report" / "index.html", FEW)

    def cases() -> list[str]:
        return [each.inner_text() for each in page.locator("#cases tbody tr:visible td:nth-child(2)").all()]

    assert cases() == ["b", "broken", "c", "ct/one", "ct/one", "photo"]
    by_score = page.get_by_role("button", name="Score")
    by_score.click()
    assert cases() == ["photo", "c", "ct/one", "ct/one", "b", "broken"]
    by_score.click()
    assert cases() == ["b", "ct/one", "ct/one", "c", "photo", "broken"]  # what failed has no score
    page.locator("#search").fill("one")
    assert cases() == ["ct/one", "ct/one"]
    expect(page.locator("#count")).to_have_text("2 of 6 rows")
    page.locator("#class").select_option("class 1")
    assert cases() == ["ct/one"]
    page.locator("#search").fill("")
    page.locator("#class").select_option("")
    page.locator("#kind").select_option("failed")
    assert cases() == ["broken"]
    expect(page.locator("#cases")).to_contain_text("its file is empty")
    page.locator("#kind").select_option("")
    page.get_by_role("link", name="ct/one", exact=True).last.click()  # of its second class
    ready(page)
    assert page.url == f"{page_of(folder, 'ct/one').as_uri()}#map=1"
    expect(page.locator("h1")).to_have_text("ct/one")
    check_crosshair(page, folder, 1)
    page.get_by_role("link", name="cohort").click()
    expect(page.locator("#count")).to_have_text("6 of 6 rows")
    # Filters and order are in the address, and come back.
    page.locator("#search").fill("one")
    page.locator("#class").select_option("class 1")
    for back in (page.go_back, page.get_by_role("link", name="cohort").click):
        page.get_by_role("link", name="ct/one", exact=True).click()
        ready(page)
        back()
        expect(page.locator("#count")).to_have_text("1 of 6 rows")
        assert page.locator("#search").input_value() == "one"
        assert page.locator("th[data-column=score]").get_attribute("aria-sort") == "descending"
    # A point of a plot opens its case.
    page.locator(".plots a[href*='map=1'] circle").first.click()
    ready(page)
    assert page.url == f"{page_of(folder, 'ct/one').as_uri()}#map=1"


def test_each_control_changes_the_volume(open_page: Open, folder: Path) -> None:
    page = open_page(page_of(folder, "ct/one"))
    stage = page.locator("#stage")
    maps = np.asarray(nib.load(folder / "ct/one_saliency.nii.gz").dataobj)
    # It begins at the peak.
    assert check_crosshair(page, folder) == np.unravel_index(maps[..., 0].argmax(), maps.shape[:3])
    expect(page.locator("#words")).to_contain_text("This map: ")
    low, high = page.locator("#words").inner_text().partition("This map: ")[2].split(" to ")
    assert (float(low), float(high)) == pytest.approx((maps[..., 0].min(), maps[..., 0].max()), abs=2e-3)
    before = stage.screenshot()
    for control, value in (
        *(("x", 12), ("y", 20), ("z", 25), ("opacity", 150), ("opacity", 900), ("threshold", 600), ("threshold", 100)),
        *(("map", "1"), ("map", "0e"), ("map", "0"), ("scale", "own"), ("window", "brain"), ("window", "bone")),
        *(("level", 300), ("width", 400), ("chance", False), ("outline", False)),
    ):
        change(page, control, value)
        after = stage.screenshot()
        assert after != before, control
        before = after
        check_crosshair(page, folder, int(page.locator("#map").input_value()[0]))
    box = stage.bounding_box()
    places = set()
    for across, down in ((0.22, 0.22), (0.3, 0.3), (0.2, 0.7), (0.28, 0.75)):
        page.mouse.click(box["x"] + across * box["width"], box["y"] + down * box["height"])
        ready(page)
        places.add(check_crosshair(page, folder))
    assert len(places) == 4


def test_keys_views_and_the_convention(open_page: Open, folder: Path) -> None:
    page = open_page(page_of(folder, "ct/one"))
    stage = page.locator("#stage")
    z, size = read(page)["mm"][2], stage.bounding_box()
    for press, less in ((("ArrowUp",) * 2, False), (("ArrowDown",) * 4, True)):
        for key in press:
            page.keyboard.press(key)
            ready(page)
        assert (read(page)["mm"][2] < z) == less
        check_crosshair(page, folder)
    before = read(page)
    page.mouse.move(size["x"] + 0.2 * size["width"], size["y"] + 0.7 * size["height"])
    page.mouse.wheel(0, 100)
    ready(page)
    assert read(page) != before
    check_crosshair(page, folder)
    for view in ("Sagittal", "Coronal", "Axial", "3D", "All"):
        drawn = stage.screenshot()
        page.get_by_role("button", name=view, exact=True).click()
        ready(page)
        assert stage.screenshot() != drawn, view
    drawn = stage.screenshot()
    stage.focus()
    for key in "vcshlju":  # the viewer's own
        page.keyboard.press(key)
    ready(page)
    assert stage.screenshot() == drawn
    change(page, "radiological", True)
    assert stage.screenshot() != drawn
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    expect(page.locator("h1")).to_have_text("photo")
    ready(page)
    page.keyboard.press("ArrowLeft")
    expect(page.locator("h1")).to_have_text("ct/one")
    ready(page)
    assert page.locator("#radiological").is_checked()


def test_ratings_are_kept_and_exported(open_page: Open, folder: Path) -> None:
    page = open_page(page_of(folder, "photo"), FEW)
    page.locator("#rating").select_option("doubtful")
    page.locator("#comment").fill('=1+1, "so"')
    page.reload()
    ready(page)
    assert page.locator("#rating").input_value() == "doubtful"
    page.get_by_role("link", name="cohort").click()
    expect(page.locator("[data-rating=photo]")).to_have_text("doubtful")
    with page.expect_download() as download:
        page.locator("#export").click()
    lines = [*csv.reader(download.value.path().read_text(encoding="utf-8").splitlines())]
    assert [line[:3] for line in lines] == [["case", "rating", "comment"], ["photo", "doubtful", '\'=1+1, "so"']]


@pytest.mark.parametrize("size", [(1280, 720), (390, 844)])
def test_nothing_is_cut(size: tuple[int, int], open_page: Open, folder: Path) -> None:
    """Pages are as wide as the window, the cohort's table too. Pages are dark where the system is."""
    for path in (folder / "report" / "index.html", page_of(folder, "ct/one"), page_of(folder, "photo")):
        page = open_page(path, size)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
            inside = "each => !each.closest('.matrix') && each.getBoundingClientRect().right > innerWidth + 1"
            assert not page.evaluate(
                f"[...document.querySelectorAll('body *')].filter({inside}).map(each => each.outerHTML)"
            )
            dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] < 128")
            assert dark == (scheme == "dark")


def test_all_columns_on_demand(open_page: Open, folder: Path) -> None:
    """The table shows the columns that fit; the others come with a click, and stay."""
    page = open_page(folder / "report" / "index.html", FEW)
    lowest = page.locator("th[data-column=lowest_saliency]")
    expect(lowest).to_be_hidden()
    page.locator("#columns").check()
    expect(lowest).to_be_visible()
    page.get_by_role("link", name="photo", exact=True).click()
    ready(page)
    page.go_back()
    expect(lowest).to_be_visible()


def test_a_cohort_prints_on_wide_pages(open_page: Open, folder: Path) -> None:
    page = open_page(folder / "report" / "index.html", FEW)
    boxes = re.findall(rb"/MediaBox\s*\[\s*0 0 ([\d.]+) ([\d.]+)", page.pdf(format="A4", prefer_css_page_size=True))
    assert boxes
    assert all(float(width) > float(height) for width, height in boxes)
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 1030, "height": 700})  # of such a page, in CSS pixels
    assert page.evaluate("document.querySelector('#cases').scrollWidth") <= 1030


def test_print_is_a_page_with_the_picture(open_page: Open, folder: Path) -> None:
    for case in ("ct/one", "photo"):
        page = open_page(page_of(folder, case), FEW)
        assert len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4"))) == 1
        levels = page.evaluate(
            "(({ width, height }, pen) => new Set(pen.getImageData(0, 0, width, height).data).size)"
            "(document.getElementById('print'), document.getElementById('print').getContext('2d'))"
        )
        assert levels > 50
