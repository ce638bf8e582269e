"""The command line: ``python -m monai_saliency overlay NAME`` prints the path of a config to add to a bundle's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from monai_saliency.configs import overlay_path, overlays

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        arguments: the command's words; those of the command line by default.

    Raises:
        SystemExit: with status 2 when they are not understood.
    """
    parser = argparse.ArgumentParser(prog="python -m monai_saliency", description="Saliency maps for MONAI models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    overlay = commands.add_parser("overlay", help="print the path of a config for the --config_file list of a bundle")
    overlay.add_argument("name", choices=overlays(), metavar="NAME", help=f"one of: {', '.join(overlays())}")
    print(overlay_path(parser.parse_args(arguments).name))


if __name__ == "__main__":
    main()
