"""The options of the text and their rules: a part of ringflash.config, without torch and numpy as that is."""
from __future__ import annotations

import math
from dataclasses import dataclass, field

FORMATS = ("auto", "text", "jsonl", "parquet", "bin")
BIN_DTYPES = ("uint16", "uint32")
POSITIONS = ("global", "document")
NUM_TOKENS = 257  # ringflash.data.VOCAB_SIZE


@dataclass
class DataConfig:
    """Where the text comes from, and how it is packed to seq_len."""

    task: str = "text"  # what is learnt: the text itself, or passkey (eval.passkey says what its keys look like)
    # A file, a glob, a folder, or what `ringflash prepare` wrote; None: the running Python's own library.
    path: str | None = None
    pattern: str = "**/*"  # which files under a folder
    mixture: list[str] = field(default_factory=list)  # several such paths, instead of one
    weights: list[float] = field(default_factory=list)  # their shares of the samples; []: equal ones
    format: str = "auto"  # of the files; auto: by their endings, .jsonl, .parquet, .bin, else text
    text_field: str = "text"  # of a jsonl's records, or the column of a parquet file
    tokenizer: str = "bytes"  # or the path of a tokenizer.json
    document_start: str | None = None  # the tokenizer.json's token that begins each document; None: the one with a usual name
    bin_dtype: str = "uint16"  # of a .bin without a header
    bin_document_start: int | None = None  # the token that begins each document of a .bin; None: a file is a document
    cache_dir: str = "outputs/cache"
    seq_len: int = 1024
    batch_size: int = 1  # sequences per micro-batch and dp rank
    document_mask: bool = True  # attention stays inside documents; needs batch_size 1
    positions: str = "global"  # RoPE's positions run on through a sample (global), or begin at 0 in each document (document)
    max_document_tokens: int | None = None  # longer documents are cut into pieces of this many; None: they stay whole
    heldout_fraction: float = 0.05  # of the documents, for evaluation
    max_bytes: int | None = None  # read no more text than this
    max_samples: int | None = None  # train on so many samples only, over and over; None: on all, in a new order each epoch
    prefetch: bool = True  # a thread reads the next step's rows


def data_problems(d: DataConfig, vocab_size: int, accumulation: int) -> list[str]:
    """A line for each broken rule. What the files themselves show is checked where they are opened."""
    # One token gives no label: the label of a token is the next one.
    problems = [f"data.{key}={getattr(d, key)}: must be at least {low}; nearest: {low}"
                for key, low in (("seq_len", 2), ("batch_size", 1)) if getattr(d, key) < low]
    if d.path == "" and not d.mixture:
        problems.append("data.path='': names no file; a file, a glob or a folder, e.g. data.path=my_texts "
                        "(null: the Python library)")
    if d.document_mask and d.batch_size > 1:
        problems.append(f"data.batch_size={d.batch_size}: packed documents (data.document_mask=true) need "
                        "batch_size 1, since all rows of a batch share one mask; nearest: 1, with "
                        f"train.accumulation={d.batch_size * accumulation}")
    if d.positions == "document" and not d.document_mask:
        problems.append("data.positions=document: data.document_mask=false, so tokens of several documents would see each other at "
                        "the same positions; nearest: global, or data.document_mask=true")
    if not 0 < d.heldout_fraction < 1:
        problems.append(f"data.heldout_fraction={d.heldout_fraction}: a share of the documents, above 0 and below 1")
    if d.max_bytes is not None and d.max_bytes < 1:
        problems.append(f"data.max_bytes={d.max_bytes}: must be at least 1, or null for all of the text")
    if d.max_samples is not None and (d.max_samples < 1 or d.task != "text"):
        rule = "must be at least 1, or null; nearest: 1" if d.max_samples < 1 else \
            f"data.task={d.task} makes its samples and repeats none; nearest: null"
        problems.append(f"data.max_samples={d.max_samples}: {rule}")
    if d.max_document_tokens is not None and d.max_document_tokens < 2:
        problems.append(f"data.max_document_tokens={d.max_document_tokens}: must be at least 2, or null; nearest: 2")
    for key, valid in (("positions", POSITIONS), ("format", FORMATS), ("bin_dtype", BIN_DTYPES)):
        if getattr(d, key) not in valid:
            problems.append(f"data.{key}={getattr(d, key)}: valid: {', '.join(valid)}")
    if not d.text_field:
        problems.append("data.text_field='': names no field of a jsonl's records and no column of a parquet file, e.g. data.text_field=text")
    if d.bin_document_start is not None and d.bin_document_start < 0:
        problems.append(f"data.bin_document_start={d.bin_document_start}: must be at least 0, or null; nearest: 0")
    problems += _mixture(d)
    # What data.path names may be tokens already; the Python library is text.
    if d.tokenizer == "bytes" and d.path is None and not d.mixture and vocab_size < NUM_TOKENS:
        problems.append(f"model.vocab_size={vocab_size}: the tokens are 256 bytes and the start of a document; "
                        f"nearest: {NUM_TOKENS}")
    return problems


def _mixture(d: DataConfig) -> list[str]:
    problems = []
    if d.path and d.mixture:
        problems.append(f"data.path={d.path}: given beside data.mixture; nearest: null, or data.mixture=[]")
    if any(not path for path in d.mixture):
        problems.append(f"data.mixture={list(d.mixture)}: an entry names no file")
    if d.weights and len(d.weights) != len(d.mixture):
        problems.append(f"data.weights={list(d.weights)}: {len(d.weights)} weights for {len(d.mixture)} sources of data.mixture; "
                        "one for each, or [] for equal shares")
    if any(not (math.isfinite(weight) and weight > 0) for weight in d.weights):
        problems.append(f"data.weights={list(d.weights)}: each must be a finite number above 0")
    return problems
