from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from drawbar.errors import InputError
from drawbar.storage import page_cache

SIZE_BYTES = 3_000_001  # not a whole number of pages


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE_BYTES))
    if page_cache.flush([path]) and page_cache.resident_fraction([path]) == 1:
        pytest.skip(f"{tmp_path} is on tmpfs: always resident")
    path.read_bytes()
    return path


def test_flush_empties_and_reading_fills_again(file: Path) -> None:
    assert page_cache.resident_fraction([file]) == 1
    assert "1 file, 3.0 MB" in page_cache.flush([file])
    assert page_cache.resident_fraction([file]) == 0
    file.read_bytes()
    assert page_cache.resident_fraction([file]) == 1


def test_dirty_pages_are_written_and_then_dropped(file: Path) -> None:
    content = os.urandom(SIZE_BYTES)
    file.write_bytes(content)
    page_cache.flush([file])
    assert page_cache.resident_fraction([file]) == 0
    assert file.read_bytes() == content


def test_asking_reads_nothing_in(file: Path) -> None:
    page_cache.flush([file])
    for _ in range(3):
        assert page_cache.resident_fraction([file]) == 0


def test_share_is_of_all_files_by_pages(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(os.urandom(3 * SIZE_BYTES))
    page_cache.flush([other])
    fraction = page_cache.resident_fraction([file, other])
    assert fraction == pytest.approx(0.25, abs=0.001)


def test_large_file_is_asked_for_in_windows(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "_WINDOW_BYTES", 4 * mmap.PAGESIZE)
    assert page_cache.resident_fraction([file]) == 1
    page_cache.flush([file])
    assert page_cache.resident_fraction([file]) == 0


def test_mapped_pages_stay_and_are_seen(file: Path) -> None:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert len(mapped[:]) == SIZE_BYTES
        page_cache.flush([file])
        assert page_cache.resident_fraction([file]) == 1
    page_cache.flush([file])
    assert page_cache.resident_fraction([file]) == 0


def test_nothing_to_ask_about_is_unknown(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    assert page_cache.resident_fraction([]) is None
    assert page_cache.resident_fraction([empty]) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_unverifiable_for_a_user_who_may_not_write() -> None:
    code = (
        "import os, pathlib, sys; from drawbar.storage import page_cache; os.seteuid(65534)\n"
        "print(page_cache.resident_fraction([pathlib.Path(sys.argv[1])]))"
    )
    # Not below tmp_path: nobody else may enter pytest's folders.
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(SIZE_BYTES))
        file.flush()
        os.chmod(file.name, 0o644)
        command = [sys.executable, "-c", code, file.name]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "None\n"
        os.chmod(file.name, 0o666)
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1.0\n"


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        page_cache.flush([tmp_path / "nowhere"])
    with pytest.raises(InputError, match="nowhere"):
        page_cache.resident_fraction([tmp_path / "nowhere"])


def test_whole_host_says_what_it_did(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file in its place: the real one would slow down everything else on this machine.
    monkeypatch.setattr(page_cache, "_DROP_CACHES", tmp_path / "drop_caches")
    words = page_cache.flush([file], whole_host=True)
    if os.geteuid() == 0:
        assert words.endswith("; sync and drop_caches on the whole host")
        assert (tmp_path / "drop_caches").read_text() == "3\n"
    else:
        assert words.endswith("drop_caches needs root")


@pytest.mark.skipif(os.geteuid() != 0, reason="others are not asked that far")
def test_whole_host_that_may_not_be_flushed_says_so(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "_DROP_CACHES", tmp_path / "missing" / "drop_caches")
    assert "left alone" in page_cache.flush([file], whole_host=True)
