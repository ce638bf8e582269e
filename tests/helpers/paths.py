"""Where things lie in this repository."""

from pathlib import Path

__all__ = ["BUNDLE", "BUNDLES", "CONFIGS", "ROOT", "SCHEMA", "TESTS"]

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
#: our own bundle
BUNDLE = ROOT / "bundle"
CONFIGS = BUNDLE / "configs"
SCHEMA = TESTS / "schemas" / "meta_schema_20240725.json"
#: small bundles in the layouts of the Model Zoo
BUNDLES = TESTS / "bundles"
