"""What a user types: names, settings, calls, and the errors of what is nearly right."""

import functools
import inspect
import logging
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.own_method import tiles
from helpers.paths import BUNDLE
from helpers.tolerances import assert_close, assert_same_bits
from torch import nn

import monai_saliency as ms
from monai_saliency import methods
from monai_saliency.__main__ import main
from monai_saliency.engines.run import show_cause_only
from monai_saliency.errors import AdviceError, CaseError, as_case_error, root_cause
from monai_saliency.methods.settings import describe, own_settings
from monai_saliency.utils.arguments import written

IMAGES = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).eval()


def test_names_of_the_package() -> None:
    """Methods, targets, fills, inputs, what explains, and the rooms; masks and estimators are in their rooms."""
    names = {*dir(ms)}
    assert {*methods.__all__, *ms.targets.__all__} - {"Target", "BoundTarget"} <= names
    typed = "explain attach Saliency Saliencyd SaliencyDataset SaveSaliencyd Ensemble PerturbationInferer DictInput"
    assert {*typed.split(), "MeanFill", "masks", "estimators", "metrics"} <= names
    assert not {name for name in names if name.endswith(("Masks", "Scoring"))}
    assert all(getattr(ms, name) is not None for name in names)


IMPORTING = """
import copyreg, logging, sys, warnings
import monai, torch
def state():
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    levels = {logger.name: logger.level for logger in loggers if logger.level}
    hooks = sys.excepthook, torch.get_num_threads(), logging.root.handlers[:], logging.root.level
    return dict(copyreg.dispatch_table), set(torch.serialization.get_safe_globals()), levels, warnings.filters[:], hooks
before = state()
import monai_saliency as ms
for room in ms._ROOMS:
    getattr(ms, room)
    assert state() == before, (room, state(), before)
ms.explain, ms.attach, ms.cases.Case, ms.deploy.SeriesExplainer, ms.errors.CaseError, ms.sharding.Part
assert state() == before
"""


@pytest.mark.slow
def test_importing_changes_nothing_of_the_process() -> None:
    """Each room is there by its name, and what others have set stays: for pickles, loading, warnings and loggers."""
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("name", "meant"), [("focussed_rise", "focused_rise"), ("metric", "metrics"), ("xyzzy", None)])
def test_a_misspelt_name(name: str, meant: str | None) -> None:
    end = "" if meant is None else f": did you mean `{meant}`[?]"
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'{end}$"):
        getattr(ms, name)


@pytest.mark.parametrize("name", methods.__all__)
def test_a_setting_that_lacks_a_letter(name: str) -> None:
    """The signature has all settings by their names, and each of them is meant by itself without one letter."""
    method = getattr(methods, name)
    parameters = inspect.signature(method).parameters
    assert {"target", "fill", "inferer", "mask_batch_size", "progress", *own_settings(method)} <= parameters.keys()
    assert "settings" not in parameters
    for id in parameters:
        for given in {id[:place] + id[place + 1 :] for place in range(len(id))} - {""}:
            with pytest.raises(TypeError, match=f"{name} has no setting `{given}`: did you mean `"):
                method(**{given: 1})
    with pytest.raises(TypeError, match=f"{name} has no setting `xyzzy`: it has "):
        method(xyzzy=1)


def test_a_target_is_a_class_several_or_what_is_predicted() -> None:
    maps = lambda **given: ms.rise(20, 2, **given)(IMAGES, NETWORK)  # noqa: E731
    softmax = {"activation": "softmax"}
    assert_same_bits(maps(**softmax), maps(target=ms.ClassScore("predicted", **softmax)))
    assert_same_bits(maps(target=2, **softmax), maps(target=ms.ClassScore([2], **softmax)))
    for two in (np.int64(2), torch.tensor(2)):
        assert_same_bits(maps(target=two, **softmax), maps(target=2, **softmax))
    assert_same_bits(maps(target=[0, 2], **softmax), maps(target=ms.ClassScore([0, 2], **softmax)))
    few = {"num_masks": 20, "grid_size": 2}
    assert_same_bits(ms.explain(NETWORK, IMAGES, 2, "rise", **few, **softmax), maps(target=2, **softmax))
    expected = ms.focused_rise(40, **softmax)(IMAGES, NETWORK)
    assert_same_bits(ms.explain(NETWORK, IMAGES, num_masks=40, **softmax), expected)
    for target in (None, 2, [0, 2], "all"):
        with pytest.raises(ValueError, match="may hold logits of classes, logits of labels or numbers"):
            ms.explain(NETWORK, IMAGES, target)
    ends_in_softmax = nn.Sequential(NETWORK, nn.Softmax(1))
    expected = maps(target=ms.ClassScore("predicted", "softmax"))
    assert_close(ms.explain(ends_in_softmax, IMAGES, method="rise", num_masks=20, grid_size=2), expected)
    ends_in_sigmoid = nn.Sequential(NETWORK, nn.Sigmoid())
    with pytest.raises(ValueError, match=r'(?s)may hold probabilities or logits.*activation="none" '):
        ms.explain(ends_in_sigmoid, IMAGES)
    assert ms.explain(ends_in_sigmoid, IMAGES, activation="none", num_masks=8).shape == (
        len(IMAGES),
        1,
        *IMAGES.shape[2:],
    )


def test_ones_own_method_takes_what_ours_take() -> None:
    """A class as target, the settings of an automatic target, a fill by its name; a misspelt setting is named."""
    target, own = ms.ClassScore([1], "softmax"), {"method": tiles, "edge": 2, "fill": "mean"}
    expected = ms.sliding_window(2, 2, target=target, fill=ms.MeanFill())(IMAGES, NETWORK)
    for given in ({"target": 1, "activation": "softmax"}, {"target": target}):
        assert_same_bits(ms.explain(NETWORK, IMAGES, **given, **own), expected)
    own["activation"] = "softmax"
    assert_same_bits(ms.explain(NETWORK, IMAGES, **own), ms.explain(NETWORK, IMAGES, target="predicted", **own))
    del own["activation"]
    ours = {"method": functools.partial(ms.sliding_window, 2, 2), "fill": "mean"}
    assert_same_bits(ms.explain(NETWORK, IMAGES, target=target, **ours), expected)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"activation": "softmax"},
            "classification into 3: log-odds of the softmax probability of the predicted class",
        ),
        ({"target": ms.ClassScore([0, 2], "none")}, "ClassScore: network output of the class (class 0, class 2)"),
        ({"target": ms.RegressionScore(1)}, "RegressionScore: predicted value (value 1)"),
        ({"target": ms.FunctionScore(lambda output: output[:, 0])}, "FunctionScore: score of a function (score)"),
    ],
)
@pytest.mark.parametrize("progress", [None, False])
def test_a_call_says_once_what_it_explains(given: Any, words: str, progress: Any, capsys: Any) -> None:
    ms.explain(NETWORK, IMAGES, method="sliding_window", window_size=4, progress=progress, **given)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"monai_saliency: {words}\n")


def test_a_call_says_what_it_explains_of_the_first_of_several_images(capsys: Any) -> None:
    images = torch.ones(2, 1, 4, 4)
    images[1] = -1
    signs = lambda x: x.mean((1, 2, 3))[:, None] * torch.tensor([[1.0, -1.0]])  # noqa: E731
    ms.explain(signs, images, target=ms.ClassScore("predicted", "sigmoid"), num_masks=9)
    line = "ClassScore: log-odds of the sigmoid probability of the class (class 0) (the first of 2 images)"
    assert capsys.readouterr().err == f"monai_saliency: {line}\n"


def test_what_is_known_of_the_images() -> None:
    """By short names, or as cases."""
    labels = (IMAGES > 0.5).long() + 1
    cases = [ms.Case(name, labels=labels[i], spacing=(1.0, 2.0)) for i, name in enumerate(["a", "b"])]
    explain = ms.region_occlusion(target=0, activation="softmax")
    expected = explain.explain(IMAGES, NETWORK, cases=cases)
    arrays = [np.array(sizes, np.float32) for sizes in ((1, 2), [(1, 2)] * 2)]
    for sizes in ((1.0, 2.0), [(1.0, 2.0)] * 2, *arrays, *map(torch.as_tensor, arrays)):
        found = explain.explain(IMAGES, NETWORK, labels=labels, spacing=sizes, names=["a", "b"])
        assert [each.name for each in found] == ["a", "b"]
        assert all(torch.equal(one.saliency, two.saliency) for one, two in zip(found, expected, strict=True))
    assert_same_bits(explain(IMAGES, NETWORK, labels=labels)[1], expected[1].saliency)
    window = ms.sliding_window(4, window_unit="mm", target=0, activation="softmax")
    assert_same_bits(window(IMAGES, NETWORK, spacing=(1.0, 2.0)), window(IMAGES, NETWORK, cases=cases))
    with pytest.raises(ValueError, match="`names` must have one entry for each of 2 images, got 1"):
        explain(IMAGES, NETWORK, names=["a"])
    with pytest.raises(ValueError, match=r"`names` must be a text for each image, got .*liver"):
        explain(IMAGES, NETWORK, labels=labels, names=[{1: "liver"}] * 2)
    with pytest.raises(ValueError, match="give either these or `cases`"):
        explain(IMAGES, NETWORK, labels=labels, cases=cases)


def test_objects_print_what_they_are() -> None:
    explain = ms.rise(9, fill=ms.MeanFill(), target=ms.ClassScore([1], "softmax"))
    shown = "masks=RISEMasks(num_masks=9), target=ClassScore(classes=[1], activation='softmax', scale='log_odds'), "
    shown += "estimator=RISEScoring("
    assert repr(explain).startswith(f"PerturbationInferer({shown}")
    assert "fill=MeanFill()" in repr(explain)
    assert repr(ms.ConstantFill(0.0)) == "ConstantFill(value=0.0)"
    assert repr(ms.Case("ct_7", IMAGES[0])) == f"Case(name='ct_7', image=Tensor{tuple(IMAGES.shape[1:])})"
    to_map = ms.Saliencyd("image", network=NETWORK, inferer=explain, names="saliency")
    (found, _) = explain.explain(IMAGES, NETWORK)
    for each in (explain, ms.Supervoxels(5), to_map, ms.SaveSaliencyd("saliency", "out"), found):
        assert repr(each).startswith(f"{type(each).__name__}(")
        assert " at 0x" not in repr(each)


@pytest.mark.parametrize(
    ("network", "images", "message"),
    [
        (
            nn.Conv3d(1, 2, 3),
            torch.ones(1, 8, 8, 8),
            r"\(16, 8, 8, 8\), float32, on cpu.*3 spatial axes: write images\[:, None\] if",
        ),
        (nn.Conv2d(1, 2, 3), torch.ones(1, 2, 8, 8), r"its first convolution takes 1 channels: Given groups=1"),
        (
            nn.Conv2d(1, 2, 3),
            torch.ones(1, 1, 8, 8).double(),
            r"its weights are float32: convert the images by images.to\(torch.float32\): ",
        ),
        (nn.Linear(3, 2), torch.ones(1, 1, 8, 8), r"float32, on cpu; it needs \(B, C, \*spatial\): mat1"),
    ],
)
def test_the_first_forward_fails(network: nn.Module, images: torch.Tensor, message: str) -> None:
    """The error says what the network was given and what is missing, before torch's words; its kind stays."""
    with pytest.raises(RuntimeError, match=message):
        ms.rise(20, target=0)(images, network.eval())


def test_a_forward_fails_after_others() -> None:
    """In a notebook, or at a scan of another shape, a network that has run meets images that it cannot take."""
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveMaxPool2d(1), nn.Flatten()).eval()
    explain = ms.rise(20, target=ms.ClassScore([0], "softmax"))
    explain(torch.rand(1, 1, 8, 8), network)
    for images, words in ((torch.ones(1, 2, 8, 8), "takes 1 channels"), (torch.ones(1, 1, 8, 8).double(), "convert")):
        with pytest.raises(RuntimeError, match=f"the network failed on images .*{words}"):
            explain(images, network)


@pytest.mark.parametrize("words", ["overlay explain", "--help", "--version", "report --help", "demo --help", "bundle"])
def test_a_command_imports_what_it_needs(words: str) -> None:
    """Nothing that takes a second to import, or that a bare installation lacks."""
    code = "import sys; import monai_saliency.__main__ as m\ntry: m.main(sys.argv[1:])\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True, check=True)
    loaded = {*done.stdout.splitlines()[-1].split()}
    assert "monai_saliency.bundle.configs" in loaded
    assert not loaded & {"torch", "monai", "numpy", "fire", "ignite", "yaml"}


def test_the_demo_runs_our_bundle(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With flags of the bundle, and its status. The bundle's folder has the job script."""
    called: list[list[str]] = []
    monkeypatch.setattr("subprocess.call", lambda words: called.append(words) or 3)
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--output_dir", "out", "--", "--method", "rise"])
    assert ended.value.code == 3
    assert called[0][1:5] == ["-m", "monai.bundle", "run", "--bundle_root"]
    configs = (Path(root, "configs/inference.yaml").read_bytes() for root in (called[0][5], BUNDLE))
    assert len({*configs}) == 1  # the clone's bundle, or the one that pip installed from it
    assert called[0][-6:] == ["--output_dir", "out", "--demo_dir", "out/scans", "--method", "rise"]
    main(["bundle"])
    assert Path(capsys.readouterr().out.strip(), "slurm", "explain.sbatch").is_file()


def test_the_help_of_a_method_is_its_docstring() -> None:
    assert describe("multi_scale_window").splitlines()[0].endswith("that hide a voxel, of every size alike.")
    assert re.match(r"rise: RISE \(Petsiuk.*\n  --num_masks null: ", describe("rise"))
    assert "above 0 and below 1 (UntilMasks)" in describe("rise")
    assert "`" not in "".join(map(describe, ms.methods.__all__))


def wrapped(cause: Exception) -> Exception:
    """As monai's transforms wrap what they meet."""
    try:
        try:
            raise cause
        except Exception as error:
            raise RuntimeError("applying transform") from error
    except RuntimeError as error:
        return error


def test_any_error_becomes_one_line_of_a_case() -> None:
    found = as_case_error(wrapped(OSError("two\n  lines")), "a/b", before="x.nii: ", after=". Copy it again")
    assert str(found) == "case a/b: x.nii: OSError: two lines. Copy it again"
    assert (found.case, found.problem) == ("a/b", "x.nii: OSError: two lines. Copy it again")


def test_an_error_of_a_case_keeps_its_problem_under_the_name_that_is_given() -> None:
    own = CaseError("mine", "NaN\nvoxels")
    found = as_case_error(wrapped(own), "another", before="not ", after=" this")
    assert (found.case, found.problem) == ("another", "NaN voxels")
    assert str(pickle.loads(pickle.dumps(own))) == "case mine: NaN voxels"


def test_an_error_that_says_what_to_do_is_reported_instead_of_its_cause() -> None:
    own = AdviceError("cannot write a.nii: rename the scan")
    own.__cause__ = OSError("File name too long")
    assert root_cause(wrapped(own)) is own
    assert as_case_error(wrapped(own), "a", before="not ").problem == "cannot write a.nii: rename the scan"


def test_an_uncaught_error_ends_in_its_cause(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Without a traceback, unless somebody debugs; a cause that is not ours has its kind."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for debug in (False, True):
        show_cause_only(debug)
        for cause, last in (
            (ValueError("why"), "error: why"),
            (FileNotFoundError("`dataset_dir` x is not a folder"), "error: `dataset_dir` x is not a folder"),
            (FileNotFoundError(2, "No such file", "x"), "error: FileNotFoundError: [Errno 2] No such file: 'x'"),
            (KeyError("image"), "error: KeyError: 'image'"),
        ):
            error = wrapped(cause)
            sys.excepthook(type(error), error, error.__traceback__)
            shown = capsys.readouterr().err
            assert shown.splitlines()[-1] == last
            assert (shown.count("Traceback") == 2) == debug
            assert ("--debug" in shown) == (not debug and ": " in last[7:])
        # Which the log of failed cases asks for.
        assert logging.getLogger("monai_saliency.storage.tables").isEnabledFor(logging.DEBUG) == debug
    logging.getLogger("monai_saliency").setLevel(logging.NOTSET)


def test_each_argument_is_printed() -> None:
    """Of all public classes that print their call: an argument without a default is an attribute by its name."""
    rooms = [ms, *(getattr(ms, room) for room in dir(ms) if inspect.ismodule(getattr(ms, room)))]
    names = [(room, name) for room in rooms for name in getattr(room, "__all__", [])]
    classes = {each for room, name in names if inspect.isclass(each := getattr(room, name))}
    printed = [each for each in classes if each.__repr__ is written and not inspect.isabstract(each)]
    assert len(printed) > 40
    for each in printed:
        ours = [kind for kind in each.__mro__ if kind.__module__.startswith("monai_saliency")]
        source = "".join(map(inspect.getsource, ours))
        for parameter in inspect.signature(each).parameters.values():
            is_needed = parameter.default is parameter.empty and "VAR" not in parameter.kind.name
            if is_needed and parameter.name not in ("keys", "saliency"):  # MONAI's own; a map that is not kept
                kept = rf"self\.{parameter.name}\b[^=\n]* = |^    {parameter.name}: "
                assert re.search(kept, source, re.MULTILINE), (each, parameter)
    assert repr(ms.RegionScore(0, "sigmoid")).startswith("RegionScore(channel=[0], activation='sigmoid'")
    assert repr(ms.grad_cam(target=1)).endswith("target=AutoTarget(readings={}, classes=[1]))")


def test_an_argument_that_is_not_kept() -> None:
    class Kept:
        __repr__ = written

        def __init__(self, gone: int, *more: int, **settings: int) -> None: ...

    assert repr(Kept(1)) == "Kept()"


@pytest.mark.slow
def test_a_missing_package_is_said_before_a_map_is_computed(tmp_path: Path) -> None:
    """In one short error with its pip command, and without the error of the import before it."""
    code = "import sys; sys.modules['matplotlib'] = None; import monai_saliency as ms; "
    code += "ms.SaveSaliencyd('saliency', 'out', picture=False); ms.SaveSaliencyd('saliency', 'out')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stderr.rstrip().endswith('matplotlib is not installed: pip install "monai-saliency[bundle]"')
    assert ended.stderr.count("Traceback") == 1
