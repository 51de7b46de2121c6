"""Claims about parquet files as sources of text; without the package pyarrow all but one are skipped."""
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from ringflash.config import Config, DataConfig
from ringflash.data import DOCUMENT_START, Reading, find_source, open_prepared, prepare
from ringflash.data import parquet as parquet_module
from ringflash.data.parquet import parquet_documents
from ringflash.train.text import open_data

TEXTS = [f"row {i}, with an umlaut: \u00fc " + "abc" * i for i in range(60)]


def written(path: Path, columns: dict | None = None, **options) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": list(range(60)), "body": TEXTS} if columns is None else columns)
    parquet.write_table(table, path, **options)
    return path


def test_without_its_package_a_parquet_file_is_refused_by_name_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    cfg = Config(data=DataConfig(path=str(tmp_path / "a.parquet"), cache_dir=str(tmp_path / "cache"), seq_len=32))
    with pytest.raises(ValueError, match=r"a.parquet: a parquet file needs the package pyarrow, .*ringflash\[parquet\]"):
        open_data(cfg)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("options", [{}, {"row_group_size": 7},
                                     {"row_group_size": 7, "compression": "zstd", "use_dictionary": False}])
def test_every_row_of_the_column_is_a_document_in_exactly_one_split(tmp_path, options):
    path = written(tmp_path / "a.parquet", **options)
    made = open_prepared(prepare(find_source(path), tmp_path / "out", Reading(text_field="body")))
    found = []
    for split in (made.corpus.train, made.corpus.heldout):
        documents = [split.tokens[a:b] for a, b in zip(split.doc_starts[:-1], split.doc_starts[1:])]
        assert all(d[0] == DOCUMENT_START for d in documents)
        found += [d[1:].astype(np.uint8).tobytes().decode() for d in documents]
    assert sorted(found) == sorted(TEXTS) and made.corpus.heldout.num_documents == 3


def test_the_samples_are_those_of_the_same_texts_as_jsonl(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    options = {"cache_dir": str(tmp_path / "cache"), "seq_len": 32, "text_field": "body"}
    ours, theirs = (open_data(Config(data=DataConfig(path=str(path), **options)))
                    for path in (written(tmp_path / "a.parquet"), lines))
    assert ours.train.description() == theirs.train.description()
    assert all(np.array_equal(ours.train.read(n, np.arange(32)), theirs.train.read(n, np.arange(32))) for n in range(20))


def test_row_groups_are_read_when_they_are_come_to_and_no_other_column_is(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow.parquet")
    import pyarrow.parquet

    monkeypatch.setattr(parquet_module, "_ROWS", 5)
    path = written(tmp_path / "a.parquet", row_group_size=10)
    place = pyarrow.parquet.ParquetFile(path).metadata.row_group(3).column(1)
    content = bytearray(path.read_bytes())
    start = place.dictionary_page_offset or place.data_page_offset
    content[start:start + place.total_compressed_size] = b"\xff" * place.total_compressed_size
    other = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(0)
    start = other.dictionary_page_offset or other.data_page_offset
    content[start:start + other.total_compressed_size] = b"\xff" * other.total_compressed_size
    path.write_bytes(content)
    rows = parquet_documents(path, "body")
    assert [next(rows).decode() for _ in range(30)] == TEXTS[:30], "damage further on, and in another column, is not met"
    with pytest.raises(ValueError, match="a.parquet is damaged behind row 30: "):
        next(rows)


def test_what_is_no_text_is_refused_by_column_or_row(tmp_path):
    path = written(tmp_path / "a.parquet", {"id": [1, 2], "txt": ["a", None], "tags": [["a"], ["b"]]})
    for field, message in (("text", "data.text_field=text: .*a.parquet has no such column; nearest: txt"),
                           ("id", "data.text_field=id: .*holds int64 in that column, not text; columns of text: txt"),
                           ("tags", "holds list<.*not text"), ("txt", "data.text_field=txt: .*row 2, holds nothing there")):
        with pytest.raises(ValueError, match=message):
            list(parquet_documents(path, field))


@pytest.mark.parametrize("how", ["cut short", "no parquet", "empty of columns"])
def test_a_file_that_is_none_is_refused_with_its_path_and_leaves_nothing_behind(tmp_path, how):
    path = written(tmp_path / "a.parquet", {} if how == "empty of columns" else None)
    if how == "cut short":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "no parquet":
        path.write_bytes(b"text, after all")
    words = "has no such column; nearest: none" if how == "empty of columns" else "is no parquet file, or is cut short"
    with pytest.raises(ValueError, match=f"a.parquet {words}"):
        prepare(find_source(path), tmp_path / "out/folder", Reading(text_field="body"))
    assert list((tmp_path / "out").iterdir()) == []


def test_strings_of_any_arrow_kind_are_text(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    for kind in (arrow.string(), arrow.large_string(), arrow.dictionary(arrow.int32(), arrow.string())):
        path = written(tmp_path / "a.parquet", {"text": arrow.array(["one", "two", "one"], kind)})
        assert list(parquet_documents(path, "text")) == [b"one", b"two", b"one"]


def test_max_bytes_reads_no_more(tmp_path):
    source = find_source(written(tmp_path / "a.parquet"))
    made = open_prepared(prepare(source, tmp_path / "out", Reading(text_field="body", max_bytes=400)))
    assert 0 < len(made.corpus.train.tokens) + len(made.corpus.heldout.tokens) < 400 + 20
