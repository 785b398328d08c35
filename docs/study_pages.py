"""Write the pages of the study, from the committed results."""

from pathlib import Path


def write_pages(docs: Path) -> None:
    """Write docs/study/index.md."""
    (docs / "study" / "index.md").write_text("# The study\n")
