"""The laws of the house: what may import what, what is reachable by name, and how long a text may be."""

import ast
import graphlib
import importlib
import importlib.util
import inspect
import json
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.files import voxels
from helpers.layouts import Bundle
from helpers.paths import BUNDLE, ROOT, TESTS
from monai.bundle import ComponentLocator, ConfigParser

from monai_saliency import PerturbationInferer, methods
from monai_saliency.__main__ import main
from monai_saliency.bundle.command import from_environment
from monai_saliency.version import __version__

#: From bottom to top: a room imports only from rooms to the left of it.
ROOMS = (
    *("errors", "version", "utils", "cases", "sharding", "masks", "storage", "estimators", "networks", "targets"),
    *("fills", "gradients", "inferers", "xaitk", "methods", "metrics", "visualize", "handlers", "transforms", "data"),
    *("distributed", "engines", "bundle", "deploy", "names", "", "__main__"),
)
#: Names with an underscore that Python documents as public.
DOCUMENTED = {"_asdict", "_exit", "_fields", "_make", "_replace"}
FOREIGN = "monai_saliency.utils.monai_private"
#: What the extras of pyproject.toml install.
EXTRAS = ("PIL", "accelerate", "fire", "highdicom", "holoscan", "ignite", "itk", "lightning", "matplotlib", "mlflow")
EXTRAS += ("nilearn", "nnunetv2", "pydicom", "pytorch_lightning", "ray", "skimage", "tqdm", "yaml")
MACHINE_PATH = re.compile(r"(?<![\w.@}-])/(?:work|home|root|Users|private|opt|tmp|var)/\w")


@dataclass(frozen=True)
class Module:
    """A module of the package.

    Attributes:
        name: dotted, ``monai_saliency.masks`` for a folder's ``__init__.py``.
        path: of its file.
    """

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @property
    def room(self) -> str:
        """The room that it stands in; "" for the package's own ``__init__.py``."""
        return [*self.name.split("."), ""][1]

    def at(self, node: ast.AST) -> str:
        """Where a node stands, and what it says."""
        return f"{self.path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:100]}"  # type: ignore[attr-defined]

    def imports(self) -> Iterator[tuple[ast.Import | ast.ImportFrom, str, str]]:
        """Each import, wherever it stands: the node, the module, and the name that is taken from it, or ""."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node, alias.name, ""
            elif isinstance(node, ast.ImportFrom):
                package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
                source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                for alias in node.names:
                    yield node, source, alias.name

    def uses(self) -> Iterator[tuple[ast.Import | ast.ImportFrom, "Module"]]:
        """The modules of the package that it imports."""
        for node, source, name in self.imports():
            found = modules().get(f"{source}.{name}") or modules().get(source)
            if found:
                yield node, found

    def defined(self) -> set[str]:
        """The names that it defines: of functions, classes, variables and attributes."""
        names = set()
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
        return names


@lru_cache(maxsize=1)
def modules() -> dict[str, Module]:
    """All modules of the package, by name."""
    found = {}
    for path in sorted((ROOT / "monai_saliency").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring."""
    docstring = function.body[0] if ast.get_docstring(function) else None
    length = (function.end_lineno or 0) - function.lineno + 1
    return length - ((docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0)


def test_a_room_imports_only_from_rooms_below_it() -> None:
    """Type checkers' imports included, and those inside functions."""
    assert {module.room for module in modules().values()} <= {*ROOMS}
    found = [
        f"{module.at(node)} is above {module.room}"
        for module in modules().values()
        for node, used in module.uses()
        if ROOMS.index(used.room) > ROOMS.index(module.room)
    ]
    assert not found, "\n".join(found)


def test_no_modules_import_each_other() -> None:
    graph = {module.name: {used.name for _, used in module.uses()} for module in modules().values()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


# Whose names are used.
def test_private_names_stay_in_their_module() -> None:
    """And those of other packages in one file, so that a new release of them is checked in one place."""
    found = []
    for module in modules().values():
        private = [
            (node, source)
            for node, source, name in module.imports()
            if any(map(is_private, [*source.split("."), name]))
        ]
        if module.name == FOREIGN:
            found += [module.at(node) for node, source in private if source.startswith("monai_saliency")]
            continue
        known = module.defined() | DOCUMENTED
        found += [module.at(node) for node, _ in private]
        found += [module.at(node) for node, name in private_names(module) if name not in known]
        found += list(of_foreign_bases(module))
    assert not found, "\n".join(found)


def private_names(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Each private attribute that is used, ``self._x`` aside, also by ``getattr`` and its like."""
    for node in module.nodes:
        name, of = "", None
        if isinstance(node, ast.Attribute):
            name, of = node.attr, node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr", "setattr", "delattr"}:
            of, word = node.args[:2]
            name = word.value if isinstance(word, ast.Constant) and isinstance(word.value, str) else ""
        if is_private(name) and not (isinstance(of, ast.Name) and of.id in {"self", "cls"}):
            yield node, name


def of_foreign_bases(module: Module) -> Iterator[str]:
    """Where a class of the module overrides, sets or uses a private name of a class of another package as its own."""
    classes = () if module.room == "__main__" else vars(importlib.import_module(module.name)).values()
    for cls in classes:
        if not inspect.isclass(cls) or cls.__module__ != module.name:
            continue
        bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in {"monai_saliency", "typing"}]
        owner = {
            name: base.__name__
            for base in bases
            for name, value in vars(base).items()  # an abstract method is there to be written, as xaitk-saliency's are
            if is_private(name) and not getattr(value, "__isabstractmethod__", False)
        }
        for text in module.nodes:
            if isinstance(text, ast.ClassDef) and text.name == cls.__name__:
                for node in ast.walk(text):
                    name = getattr(node, "name", None) or getattr(node, "attr", None)
                    if isinstance(node, ast.FunctionDef | ast.Attribute) and name in owner:
                        place = f"{module.path.relative_to(ROOT)}:{node.lineno}"
                        yield f"{place}: {name}, which {cls.__name__} has from {owner[name]}"


def test_no_test_imports_another() -> None:
    """What several need lives in tests/helpers."""
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        for node, source, name in Module(f"tests.{path.stem}", path).imports():
            if any(part == "conftest" or part.startswith("test_") for part in [*source.split("."), name]):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {source} {name}")
    assert not found


# What names lead to.
CONFIGS = sorted([*(BUNDLE / "configs").glob("*.yaml"), *(ROOT / "monai_saliency").rglob("*.yaml")])
PAGES = sorted([*ROOT.glob("*.md"), *BUNDLE.rglob("README.md"), *(ROOT / "tutorials").rglob("*.md")])
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))
SCRIPTS = [*BUNDLE.rglob("*.sbatch"), *(BUNDLE / "configs").glob("*.json"), *(ROOT / ".ci").iterdir()]
TEXTS = [*CONFIGS, *PAGES, *NOTEBOOKS, *SCRIPTS, *(module.path for module in modules().values())]
#: tags of MLflow's runs
NO_MODULES = {"monai_saliency.host", "monai_saliency.process"}


def leads_somewhere(name: str) -> bool:
    """Whether a dotted name is a module, something in one, or an attribute of a class."""
    if pydoc.locate(name) is not None:
        return True
    owner, _, attribute = name.rpartition(".")
    cls = pydoc.locate(owner)
    return inspect.isclass(cls) and (
        attribute in inspect.get_annotations(cls) or f"self.{attribute} = " in inspect.getsource(cls)
    )


def test_dotted_names_lead_somewhere() -> None:
    """In configs, pages, notebooks, scripts and docstrings; ``ms.`` is the package in pages and notebooks."""
    lost = []
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"(?<![\w/.-])monai_saliency(?:\.[A-Za-z_]\w*)+", text)
        if path in [*PAGES, *NOTEBOOKS]:
            names += [f"monai_saliency.{name}" for name in re.findall(r"(?<![\w.])ms\.([A-Za-z_]\w*(?:\.\w+)*)", text)]
        for name in dict.fromkeys(names):
            if name not in NO_MODULES and not leads_somewhere(name):
                lost.append(f"{path.relative_to(ROOT)}: {name}")
    assert not lost, "\n".join(lost)


def targets(content: Any) -> Iterator[str]:
    """Each ``_target_`` of a config."""
    if isinstance(content, dict):
        yield from (value for key, value in content.items() if key == "_target_")
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from targets(value)


def test_targets_lead_somewhere() -> None:
    """One of MONAI's components by its name, or a dotted path; also where a page shows a config."""
    locator = ComponentLocator()
    shown = {path: re.findall(r"```yaml\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL) for path in PAGES}
    shown |= {path: [path.read_text(encoding="utf-8")] for path in CONFIGS}
    lost = []
    for path, texts in shown.items():
        for target in (target for text in texts for target in targets(yaml.safe_load(text))):
            module = locator.get_component_module_name(target)
            if not leads_somewhere(f"{module}.{target}" if isinstance(module, str) else target):
                lost.append(f"{path.relative_to(ROOT)}: {target}")
    assert not lost, "\n".join(lost)


def test_links_lead_somewhere() -> None:
    lost = []
    for path in PAGES:
        links = re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
        links = [link for link in links if "://" not in link and not (path.parent / link).exists()]
        lost += [f"{path.relative_to(ROOT)}: {link}" for link in links]
    assert not lost, "\n".join(lost)


IMPORT_ALL = """
import importlib, importlib.abc, json, pkgutil, signal, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

blocked = set(sys.argv[1:])
for name in [*sys.modules]:
    if name.partition(".")[0] in {"monai_saliency", *blocked}:
        del sys.modules[name]
sys.meta_path.insert(0, Missing())
import lmdb, monai.bundle, xaitk_saliency
unix = {"fcntl", "grp", "pwd", "resource", "termios"}
blocked |= unix
for name in unix:
    sys.modules.pop(name, None)
del signal.pthread_sigmask
import monai_saliency
found = {}
for each in pkgutil.walk_packages(monai_saliency.__path__, "monai_saliency."):
    try:
        importlib.import_module(each.name)
        found[each.name] = ""
    except Exception as error:
        found[each.name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def errors_of(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The errors by module."""
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    errors = {name: error for name, error in found.items() if error}
    # Below a room that cannot be imported nothing is.
    unseen = {name for name in {*modules()} - {*found, "monai_saliency"} if name.rpartition(".")[0] not in errors}
    assert not unseen
    return errors


@pytest.mark.slow
def test_imports_without_the_extras_and_without_unix() -> None:
    """The package imports, also on Windows, and any module that needs an extra names the command that installs it.

    Python itself, since MONAI looks for these packages when it is imported.
    """
    command = [sys.executable, "-c", IMPORT_ALL, *EXTRAS]
    errors = errors_of(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False))
    assert not {name: error for name, error in errors.items() if 'pip install "monai-saliency[' not in error}


# Methods are written in one place.
@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> str:
    """A method that stands in ``methods`` alone, and so is listed nowhere else; its name."""

    def probe(edge: int = 3, *, target: Any, estimator: Any = None, **settings: Any) -> PerturbationInferer:
        return methods.sliding_window(edge, edge, target=target, estimator=estimator, **settings)

    monkeypatch.setattr(methods, "probe", probe, raising=False)
    monkeypatch.setattr(methods, "__all__", [*methods.__all__, "probe"])
    return "probe"


def test_a_method_is_found_by_its_name(probe: str, make: Callable[[str], Bundle], tmp_path: Path, capsys: Any) -> None:
    """In our own bundle, the overlay, the SLURM job and the command line, with its own setting; no file lists it."""
    config = ConfigParser(ConfigParser.load_config_file(BUNDLE / "configs" / "inference.yaml"))
    config.update({"method": probe, "edge": 5})
    config.get_parsed_content("imports")
    assert config.get_parsed_content("saliency_inferer").masks.window_size == 5
    bundle = make("spleen_ct_segmentation")
    for folder, chosen in (("probe", {"method": probe, "edge": 8}), ("same", {"window_size": 8, "stride": 8})):
        chosen = {"method": "sliding_window", "picture": False, "dir": str(tmp_path / folder)} | chosen
        bundle.explain(**{f"saliency_{name}": value for name, value in chosen.items()})
    assert voxels(tmp_path / "probe") == voxels(tmp_path / "same") != {}
    given = {"METHOD": probe, "EDGE": "5", "BUNDLE_ROOT": str(BUNDLE)}
    assert {"--method=probe", "--edge=5"} < {*from_environment(given)}
    assert {"--saliency_method=probe", "--saliency_edge=5"} < {*from_environment(given | {"RUN_ID": "explain"})}
    main(["methods"])
    assert "\nprobe: " in capsys.readouterr().out


# How long a text may be, and what it may not name.
def test_no_module_and_no_function_is_long() -> None:
    """Functions are counted without their docstrings."""
    long = []
    for module in modules().values():
        if (lines := len(module.text.splitlines())) > 450:
            long.append(f"{module.name}: {lines} lines")
        functions = [node for node in module.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        long += [f"{module.name}.{each.name}: {code_lines(each)} lines" for each in functions if code_lines(each) > 60]
    assert not long, "\n".join(long)


def test_the_version_is_the_same_everywhere() -> None:
    """And the changelog has it on top."""
    metadata = json.loads((BUNDLE / "configs" / "metadata.json").read_text(encoding="utf-8"))
    assert metadata["required_packages_version"]["monai-saliency"] == __version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == __version__
    releases = re.findall(r"^## \[(.*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert releases[0] == __version__


def test_no_machine_is_named() -> None:
    """Nor in what notebooks print; their pictures are letters of any kind."""
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in TEXTS
        for name in MACHINE_PATH.findall(re.sub(r'"image/png": "[^"]*"', "", path.read_text(encoding="utf-8")))
    }
    assert not found
