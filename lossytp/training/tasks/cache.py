"""What takes seconds to prepare and never changes, kept between runs."""

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def code_digest(module: str) -> str:
    """For a key: another one where the module's source is another; "" where it has no file, as a notebook has none."""
    file = getattr(sys.modules[module], "__file__", None)
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest() if file else ""


def identity(value: Any) -> str:
    """For a key: another one for another value, or a function of other code."""
    if not callable(value):
        return repr(value)
    from datasets.fingerprint import Hasher  # a function of a notebook by its code; one of a module by its name alone

    return f"{Hasher.hash(value)} {code_digest(value.__module__)}"
