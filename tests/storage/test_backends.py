"""Backends of a cache."""

from __future__ import annotations

import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from helpers import fork_server
from helpers.caches import in_threads

from monai_saliency.storage.backends import DiskBackend, LMDBBackend


def test_a_database_that_grows_while_it_is_opened_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process commits just as this one asks how many pages there are."""
    code = """
import sys
from monai_saliency.storage.backends import LMDBBackend
LMDBBackend(sys.argv[1]).put("theirs", bytes(1 << 20))
"""
    database = LMDBBackend(tmp_path / "x.lmdb")
    environment_of = LMDBBackend._environment

    class Raced:
        def __init__(self, environment: lmdb.Environment) -> None:
            self.environment = environment

        def __getattr__(self, name: str) -> Any:
            return getattr(self.environment, name)

        def info(self) -> dict[str, int]:
            fork_server.run(["-c", code, database.path], check=True)
            return self.environment.info()

    monkeypatch.setattr(LMDBBackend, "_environment", lambda self: Raced(environment_of(self)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        database.put("ours", b"sound")
        assert bytes(database.get("ours") or b"") == b"sound"
        assert len(database.get("theirs") or b"") == 1 << 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.lmdb", "x.lmdb-lock"]


def test_many_writers_of_one_file(tmp_path: Path) -> None:
    backend = DiskBackend(tmp_path / "cache")
    contents = [bytes([number]) * 10**5 for number in range(4)]

    def write(data: bytes) -> None:
        for _ in range(30):
            backend.put("k" * 64, data)
            assert backend.get("k" * 64) in contents

    in_threads([lambda data=data: write(data) for data in contents])  # type: ignore[misc]
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == ["k" * 64]


def test_lmdb_guard_is_still_needed(tmp_path: Path) -> None:
    """Why all datasets of a process share one connection."""
    first = lmdb.open(str(tmp_path / "x.lmdb"), subdir=False)
    with pytest.raises(lmdb.Error, match="already open in this process"):
        lmdb.open(str(tmp_path / "x.lmdb"), subdir=False)
    first.close()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mapped pages")
def test_lmdb_keeps_few_pages_mapped(tmp_path: Path) -> None:
    """Pages that were read count as memory of the process: 48 MiB were read here, of which a third may stay."""
    backend = LMDBBackend(tmp_path / "cache.lmdb")
    entries = {f"key {i}": bytes([i]) * (4 << 20) for i in range(12)}
    for key, data in entries.items():
        backend.put(key, data)
    for key, data in entries.items():
        assert backend.get(key) == data
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith("cache.lmdb"))
    resident = next(line for line in lines[start:] if line.startswith("Rss:"))
    assert int(resident.split()[1]) <= 17 * 1024  # kB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("left", [0, 4096, 8192, 69632])
def test_lmdb_on_a_full_disk_is_an_error_and_not_the_end_of_the_process(left: int, small_disk: Path) -> None:
    """Without room for the whole lock file, LMDB is ended by SIGBUS when it writes to it."""
    with open(small_disk / "full", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(file.tell() - left)
    code = """
import sys
from monai_saliency.storage.backends import LMDBBackend
try:
    LMDBBackend(sys.argv[1]).put("key", bytes(100))
except OSError as error:
    print(error.strerror)
"""
    done = fork_server.run(["-c", code, small_disk / "x.lmdb"])
    assert done.returncode == 0
    assert "No space left on device" in done.stdout


def test_lmdbs_lock_file_lies_on_the_disk_whole(tmp_path: Path) -> None:
    """Also one that an earlier version has made."""
    lock = tmp_path / "x.lmdb-lock"
    environment = lmdb.open(str(tmp_path / "x.lmdb"), subdir=False, max_readers=1024)
    size = lock.stat().st_size
    environment.close()
    LMDBBackend(tmp_path / "x.lmdb").put("key", b"data")
    assert lock.stat().st_size == size
    assert lock.stat().st_blocks * 512 >= size
