"""Write made-up documents."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet


def write(file: Path, texts, column="text", row_group_size=7):
    pa.parquet.write_table(pa.table({"id": range(len(texts)), column: texts}), file, row_group_size=row_group_size)


def document(number):
    return f"document {number}" + " more" * (number % 11)
