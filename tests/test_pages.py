"""The README and the pages beside it: each of their Python examples runs, and each command's flags exist."""

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers.notebooks import run_notebook
from helpers.paths import BUNDLE, ROOT
from helpers.scans import LPS, volume
from monai.data import DataLoader, Dataset, MetaTensor, list_data_collate
from monai.engines import SupervisedEvaluator
from monai.inferers import SimpleInferer
from monai.transforms import Activationsd, Compose, EnsureChannelFirstd, LoadImaged, ScaleIntensityd

import monai_saliency as ms
from monai_saliency import methods
from monai_saliency.bundle.configs import overlay_path
from monai_saliency.methods.settings import all_settings, own_settings

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "tutorials" / "pages").glob("*.md"))]
#: those that are not in `PAGES` run as tests of their engine
WITH_COMMANDS = [*PAGES, *BUNDLE.rglob("README.md"), *sorted((ROOT / "tutorials" / "engines").glob("*.md"))]


class Network(torch.nn.Module):
    """Classifies images, alone or in a dictionary, and moves one image onto another."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(channels, 2)

    def forward(self, images: Any, moving: torch.Tensor | None = None) -> torch.Tensor:
        if moving is not None:
            return torch.cat([images * moving, moving, moving], 1)
        images = images["image"] if isinstance(images, dict) else images
        return self.head(images.flatten(2).mean(-1))


def a_loop(folder: Path) -> dict[str, Any]:
    """An evaluator, a Lightning module and a loader over two scans."""
    lightning: Any = pytest.importorskip("lightning.pytorch", reason='needs pip install "monai-saliency[lightning]"')
    files = [volume(folder / f"{name}.nii.gz", (12, 11, 10), LPS, seed) for seed, name in enumerate(["scan", "other"])]
    preprocessing = Compose([LoadImaged("image"), EnsureChannelFirstd("image"), ScaleIntensityd("image")])
    loader = DataLoader(Dataset([{"image": str(file)} for file in files], preprocessing), batch_size=1)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Network()

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return self.model(batch["image"])

    evaluator = SupervisedEvaluator(
        torch.device("cpu"), loader, Network(), postprocessing=Compose([Activationsd("pred", softmax=True)])
    )
    trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    made = {"evaluator": evaluator, "Module": Module, "trainer": trainer, "loader": loader}
    return made | {"inferer": SimpleInferer(), "preprocessing": preprocessing}


def volumes() -> dict[str, Any]:
    """Two volumes of one channel, of voxels of 8 mm, with what the examples say beside them."""
    generator = torch.Generator().manual_seed(0)
    affine = torch.diag(torch.tensor([8.0] * 3 + [1]))
    images = list_data_collate([MetaTensor(torch.rand(1, 12, 12, 12, generator=generator), affine) for _ in range(2)])
    labels = torch.zeros(2, 1, 12, 12, 12, dtype=torch.int64)
    labels[..., :5], labels[..., 8:] = 1, 2
    made = {"images": images, "network": Network(), "names": ["one", "two"], "labels": list(labels)}
    plain = images.as_tensor()
    return made | {"priors": plain * 2, "fixed": plain, "moving": plain.flip(-1)}


def in_python(folder: Path) -> dict[str, Any]:
    return a_loop(folder) | volumes() | {"dataset_dir": folder}


def with_segmentation(folder: Path) -> dict[str, Any]:
    """Two volumes, and a network that segments what is bright."""
    return volumes() | {"ms": ms, "network": lambda images: torch.cat([0.8 - images, images - 0.8], 1)}


def with_xaitk(folder: Path) -> dict[str, Any]:
    photograph = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    return {"ms": ms, "photograph": photograph, "network": Network(3)}


def check_readme(made: dict[str, Any], folder: Path) -> None:
    assert made["maps"].shape[0] == 2
    assert made["maps"].abs().max() > 0


def check_quickstart(made: dict[str, Any], folder: Path) -> None:
    assert {path.name for path in (folder / "maps").glob("scan*")} == {"scan_saliency.nii.gz", "scan_saliency.png"}


def check_python(made: dict[str, Any], folder: Path) -> None:
    names = {path.name for path in (folder / "maps").glob("*_saliency.nii.gz")}
    assert names == {"scan_saliency.nii.gz", "other_saliency.nii.gz"}
    assert [tuple(each.saliency.shape) for each in made["organs"]] == [(1, 12, 12, 12)] * 2
    assert made["t1_t2_flair"].shape == (2, 1, 12, 12, 12)
    assert ms.estimators.shapley_values(made["both"][0]).players == [0, 1, 2, "age", "crp"]
    inferer = made["my_method"](4, target=ms.ClassScore([0], "none"))
    assert torch.isfinite(inferer(made["images"], Network())).all()


def check_contributing(made: dict[str, Any], folder: Path) -> None:
    """Its tests pass, and its method is one that the bundle takes."""
    tests = [made[name] for name in made if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test()
    assert own_settings(made["slabs"]).keys() == {"thickness"}


def check_cost(made: dict[str, Any], folder: Path) -> None:
    """The map of the faster network is that of the network itself, up to half precision."""
    assert ms.networks.runtime_settings(ms.networks.accelerated(made["network"], amp="bf16")) == {"amp": "bf16"}
    expected = made["explain"](torch.ones(1, 1, 16, 16), made["network"])
    found = made["explain"](torch.ones(1, 1, 16, 16), ms.networks.accelerated(made["network"], amp="bf16"))
    assert made["maps"].shape == expected.shape
    assert float((found - expected).abs().max()) < 0.1 * float(expected.abs().max())


def with_preprocessing(folder: Path) -> dict[str, Any]:
    return {"network": Network(), "preprocessing": Compose([])}


def check_viewers(made: dict[str, Any], folder: Path) -> None:
    assert made["explain"].explain.masks.num_masks == 1000
    assert callable(made["add_saliency"])  # tests/test_deploy.py runs such an app


#: by page: what its examples are given, and how what they have made at the end is checked
GIVEN: dict[str, tuple[Callable[[Path], dict[str, Any]], Any]] = {
    "CONTRIBUTING": (lambda folder: {}, check_contributing),
    "viewers": (with_preprocessing, check_viewers),
    "cost": (lambda folder: {}, check_cost),
    "README": (lambda folder: volumes(), check_readme),
    "python": (in_python, check_python),
    "quickstart": (in_python, check_quickstart),
    "targets": (with_segmentation, None),
    "xaitk": (with_xaitk, None),
}
#: by page: the shape of the maps that its last example makes
SHAPES = dict.fromkeys(("python", "quickstart"), (2, 1, 12, 12, 12))
SHAPES |= {"targets": (2, 5, 12, 12, 12), "xaitk": (2, 24, 20)}


def blocks(page: Path, language: str) -> list[str]:
    """A page's blocks of a language; those of commands have none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def test_every_page_with_examples_is_known() -> None:
    assert {page.stem for page in PAGES if blocks(page, "python")} == {*GIVEN}


@pytest.mark.parametrize("name", GIVEN)
def test_the_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, as they stand."""
    monkeypatch.chdir(tmp_path)
    (page,) = (page for page in PAGES if page.stem == name)
    given, check = GIVEN[name]
    made = given(tmp_path)
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), made)
    assert name not in SHAPES or made["maps"].shape == SHAPES[name]
    if check:
        check(made, tmp_path)


def test_every_target_of_the_table_can_be_made() -> None:
    lines = (ROOT / "tutorials/pages/targets.md").read_text().splitlines()
    rows = [line.split("|")[2] for line in lines if line.startswith("|") and "(" in line]
    made = [eval(f"ms.{code}", {"ms": ms}) for row in rows for code in re.findall(r"`(\w+\(.*?\))`(?:,|\s|$)", row)]
    assert {type(target).__name__ for target in made} == {name for name in ms.targets.__all__ if hasattr(ms, name)}


def messages() -> list[str]:
    """The texts of the package, what differs from case to case left out."""
    nodes = [node for path in (ROOT / "monai_saliency").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    texts = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    texts += [[node] for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [
        "".join(str(getattr(part, "value", "")) for part in parts if isinstance(part, ast.Constant)) for parts in texts
    ]


def test_the_twenty_errors_are_ours() -> None:
    """Each row of the tables of errors has words of one message, in their order."""
    page = (ROOT / "tutorials" / "pages" / "faq.md").read_text(encoding="utf-8")
    rows = [row for _, row in re.findall(r"^\| (`+) ?(.+?) ?\1 \|", page, re.MULTILINE)]
    assert len(rows) == 20
    parts = [[part.strip(" ,:`") for part in row.split("...")] for row in rows]
    found = [re.compile(".*".join(map(re.escape, filter(None, part))), re.DOTALL) for part in parts]
    texts = messages()
    assert not [each.pattern for each in found if not any(map(each.search, texts))]


def commands(page: Path) -> Iterator[list[str]]:
    """The commands in blocks without a language, as words."""
    for block in blocks(page, ""):
        if block.startswith("|"):
            continue  # what a command prints
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r" && ", line):
                yield shlex.split(part, comments=True)


def ids(*names: str) -> set[str]:
    """The ids of configs: of our bundle, or of an overlay by its name."""
    files = [BUNDLE / "configs" / "inference.yaml" if name == "inference" else overlay_path(name) for name in names]
    return {id for file in files for id in yaml.safe_load(file.read_text())}


def flags_known(words: list[str]) -> set[str]:
    """The flags that a command of `monai.bundle` takes: MONAI's own, the ids of its configs, the method's settings."""
    text = " ".join(words)
    known = {"bundle_root", "config_file", "dataset_dir", "output_dir", "tracking"}
    overlays = re.findall(r"overlay (\w+)", text)
    known |= ids(*overlays)
    if "bundle/configs/train.yaml" in text:
        known |= {*yaml.safe_load((BUNDLE / "configs" / "train.yaml").read_text())}
    if "bundle/configs/inference.yaml" in text or "..." in words:  # the rest of our bundle's command
        known |= ids("inference") | {*all_settings()}
    return known | {f"saliency_{name}" for name in all_settings()}


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_flags_and_files_of_commands_exist(page: Path) -> None:
    lost = []
    for words in commands(page):
        text = " ".join(words)
        files = re.findall(r"(?<![\w./$])((?:bundle|tests|tutorials)/[\w./]+\.(?:ya?ml|json|py|sbatch|pt))\b", text)
        lost += [
            f"{file}: {text}"
            for file in files
            if not (ROOT / file).exists() and "eval" not in file and ".ts" not in file
        ]
        if "monai.bundle" in words and {"run"} & {*words}:
            start = words.index("monai.bundle")
            flags = [word.removeprefix("--").partition("=")[0] for word in words[start:] if word.startswith("--")]
            lost += [f"--{flag}: {text}" for flag in flags if flag not in flags_known(words)]
        if words[0] == "monai-saliency":
            assert words[1] in {"demo", "overlay", "methods", "report", "gather", "--version"}, text
    assert not lost, "\n".join(lost)


def test_the_readme_has_its_two_commands_and_is_short() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 120
    run = "python -m monai.bundle run --bundle_root bundle --config_file bundle/configs/inference.yaml"
    assert f'pip install ".[demo]" && {run}\n' in readme
    assert 'pip install ".[test]" && pytest -n 2\n' in readme
    assert readme.index("![") < readme.index("## ")  # a picture in the first screen


def test_the_readme_names_every_method_and_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("## Which method when")[2].partition("\n## ")[0]
    assert {*methods.__all__} <= {*re.findall(r"`(\w+)`", table)}
    for page in PAGES:
        assert page.stem == "README" or f"{page.name})" in readme, page.name


# The tutorials: stored as they ran, and still running.
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))

#: run by a test of its own, tests/bundle/test_nnunet_overlay.py, where nnU-Net is installed
ELSEWHERE = {"nnunet"}
#: what a test replaces, by notebook: fewer masks and runs, all cells and their assertions
SMALLER = {
    "cohort_overnight": {"num_scans=4": "num_scans=3", '"300"': '"40"'},
    "coming_from_captum": {"range(3):\n        torch": "range(1):\n        torch", "(40, 80)": "(40,)"},
    "coming_from_xaitk": {"1000": "200"},
    "explain_a_brain": {"stride=8": "stride=16", "125, 250, 500": "100", "500": "100"},
    "explain_your_own_bundle": {'("run", "explain",': '("run", "explain", "--saliency_num_masks", "60",'},
    "first_map": {"focused_rise(": "focused_rise(100, "},
    "is_this_map_any_good": {"focused_rise(": "focused_rise(100, ", "steps=10": "steps=4"},
    "segmentation_ct": {"window_size=8, stride=4": "window_size=8, stride=8"},
    "which_method": {'"focused_rise", "hierarchical_occlusion"': '"hierarchical_occlusion"'},
    "sweep_on_slurm": {"(50, 100, 200)": "(20, 40)", "num_scans=2": "num_scans=1"},
}

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@each_notebook
def test_stored_notebook_is_as_it_ran(path: Path) -> None:
    assert path.stat().st_size < 1_000_000
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    # Run in one go from the top, none left out.
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output["text"] for output in outputs if output.get("name") == "stderr"]
    assert [output for output in outputs if "image/png" in output.get("data", {})]


def prose(path: Path) -> list[str]:
    """The texts of a notebook."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]


@each_notebook
def test_begins_with_what_a_reader_will_have_and_ends_with_where_to_go(path: Path) -> None:
    texts = prose(path)
    first = " ".join(texts[0].split())
    assert first.startswith("# ")
    assert "At the end you will" in first
    assert "## Where to go next" in texts[-1]
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert [notebook["cells"][place]["cell_type"] for place in (0, -1)] == ["markdown", "markdown"]


@each_notebook
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", "\n".join(prose(path)))
    assert [link for link in links if link.endswith(".ipynb")]
    missing = [link for link in links if not link.startswith("http") and not (path.parent / link).exists()]
    assert not missing


@each_notebook
def test_finds_the_bundle_from_the_root_too(path: Path) -> None:
    """As the notebook whose first cells are run from there does."""
    code = path.read_text(encoding="utf-8")
    if "../bundle" in code:
        found = 'next(folder for folder in (Path(\\"bundle\\"), Path(\\"../bundle\\")) if folder.is_dir())'
        assert code.count("../bundle\\") == code.count(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem not in ELSEWHERE], ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    """One from the root, as a reader may who has cloned the project."""
    run_notebook(path.name, tmp_path, "." if path.stem == "first_map" else "tutorials", SMALLER.get(path.stem, {}))
