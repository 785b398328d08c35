"""Find text of the hub: files in its copy under `LOSSYTP_DATA`, or downloaded ones."""

from pathlib import Path

from lossytp.network.checks import check_known
from lossytp.training.files import first_line
from lossytp.training.hub import hub_or_its_cache
from lossytp.training.tasks.sources import DATA_VARIABLE, EXPORT, Source

TEXTS = {"shakespeare": "karpathy/tiny_shakespeare", "openwebtext": "Skylion007/openwebtext"}


def hub_text(name: str) -> str:
    """Return the pattern of the files that hold a text's training split.

    Args:
        name: one of `TEXTS`, or `owner/name` on the hub.

    Raises:
        ValueError: if the name is unknown, or there are no such files here and the hub gives none.
    """
    path = TEXTS.get(name, name)
    if path.count("/") != 1:
        check_known("dataset", name, (*TEXTS, "owner/name on the hub"))
    copy = Source(path=path).folder
    if copy is not None and copy.is_dir():
        return _pattern_in(copy, name)
    from huggingface_hub import snapshot_download

    with hub_or_its_cache():
        try:
            folder = snapshot_download(path, repo_type="dataset", revision=EXPORT, allow_patterns="*/train/*.parquet")
        except Exception as error:  # the hub's client raises many kinds
            where = f"in {DATA_VARIABLE}, at {copy}," if copy else f"in {DATA_VARIABLE}, which is not set,"
            raise ValueError(
                f"dataset = {name!r} is neither {where} nor available from the hub ({first_line(error)}): go online "
                f"once, or put its files there"
            ) from error
    return str(Path(folder) / "**" / "train" / "*.parquet")


def _pattern_in(folder: Path, name: str) -> str:
    """Return the pattern of a folder's training files, or of its only text file."""
    for pattern in ("**/train*.parquet", "**/train*.txt", "*.txt"):
        if any(folder.glob(pattern)):
            return str(folder / pattern)
    raise ValueError(f"dataset = {name!r}: {folder} holds no .parquet or .txt file: put one there")
