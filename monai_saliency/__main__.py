"""The command line, ``monai-saliency COMMAND`` or ``python -m monai_saliency COMMAND``.

``demo`` explains a cohort of brain scans that it makes, ``overlay NAME`` prints the path of a config to add to a
bundle's, ``methods`` lists the methods and their settings, ``report FOLDER`` makes pages of an output folder,
``report A B --output_dir DIR`` compares several, and ``gather SWEEP_DIR`` makes a table and a plot of a sweep.
``bundle`` prints the folder of the demo's bundle, which has the job script ``slurm/explain.sbatch``; ``command`` prints
the command of that script.

Each command imports what it needs and no more.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from monai_saliency.bundle.configs import overlay_path, overlays
from monai_saliency.version import __version__

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        arguments: the words of the command; by default the command line.

    Raises:
        SystemExit: with status 2 when the words are wrong, with status 1 when a sweep is not complete or the command
            cannot be carried out.
    """
    given = vars(_parser().parse_args(arguments))
    run = given.pop("run")
    try:
        done = run(**given)
    except (ValueError, OSError, ImportError) as error:
        if run is not _command:
            sys.exit(f"error: {error}")
        # The job script tells a wrong variable from a Python without this package.
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if done is False:
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="monai-saliency", description="Saliency maps for MONAI models.")
    parser.add_argument("--version", action="version", version=f"monai-saliency {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Callable[..., bool | None], help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(run.__name__.removeprefix("_"), help=help)
        made.set_defaults(run=run)
        return made

    made = command(_demo, "explain ten brain scans, and make their report")
    made.add_argument("--output_dir", metavar="DIR", default="saliency_demo", help="where scans, maps and report go")
    made.add_argument("words", nargs="*", metavar="-- --ID VALUE", help="flags of the bundle, such as --method rise")

    made = command(_overlay, "print the path of a config for the --config_file list of a bundle")
    made.add_argument("name", metavar="NAME", help=f"one of: {', '.join(overlays())}")

    made = command(_methods, "list the methods and their settings, which are flags of a bundle")
    made.add_argument("names", nargs="*", metavar="NAME", help="a method, or the dotted path of your own")

    made = command(_report, "make the report of an output folder, and print the path of its page")
    made.add_argument("folders", nargs="+", metavar="FOLDER", help="an output folder; of several runs to compare them")
    made.add_argument("--output_dir", metavar="DIR", help="where the report of several runs goes")

    made = command(_gather, "make one table and one plot of the settings of a sweep")
    made.add_argument("sweep_dir", metavar="SWEEP_DIR", help="the folder with a folder for each setting")

    command(_bundle, "print the folder of the demo's bundle, which has slurm/explain.sbatch")

    made = command(_command, "for bundle/slurm/explain.sbatch: print the command that it runs")
    made.add_argument("words", nargs="*", metavar="-- --ID VALUE", help="further flags of the bundle")
    return parser


def _bundle_root() -> Path:
    """The folder of our bundle: in a clone, or where pip puts a package's data."""
    here = Path(__file__).parents[1] / "bundle", Path(sysconfig.get_path("data")) / "share/monai-saliency/bundle"
    root = next((folder for folder in here if (folder / "configs/inference.yaml").is_file()), None)
    if root is None:
        raise FileNotFoundError("the demo's bundle is not installed: run this in a clone, after pip install -e .[demo]")
    return root


def _bundle() -> None:
    print(_bundle_root())


def _demo(output_dir: str, words: Sequence[str]) -> None:
    root = _bundle_root()
    if missing := [name for name in ("fire", "ignite", "nilearn", "tqdm", "yaml") if find_spec(name) is None]:
        raise ImportError(f'the demo needs {", ".join(missing)}: pip install "monai-saliency[demo]"')
    command = [sys.executable, "-m", "monai.bundle", "run", "--bundle_root", str(root)]
    command += ["--config_file", str(root / "configs/inference.yaml"), "--output_dir", output_dir]
    sys.exit(subprocess.call([*command, "--demo_dir", str(Path(output_dir) / "scans"), *words]))


def _overlay(name: str) -> None:
    print(overlay_path(name))


def _methods(names: Sequence[str]) -> None:
    from monai_saliency import methods
    from monai_saliency.methods.settings import describe

    print("\n".join(describe(name) for name in names or methods.__all__))


def _command(words: Sequence[str]) -> None:
    from monai_saliency.bundle.command import from_environment

    print(shlex.join(from_environment(os.environ, words)))


def _report(folders: Sequence[str], output_dir: str | None) -> None:
    from monai_saliency.visualize.report import write_comparison, write_report

    if (len(folders) > 1) != (output_dir is not None):
        raise ValueError(
            "--output_dir is for several runs: give --output_dir DIR for them, and none for the report of one"
        )
    print(write_report(folders[0]) if output_dir is None else write_comparison(folders, output_dir))


def _gather(sweep_dir: str) -> bool:
    from monai_saliency.bundle.sweep import gather

    sweep = gather(sweep_dir)
    written = sweep.write(sweep_dir)
    print(sweep)
    print("written: " + ", ".join(map(str, written)))
    return sweep.complete


if __name__ == "__main__":
    main()
