"""What takes seconds to prepare and never changes, kept between runs."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def cache_folder() -> Path:
    """The user's cache folder for lossytp, or one in the temporary folder where that cannot be written."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lossytp"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass  # a read-only or missing home is ordinary on clusters
    folder = Path(tempfile.gettempdir()) / f"lossytp-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    return folder


def cached(name: str, key: str, build: Callable[[Path], None]) -> Path:
    """The folder that `build` filled for this `key`, now or in an earlier run.

    One process builds while others wait; a folder appears whole or not at all.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    folder = cache_folder() / f"{name}-{digest}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                part = Path(scratch) / "part"
                part.mkdir()
                build(part)
                part.rename(folder)
    return folder
