"""The kernel's page cache, file by file: put files out of it, and ask how much of them it still holds.

Owns the two system calls behind "cold": posix_fadvise(DONTNEED) after fsync, and mincore. What a cold start needs
beyond that (restarting a store, asking the hosts in turn) lies elsewhere. Linux only.

Three limits, all of which `resident_fraction` shows or names: pages that some process has mapped stay in the cache,
files on tmpfs are always resident, and to a user who may not write a file mincore claims that all of it is resident.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import psutil

from drawbar.errors import EnvironmentUnfit, InputError
from drawbar.plural import plural

_WINDOW_BYTES = 1 << 30
"""Mapped at a time. A multiple of every page size; mincore's answer is one byte a page, so 256 KiB for 4 KiB pages."""
_SYNC_S = 120.0
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_MAP_FAILED = ctypes.c_void_p(-1).value


_DISK_FILE_SYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs"}


def flush(paths: Iterable[Path], *, whole_host: bool = False) -> str:
    """Writes the files' dirty pages to disk and drops their clean ones; returns in words what was done.

    `whole_host` also empties the page cache of the whole host, where this process is root; it never asks for a
    password, and the answer says when it could not. Raises InputError naming a file that cannot be opened, and
    EnvironmentUnfit where the kernel refuses.
    """
    num_files = 0
    num_bytes = 0
    for path in paths:
        fd = _open(path)
        try:
            # Dirty pages survive DONTNEED, so they are written first.
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            num_bytes += os.fstat(fd).st_size
        except OSError as error:
            raise EnvironmentUnfit(f"cannot flush {path} out of the page cache: {error.strerror}") from None
        finally:
            os.close(fd)
        num_files += 1
    words = f"fsync and posix_fadvise(DONTNEED) on {plural(num_files, 'file')}, {num_bytes / 1e6:.1f} MB"
    return f"{words}; {_drop_caches()}" if whole_host else words


def resident_fraction(paths: Iterable[Path]) -> float | None:
    """Share of the files' pages that are in the page cache now, 0 to 1; asking reads nothing in.

    None where that cannot be told: a file this user may not write, or no page at all to ask about. Raises InputError
    naming a file that cannot be opened.
    """
    num_resident = 0
    num_pages = 0
    for path in paths:
        fd = _open(path)
        try:
            if not _may_ask(path, fd):
                return None
            resident, pages = _count_pages(fd)
        finally:
            os.close(fd)
        num_resident += resident
        num_pages += pages
    return num_resident / num_pages if num_pages else None


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"cannot open {path}: {error.strerror}") from None


def _may_ask(path: Path, fd: int) -> bool:
    """Whether mincore tells this user the truth: the kernel's own rule (can_do_mincore: owner, or may write)."""
    return os.geteuid() in (0, os.fstat(fd).st_uid) or os.access(path, os.W_OK, effective_ids=True)


def _count_pages(fd: int) -> tuple[int, int]:
    """Resident and all pages of an open file."""
    size = os.fstat(fd).st_size
    num_resident = 0
    num_pages = 0
    for offset in range(0, size, _WINDOW_BYTES):
        length = min(_WINDOW_BYTES, size - offset)
        answer = _mincore(fd, offset, length)
        num_pages += len(answer)
        # Only the lowest bit of each byte is defined.
        num_resident += sum(byte & 1 for byte in answer) if set(answer) - {0, 1} else answer.count(1)
    return num_resident, num_pages


def _mincore(fd: int, offset: int, length: int) -> bytes:
    # Through libc and not Python's mmap: ctypes takes no address from a read-only Python mapping.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if address == _MAP_FAILED:
        raise EnvironmentUnfit(f"cannot map a file to ask for its cached pages: {os.strerror(ctypes.get_errno())}")
    try:
        answer = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        if libc.mincore(address, length, answer) != 0:
            raise EnvironmentUnfit(f"mincore failed: {os.strerror(ctypes.get_errno())}")
        return answer.raw
    finally:
        libc.munmap(address, length)


def _drop_caches() -> str:
    if os.geteuid() != 0:
        return "the host's other pages left alone: drop_caches needs root"
    # Nothing can end a sync that hangs, on a network file system say: it is left behind.
    syncing = threading.Thread(target=os.sync, name="sync", daemon=True)
    syncing.start()
    syncing.join(_SYNC_S)
    if syncing.is_alive():
        return f"the host's other pages left alone: sync took longer than {_SYNC_S:g} s"
    try:
        _DROP_CACHES.write_text("3\n")
    except OSError as error:
        return f"the host's other pages left alone: {_DROP_CACHES}: {error.strerror}"
    return "sync and drop_caches on the whole host"


def doubt(folder: Path) -> str:
    """Why an empty page cache is no proof of a cold start there; empty for a file system on a local disk."""
    # The longest mount point that the folder lies under is the one it lies on.
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(mount.mountpoint)]
    mount = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    if mount is not None and mount.fstype in _DISK_FILE_SYSTEMS and not mount.device.startswith("/dev/loop"):
        return ""
    what = f"{mount.fstype} on {mount.device}" if mount else "its file system"
    return f"{what} is not known to be a local disk: what lies behind it may have the data cached"
