"""Write files so that they survive a crash, and tell this program's files from the user's own."""

import contextlib
import errno
import glob
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def saving(path: Path, *, reads_too: bool = False) -> Iterator[None]:
    """Turn the operating system's refusal to write `path` within the block into a ValueError of one line.

    If the block `reads_too`, only a full disk counts as a failure to write.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError) and "(os error" not in str(cause):  # as Rust says it
            cause = cause.__cause__ or cause.__context__
        full = getattr(cause, "errno", None) in NO_ROOM or "(os error 28)" in str(cause)
        if cause is None or (reads_too and not full):
            raise
        reason, fix = getattr(cause, "strerror", None) or cause, "make room" if full else "fix this"
        raise ValueError(f"{path} cannot be written ({reason}): {fix}, then start the same command again") from error


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that `path` either holds all of it or does not change, even if the process is killed."""
    part = path.with_name(f".{path.name}.part")
    with saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(text, encoding="utf-8")
            sync(part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file is on the disk, or a folder with all files in it."""
    for inner in path.iterdir() if path.is_dir() else ():
        sync(inner)
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(output_dir: str, name: str = "output_dir") -> None:
    """Make the folder, or raise ValueError if it cannot be made or written."""
    probe = Path(output_dir) / ".probe.part"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{name} = {output_dir!r} cannot be written ({error.strerror}): give another") from error


def matching(pattern: str) -> list[str]:
    """Return the files that a path or a pattern names, sorted. What exists as it is written is no pattern."""
    path = Path(os.path.expanduser(pattern))
    there = next(each for each in (path, *path.parents) if each == each.parent or os.path.exists(each))
    found = glob.glob(os.path.join(glob.escape(str(there)), *path.relative_to(there).parts), recursive=True)
    return sorted(str(Path(name)) for name in found if os.path.isfile(name) or not os.path.exists(name))


def first_line(error: Exception) -> str:
    """Return the first line of an error, and the second if the first ends with a colon."""
    first, *rest = f"{type(error).__name__}: {str(error).strip()}".splitlines()
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first


# A model's folder may hold the user's files, which this program never deletes or overwrites. A hidden file in it lists
# the program's own as patterns. It is written before any of them, and deleted after all of them.

MANIFEST = ".lossytp.json"


def has_manifest(folder: Path) -> bool:
    """Return whether this program listed its files in the folder."""
    return (folder / MANIFEST).is_file()


def write_manifest(folder: Path, patterns: Iterable[str]) -> None:
    """Make the folder, and declare that files of these names in it are this program's."""
    write_atomically(folder / MANIFEST, json.dumps({"files": sorted(patterns)}))


def others(folder: Path) -> list[Path]:
    """Return the paths in the folder that this program did not write; the path itself if it is not a folder."""
    if not folder.is_dir():
        return [folder] if folder.is_symlink() or folder.exists() else []
    own = [MANIFEST, f".{MANIFEST}.part"]
    try:
        own += json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"] if has_manifest(folder) else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MANIFEST} is damaged: delete {folder}, or give another output_dir") from error
    return sorted(path for path in folder.iterdir() if path.is_dir() or not any(map(path.match, own)))


def refuse(paths: list[Path]) -> None:
    """Raise ValueError if there are any such paths."""
    if paths:
        why = "is in the way, and this program did not write it"
        raise ValueError(f"{paths[0]} {why}: move it elsewhere, or give another output_dir")


def own_files(folder: Path, patterns: Iterable[str]) -> None:
    """List files of these names as this program's; raise ValueError if a folder without a list holds one of them."""
    patterns = list(patterns)
    if not has_manifest(folder):
        refuse([path for path in others(folder) if any(map(path.match, patterns))])
        write_manifest(folder, patterns)


def remove(folder: Path) -> None:
    """Delete this program's files in a folder, and the folder itself if it is then empty."""
    if has_manifest(folder):
        for path in set(folder.iterdir()) - {*others(folder), folder / MANIFEST}:
            path.unlink(missing_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the user's files are in it, it is a link, or it is not there
        folder.rmdir()
