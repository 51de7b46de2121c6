"""Claims about jsonl, .bin and tokenizer.json sources, and the folder that they are made into."""
import builtins
import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from ringflash.data import DOCUMENT_START, Reading, cached, find_source, open_prepared, prepare
from ringflash.data import prepared as prepared_module
from ringflash.data.formats import bin_documents, open_bin
from ringflash.launch import prepare as command

TEXTS = [f"document {i}, with an umlaut: \u00fc " + "abc" * i for i in range(30)]


def jsonl(path: Path, texts=TEXTS, field: str = "text") -> Path:
    path.write_text("\n".join(json.dumps({"id": i, field: text}) for i, text in enumerate(texts)) + "\n\n")
    return path


def made(path, folder, **reading):
    return open_prepared(prepare(find_source(path), folder, Reading(**reading)))


def documents(corpus) -> list[list[int]]:
    return [split.tokens[a:b].tolist() for split in (corpus.train, corpus.heldout)
            for a, b in zip(split.doc_starts[:-1], split.doc_starts[1:])]


def header(magic: int, version: int, count: int) -> bytes:
    return np.array([magic, version, count] + [0] * 253, "<i4").tobytes()


def test_every_line_of_a_jsonl_is_a_document_in_exactly_one_split(tmp_path):
    corpus = made(jsonl(tmp_path / "a.jsonl", field="body"), tmp_path / "out", text_field="body").corpus
    texts = [bytes(d[1:]).decode() for d in documents(corpus)]
    assert sorted(texts) == sorted(TEXTS) and all(d[0] == DOCUMENT_START for d in documents(corpus))
    assert corpus.heldout.num_documents == round(0.05 * 30) and isinstance(corpus.train.tokens, np.memmap)


def test_a_folder_may_mix_texts_and_jsonl(tmp_path):
    (tmp_path / "in").mkdir()
    jsonl(tmp_path / "in/a.jsonl")
    (tmp_path / "in/b.txt").write_text("a whole file")
    assert made(tmp_path / "in", tmp_path / "out").corpus.train.num_documents + 2 == 31


@pytest.mark.parametrize(("line", "message"), [
    ('{"txt": "a", "id": 1}', "data.text_field=text: .*a.jsonl, line 2, has no such field; nearest: txt"),
    ('{"content": "a"}', "nearest: content"),
    ('{"text": 3}', "data.text_field=text: .*line 2, holds a int there, not text"),
    ("[1, 2]", "line 2: a JSON list, not an object"),
    ("[" * 100_000, "line 2: no JSON"),
    ('{"text": "a', "line 2: no JSON"),
    ('{"text": "\\ud800"}', "line 2: half a surrogate pair"),
])
def test_a_line_that_is_no_record_is_refused_by_number_and_leaves_nothing_behind(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        made(tmp_path / "a.jsonl", tmp_path / "out/folder")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("dtype", "head"), [("uint16", b""), ("uint32", b""), ("uint16", (20240520, 1)), ("uint32", (20240801, 7))])
def test_a_bin_is_read_with_and_without_a_header_and_cut_where_documents_begin(tmp_path, dtype, head):
    tokens = np.random.default_rng(0).integers(0, 50000, 5000).astype(f"<{dtype[0]}{int(dtype[4:]) // 8}")
    tokens[::100] = 50256
    path = tmp_path / "a.bin"
    path.write_bytes((header(*head, len(tokens)) if head else b"") + tokens.tobytes())
    found = made(path, tmp_path / "out", bin_dtype="uint16" if head else dtype, bin_document_start=50256)
    assert sorted(documents(found.corpus)) == sorted(tokens.reshape(50, 100).tolist())
    assert found.num_ids == 50257 and found.corpus.train.tokens.dtype == np.uint16
    assert 9 < found.unigram_nats < 11


@pytest.mark.parametrize("files", [1, 25])
@pytest.mark.parametrize("start", [300, 70000])
def test_a_start_of_documents_that_no_token_of_a_bin_is_belongs_to_the_vocabulary(tmp_path, files, start):
    (tmp_path / "in").mkdir()
    for i in range(files):
        (np.arange(100, dtype="<u2") + i).tofile(tmp_path / f"in/{i:02}.bin")
    found = made(tmp_path / "in", tmp_path / "out", bin_document_start=start)
    assert found.num_ids == start + 1
    assert files > 1 or found.corpus.heldout.tokens[0] == start  # the held-out tail of the only document


def test_tokens_beyond_16_bits_are_kept(tmp_path):
    tokens = np.arange(100_000, 101_000, dtype="<u4")
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    found = made(tmp_path / "a.bin", tmp_path / "out", bin_dtype="uint32")
    assert found.num_ids == 101_000 and np.concatenate([found.corpus.train.tokens, found.corpus.heldout.tokens]).tolist() == tokens.tolist()


@pytest.mark.parametrize(("content", "message"), [
    (b"abc", "is cut short: 3 bytes are no whole number of data.bin_dtype=uint16"),
    (header(20240520, 1, 9) + b"\0" * 16, "is cut short or damaged: its header says 9 tokens of 2 bytes, so 1042 bytes, and it has 1040"),
    (header(20240801, 7, 1) + b"\0" * 8, "its header says 1 tokens of 4 bytes, so 1028 bytes, and it has 1032"),
])
def test_a_truncated_bin_is_refused_with_both_sizes(tmp_path, content, message):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ValueError, match=f"data.path: .*a.bin {message}" if "is cut" in message else message):
        made(tmp_path / "a.bin", tmp_path / "out")


def test_documents_of_a_bin_do_not_depend_on_the_chunks_in_which_it_is_searched(monkeypatch):
    tokens = np.array([9, 9, 1, 2, 9, 3, 9], np.uint16)
    expected = [[9], [9, 1, 2], [9, 3], [9]]
    for size in (1, 2, 3, 100):
        monkeypatch.setattr("ringflash.data.formats.CHUNK_TOKENS", size)
        assert [d.tolist() for d in bin_documents(tokens, 9)] == expected
    assert [d.tolist() for d in bin_documents(tokens, None)] == [tokens.tolist()]


def test_an_empty_bin_behind_a_header_and_an_unreadable_file_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(header(20240520, 1, 0))
    assert len(open_bin(tmp_path / "a.bin", "uint16")) == 0
    with pytest.raises(ValueError, match="0 tokens in 0 documents are too few"):
        made(tmp_path / "a.bin", tmp_path / "out")
    jsonl(tmp_path / "b.jsonl")
    true_open = builtins.open

    def locked(path, *args, **options):
        if str(path).endswith("b.jsonl"):
            raise PermissionError(13, "Permission denied")
        return true_open(path, *args, **options)

    monkeypatch.setattr(builtins, "open", locked)
    with pytest.raises(OSError, match=r"data.path: .*b.jsonl cannot be read \(Permission denied\)"):
        made(tmp_path / "b.jsonl", tmp_path / "out")


def test_a_few_long_documents_hold_out_their_ends_which_begin_as_documents_do(tmp_path):
    corpus = made(jsonl(tmp_path / "a.jsonl", ["x" * 999, "y" * 99]), tmp_path / "out").corpus
    assert [len(d) for d in documents(corpus)] == [950, 95, 51, 6]
    assert all(d[0] == DOCUMENT_START and d.count(DOCUMENT_START) == 1 for d in documents(corpus))


def test_a_first_document_that_max_bytes_leaves_out_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data\.max_bytes=50: the first document, in .*a\.jsonl, has 100 bytes.*nearest: 100"):
        made(jsonl(tmp_path / "a.jsonl", ["x" * 100] * 9), tmp_path / "out", max_bytes=50)


def test_max_bytes_reads_no_more(tmp_path):
    corpus = made(jsonl(tmp_path / "a.jsonl", ["x" * 100] * 9), tmp_path / "out", max_bytes=350).corpus
    assert sum(d.count(ord("x")) for d in documents(corpus)) == 300


def test_a_broken_off_preparation_leaves_nothing_and_the_next_one_is_whole(tmp_path, monkeypatch):
    source = find_source(jsonl(tmp_path / "a.jsonl"))
    with monkeypatch.context() as patch:
        patch.setattr(prepared_module.np, "save", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left on device: .*out.folder"):
            prepare(source, tmp_path / "out/folder", Reading())
    assert list((tmp_path / "out").iterdir()) == []
    assert open_prepared(prepare(source, tmp_path / "out/folder", Reading())).num_ids == 257


def _prepare(path: str, folder: str) -> None:
    prepare(find_source(path), folder, Reading())


def test_processes_may_race_for_a_folder(tmp_path):
    path = jsonl(tmp_path / "a.jsonl")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_prepare, args=(str(path), str(tmp_path / "out/folder"))) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["folder"]
    assert len(documents(open_prepared(tmp_path / "out/folder").corpus)) == 30


@pytest.mark.parametrize("name", ["tokens.bin", "index.npy", "meta.json"])
def test_a_prepared_folder_with_a_damaged_file_is_refused(tmp_path, name):
    made(jsonl(tmp_path / "a.jsonl"), tmp_path / "out")
    for size in (100, 0):
        os.truncate(tmp_path / "out" / name, size)
        with pytest.raises(ValueError, match="data.path=.*out: no whole prepared folder"):
            open_prepared(tmp_path / "out")


def test_the_cache_tells_apart_how_the_same_file_is_read(tmp_path):
    source = find_source(jsonl(tmp_path / "a.jsonl"))
    first, again = (cached(source, tmp_path / "cache", Reading()).corpus.train.content for _ in range(2))
    other = cached(source, tmp_path / "cache", Reading(heldout_fraction=0.5)).corpus.train.content
    assert first == again != other and len(list((tmp_path / "cache").iterdir())) == 2


def test_the_command_prepares_once_and_says_how_to_train(tmp_path, capsys):
    path, out = jsonl(tmp_path / "a.jsonl"), str(tmp_path / "out")
    assert command.main([str(path), "-o", out]) == 0
    assert f"data.path={out} model.vocab_size=257" in capsys.readouterr().out
    assert command.main([str(path), "-o", out]) == 2
    assert "is there already" in capsys.readouterr().err
    assert command.main([str(tmp_path / "none"), "-o", str(tmp_path / "other")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_a_tokenizer_json_without_its_package_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"data.tokenizer=t.json: needs the package tokenizers, .*ringflash\[tokenizers\]"):
        made(jsonl(tmp_path / "a.jsonl"), tmp_path / "out", tokenizer="t.json")


def test_a_tokenizer_json_encodes_each_document_behind_its_start(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = sorted({word for text in TEXTS for word in text.split()})
    vocab = {word: i for i, word in enumerate(["[UNK]", "<|endoftext|>", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "t.json"))
    found = made(jsonl(tmp_path / "a.jsonl"), tmp_path / "out", tokenizer=str(tmp_path / "t.json"))
    assert sorted(documents(found.corpus)) == sorted([1, *(vocab[word] for word in text.split())] for text in TEXTS)
    assert found.num_ids == len(vocab)
    with pytest.raises(ValueError, match="data.document_start=<s>: the vocabulary of .*t.json has no <s>"):
        made(tmp_path / "a.jsonl", tmp_path / "other", tokenizer=str(tmp_path / "t.json"), document_start="<s>")
    (tmp_path / "bad.json").write_text("{}")
    for name, problem in (("bad.json", "no tokenizer.json that the package can read"), ("none.json", "no such file")):
        with pytest.raises(ValueError, match=problem):
            made(tmp_path / "a.jsonl", tmp_path / "other", tokenizer=str(tmp_path / name))
