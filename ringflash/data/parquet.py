"""The texts of a column of a parquet file, by the package pyarrow, an extra. A part of a row group is in memory at a time."""
from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

_ROWS = 256  # decoded at a time; a row may be a book


def parquet_documents(path: Path, field: str) -> Iterator[bytes]:
    """The text of each row of the column `field`, UTF-8, in order. Row groups are read when they are come to, other columns never.

    Raises ValueError for a package that is not installed, for a file that is none or is cut short, for a column that is not there
    (with the nearest that are) or holds no text, and with the row's number for one that has none.
    """
    arrow, parquet = _import(path)
    try:
        file = parquet.ParquetFile(path)
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError) as error:
        raise ValueError(f"data.path: {path} is no parquet file, or is cut short: {error}") from error
    except OSError as error:
        raise OSError(f"data.path: {path} cannot be read ({error.strerror or error})") from error
    with file:
        _check_column(arrow, file.schema_arrow, path, field)
        number = 0
        try:
            for batch in file.iter_batches(batch_size=_ROWS, columns=[field], use_threads=False):
                for text in batch.column(0).to_pylist():
                    number += 1
                    if text is None:
                        raise ValueError(f"data.text_field={field}: {path}, row {number}, holds nothing there")
                    yield text.encode("utf-8")
        except (arrow.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"data.path: {path} is damaged behind row {number}: {error}") from error


def _import(path: Path):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"data.path: {path}: a parquet file needs the package pyarrow, which is not installed; pip install "
                         "'ringflash[parquet]', or give the text as jsonl") from error
    return pyarrow, pyarrow.parquet


def _check_column(arrow, schema, path: Path, field: str) -> None:
    if schema.names.count(field) != 1:
        close = difflib.get_close_matches(field, schema.names, n=3, cutoff=0.4) or schema.names[:8]
        found = "several such columns" if field in schema.names else "no such column"
        raise ValueError(f"data.text_field={field}: {path} has {found}; "
                         f"nearest: {' or '.join(close) or 'none, the file has no columns'}")
    kind = schema.field(field).type
    kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind)):
        texts = [each.name for each in schema if arrow.types.is_string(each.type) or arrow.types.is_large_string(each.type)]
        raise ValueError(f"data.text_field={field}: {path} holds {kind} in that column, not text; columns of text: "
                         f"{', '.join(texts) or 'none'}")
