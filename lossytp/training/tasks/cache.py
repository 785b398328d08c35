"""Cache data between runs, if it takes seconds to prepare and never changes."""

import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from lossytp.training.files import saving, sync

SUMS = "SHA256SUMS.json"


def cache_folder() -> Path:
    """Return the user's cache folder for lossytp, or a folder under the temporary folder if that cannot be written.

    Raises:
        ValueError: if other users could write the folder under the temporary folder.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lossytp"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass  # a read-only or missing home is ordinary on clusters
    folder = Path(tempfile.gettempdir()) / f"lossytp-{os.getuid()}"
    with saving(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()  # another user may have made a folder or a link of this name first
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ValueError(f"{folder} can be written by other users: set XDG_CACHE_HOME to a folder of your own")
    return folder


def cached(name: str, key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder that `build` filled for this `key`, now or in an earlier run.

    One process builds while others wait. A folder appears whole or not at all. A damaged folder is rebuilt.

    Raises:
        ValueError: if the cache cannot be written.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    folder = cache_folder() / f"{name}-{digest}"
    with FileLock(f"{folder}.lock"):
        if not _is_whole(folder):
            with saving(folder, reads_too=True), tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                part = Path(scratch) / "part"
                part.mkdir()
                build(part)
                (part / SUMS).write_text(json.dumps(_sums(part)), encoding="utf-8")
                sync(part)
                if folder.exists():
                    folder.rename(Path(scratch) / "damaged")
                part.rename(folder)
    return folder


def _is_whole(folder: Path) -> bool:
    """Return whether the folder exists and its files match their checksums."""
    try:
        expected = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        return bool(expected == _sums(folder))
    except (OSError, ValueError):
        return False


def _sums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    sums = {}
    for path in files:
        with path.open("rb") as file:
            sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def code_digest(module: str) -> str:
    """Return a hash of the module's source, for a cache key; "" for a module without a file, such as a notebook."""
    file = getattr(sys.modules[module], "__file__", None)
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest() if file else ""


def identity(value: Any) -> str:
    """Return text that identifies a value, or a function by its code, for a cache key."""
    if not callable(value):
        return repr(value)
    from datasets.fingerprint import Hasher  # hashes a notebook's function by its code, a module's only by its name

    return f"{Hasher.hash(value)} {code_digest(value.__module__)}"
