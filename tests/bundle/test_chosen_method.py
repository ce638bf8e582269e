"""Methods by their names, and their settings by their signatures."""

import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.files import voxels
from helpers.own_bundle import SMALL_NET, rank, run
from helpers.own_method import tiles
from helpers.paths import BUNDLE
from helpers.scans import write_scans
from monai.bundle import ConfigParser
from monai.networks.nets import DenseNet

import monai_saliency as ms
from monai_saliency import methods
from monai_saliency.__main__ import main
from monai_saliency.bundle.attach_settings import AttachSettings
from monai_saliency.bundle.chosen_method import ChosenMethod
from monai_saliency.bundle.config import BundleConfig, is_plain
from monai_saliency.bundle.configs import overlay_path
from monai_saliency.bundle.overlay import Overlay
from monai_saliency.errors import root_cause
from monai_saliency.methods.settings import all_settings, describe, find_method, own_settings
from monai_saliency.transforms.writers import writer_settings

TARGET = ms.ClassScore([0], "none")
OWN = "helpers.own_method.tiles"


def test_methods_are_found_by_name_or_dotted_path() -> None:
    for name in methods.__all__:
        assert find_method(name) is getattr(methods, name)
    assert find_method("monai_saliency.rise") is ms.rise
    assert find_method(OWN) is tiles
    assert find_method(tiles) is tiles


def wrong(image, network):
    """Not a method."""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("slide", r"`how` must be one of \['channel_occlusion', .*\], or the dotted path of your own .*, got 'slide'"),
        ("helpers.nowhere.tiles", "got 'helpers.nowhere.tiles'"),
        ("helpers.own_method.nothing", "got 'helpers.own_method.nothing'"),
        (7, "got 7"),
        (wrong, r"must be a function as in monai_saliency.methods.*, got \(image, network\)"),
    ],
)
def test_other_names_are_refused(name: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_method(name, "how")  # type: ignore[arg-type]


def test_settings_are_the_parameters_that_only_a_method_has() -> None:
    own = ["num_masks", "grid_size", "p1", "seed", "per_channel", "form", "until", "budget"]
    assert list(own_settings(ms.rise)) == own
    assert list(own_settings(ms.patch_windows)) == ["divide"]
    assert list(own_settings(ms.channel_occlusion)) == []
    assert list(own_settings(tiles)) == ["edge"]
    assert {"num_masks", "window_unit", "num_coalitions", "num_supervoxels"} <= set(all_settings())


def test_help_comes_from_the_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    """Every setting of ours has one."""
    assert describe(tiles) == "tiles: Windows beside each other.\n  --edge 4: of a tile, in voxels."
    main(["methods"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if not line.startswith(" ")] == methods.__all__
    assert all(line.partition(": ")[2] for line in lines)
    assert "  --window_size null: edge of the hidden box, one number or one per axis" in "\n".join(lines)
    main(["methods", OWN])
    assert capsys.readouterr().out.startswith("tiles: ")


def test_given_settings_come_before_defaults_before_the_methods_own(caplog: pytest.LogCaptureFixture) -> None:
    method = ChosenMethod("rise", {"num_masks": 3}, {"num_masks": 5, "grid_size": 2, "window_size": 4})
    own = {"p1": 0.5, "seed": 0, "per_channel": False, "form": "centred", "until": None, "budget": None}
    assert method.settings == {"num_masks": 3, "grid_size": 2} | own
    masks = method(target=TARGET, mask_batch_size=2).masks
    assert isinstance(masks, ms.masks.RISEMasks)
    assert masks.num_masks == 3
    assert caplog.text == ""  # of defaults that it does not have


def test_settings_of_another_method_are_named(caplog: pytest.LogCaptureFixture) -> None:
    ChosenMethod("sliding_window", {"num_masks": 3, "stride": 2, "grid": 1}, prefix="saliency_")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages == [
        "nothing reads saliency_num_masks, saliency_grid: the settings of the method sliding_window are "
        "saliency_window_size, saliency_stride, saliency_window_unit, saliency_per_channel, saliency_smooth"
    ]


def needs(size, *, target, **settings):
    """A setting without a default."""


def test_what_a_method_must_be_given() -> None:
    with pytest.raises(ValueError, match="`method` needs needs --size"):
        ChosenMethod(needs)


@pytest.fixture
def cohort(tmp_path: Path) -> Path:
    return write_scans(tmp_path, 2) / "cohort"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    torch.save(DenseNet(**SMALL_NET).state_dict(), tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


@pytest.mark.parametrize("method", methods.__all__)
def test_every_method_runs_by_its_name(method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """None is listed in the config."""
    segments = {
        "network_def": {"_target_": "torch.nn.Conv3d", "in_channels": 1, "out_channels": 2, "kernel_size": 1},
        "target": {"_target_": "monai_saliency.RegionScore", "channel": 1, "activation": "none", "region": "all"},
        "inferer": {"_target_": "SlidingWindowInferer", "roi_size": [8, 8, 8]},
        "spatial_size": [12, 8, 8],
    }
    few = {"num_masks": 8, "num_supervoxels": 3, "num_designs": 2, "levels": 1}
    few = {name: value for name, value in few.items() if name in own_settings(getattr(methods, method))}
    rows = run(write_scans(tmp_path, 1) / "cohort", tmp_path / "out", "none", method=method, **segments, **few)
    maps = 2 if method == "mc_rise" else 1  # one for each fill
    assert [row["case"] for row in rows] == ["s0"] * maps
    unread = [message for message in caplog.messages if message.startswith("nothing reads")]
    # The helper sets both.
    names = [name for name in ("window_size", "stride") if name not in own_settings(getattr(methods, method))]
    expected = [f"nothing reads {', '.join(names)}"] if names else []
    assert [message.partition(": ")[0] for message in unread] == expected


def test_patch_windows_say_what_they_need(cohort: Path, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        run(cohort, tmp_path / "out", checkpoint, method="patch_windows")
    assert str(root_cause(caught.value)).startswith("`inferer` must be a SlidingWindowInferer, whose patches make the")


def test_ones_own_method_and_its_setting_as_a_flag(cohort: Path, checkpoint: Path, tmp_path: Path, caplog: Any) -> None:
    same = {"method": "sliding_window", "window_size": 6, "stride": 6}
    run(cohort, tmp_path / "same", checkpoint, **same)
    caplog.clear()
    run(cohort, tmp_path / "own", checkpoint, method=OWN, edge=6)
    assert "nothing reads window_size, stride: the settings of the method helpers.own_method.tiles are edge" in (
        caplog.messages
    )
    with pytest.raises(RuntimeError) as caught:
        run(cohort, tmp_path / "misspelt", checkpoint, method=OWN, edges=6)
    assert str(root_cause(caught.value)) == "nothing reads --edges: did you mean --edge?"
    assert voxels(tmp_path / "own") == voxels(tmp_path / "same")
    run(cohort, tmp_path / "default", checkpoint, method=OWN)
    assert voxels(tmp_path / "default") != voxels(tmp_path / "own")
    # Under an engine: two processes, one after the other here, share the masks.
    for number in range(2):
        with suppress(FileNotFoundError):  # the first one makes no map, and so no table
            run(cohort, tmp_path / "shared", checkpoint, method=OWN, edge=6, **rank(number, 2, "masks"))
    assert voxels(tmp_path / "shared") == voxels(tmp_path / "own")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("metod", "method"),
        ("num_maks", "num_masks"),
        ("clases", "classes"),
        ("picture_formt", "picture_format"),
        ("target._target_", "target::_target_"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "saliency_"])
def test_a_misspelt_flag_is_refused_by_the_right_name(prefix: str, given: str, meant: str) -> None:
    """Of our bundle, and of the overlay, which leaves the other bundle's own ids alone."""
    parser = ConfigParser()
    parser.read_config([BUNDLE / "configs/inference.yaml", *([overlay_path("explain")] if prefix else [])])
    made = "saliency_overlay" if prefix else "chosen_method"
    parser.update({"note": "of mine", "max_steps": 3, "num_worker" if prefix else "note_2": 1})
    parser.get_parsed_content(made)
    parser.update({f"{prefix}{given}": "rise"})
    with pytest.raises(RuntimeError) as caught:
        parser.get_parsed_content(made)
    assert str(root_cause(caught.value)) == f"nothing reads --{prefix}{given}: did you mean --{prefix}{meant}?"


@pytest.mark.parametrize("overlay", ["", "explain", "nnunet", "ray"])
def test_an_id_that_lacks_a_letter_is_refused(overlay: str) -> None:
    """Every id of our bundle and of the overlays, and every setting of a method; one of two letters is a name, too."""
    files, prefix = [overlay_path(overlay)] if overlay else [], "saliency_" if overlay == "explain" else ""
    config = ConfigParser.load_config_files([BUNDLE / "configs/inference.yaml", *files])
    read = {f"{prefix}{id}" for id in [*all_settings(), *writer_settings(), *(Overlay.ids() if prefix else [])]}
    ids = {id for id, content in config.items() if is_plain(content)} | read
    for id in sorted(id for id in ids if id.startswith(prefix)):
        for place in range(len(prefix), len(id)):
            bundle = BundleConfig(ConfigParser({**config, (given := id[:place] + id[place + 1 :]): 1}))
            if given in {*ids, prefix}:
                continue
            with pytest.raises(ValueError, match=f"nothing reads --{given}: did you mean --{prefix}"):
                bundle.refuse_misspelt([name.removeprefix(prefix) for name in read], prefix)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("saliency_note", "ids that begin with saliency_ are settings of this package"),
        ("num_masks", "did you mean --saliency_num_masks[?]"),
        ("datset_dir", "did you mean --dataset_dir[?]"),
    ],
)
def test_flags_of_another_bundle(given: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line; what its configs hold and nothing reads stays."""
    parser = ConfigParser({"dataset_dir": "a", "data": "@dataset_dir", "metod": "b", given: 3})
    parser.update(ConfigParser.load_config_file(overlay_path("explain")))
    monkeypatch.setattr("sys.argv", ["run", f"--{given}=3"])
    with pytest.raises(RuntimeError) as caught:
        parser.get_parsed_content("saliency_overlay")
    assert re.fullmatch(f"nothing reads --{given}: {meant}", str(root_cause(caught.value)))
    if not given.startswith("saliency_"):
        monkeypatch.setattr("sys.argv", ["run"])
        parser.get_parsed_content("saliency_overlay")


def test_a_setting_that_lacks_a_letter_is_refused_in_python() -> None:
    """And never chooses a method."""
    for id in ["method", "classes", "picture", *all_settings()]:
        for given in {id[:place] + id[place + 1 :] for place in range(len(id))} - {""}:
            with pytest.raises(TypeError, match=f"attach has no setting `{given}`: did you mean `"):
                AttachSettings.of(**{given: 3})
    with pytest.raises(TypeError, match="attach has no setting `note`: it has image_key, key"):
        AttachSettings.of(note=3)


def test_defaults_of_the_demo_are_not_named_under_another_method(caplog: pytest.LogCaptureFixture) -> None:
    parser = ConfigParser()
    parser.read_config(BUNDLE / "configs" / "inference.yaml")
    found = parser.get_parsed_content("chosen_method").settings
    assert found == {id: each.default for id, each in own_settings(ms.focused_rise).items()}
    parser.update({"method": "sliding_window", "smooth": 2})
    assert parser.get_parsed_content("chosen_method").settings["window_size"] == 16
    assert not [message for message in caplog.messages if message.startswith("nothing reads")]
