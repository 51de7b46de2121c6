"""Claims about finding a text, caching it as tokens and splitting it."""
import math
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

import ringflash.data.corpus as corpus_module
from ringflash.data import DOCUMENT_START, VOCAB_SIZE, find_source, load_corpus, unigram_entropy


def folder(root: Path, num_files: int = 30, size: int = 50) -> Path:
    root.mkdir()
    for i in range(num_files):
        sub = root / f"part{i % 3}"
        sub.mkdir(exist_ok=True)
        (sub / f"{i:03d}.txt").write_bytes(f"document {i}: ".encode() + bytes((97 + (i * k) % 26) for k in range(size + i)))
    return root


def texts(split) -> list[bytes]:
    documents = [split.tokens[a:b] for a, b in zip(split.doc_starts[:-1], split.doc_starts[1:])]
    assert all(d[0] == DOCUMENT_START and (d[1:] < 256).all() for d in documents)
    return [d[1:].astype(np.uint8).tobytes() for d in documents]


def test_every_document_is_in_exactly_one_split_byte_for_byte(tmp_path):
    root = folder(tmp_path / "text")
    corpus = load_corpus(find_source(root), tmp_path / "cache")
    train, heldout = texts(corpus.train), texts(corpus.heldout)
    written = sorted(p.read_bytes() for p in root.rglob("*.txt"))
    assert sorted(train + heldout) == written and not set(train) & set(heldout)
    assert len(heldout) == round(0.05 * 30) and corpus.heldout.num_documents == 2
    assert train == sorted(train, key=lambda t: next(p for p in sorted(root.rglob("*.txt")) if p.read_bytes() == t))
    assert corpus.train.tokens.dtype == np.uint16 and VOCAB_SIZE == DOCUMENT_START + 1


def test_a_cached_corpus_is_found_without_reading_the_text(tmp_path, monkeypatch):
    source = find_source(folder(tmp_path / "text"))
    first = load_corpus(source, tmp_path / "cache")
    monkeypatch.setattr(corpus_module, "_read", lambda *args: pytest.fail("the text was read again"))
    again = load_corpus(source, tmp_path / "cache")
    assert np.array_equal(first.train.tokens, again.train.tokens) and first.train.content == again.train.content
    assert isinstance(again.train.tokens, np.memmap)


def test_equal_texts_have_equal_content_wherever_they_lie_and_changed_ones_do_not(tmp_path):
    a = load_corpus(find_source(folder(tmp_path / "a")), tmp_path / "cache_a")
    b = load_corpus(find_source(folder(tmp_path / "b")), tmp_path / "cache_b")
    assert (a.train.content, a.heldout.content) == (b.train.content, b.heldout.content)
    (tmp_path / "b/part0/000.txt").write_bytes(b"another text")
    changed = load_corpus(find_source(tmp_path / "b"), tmp_path / "cache_b")
    assert (a.train.content, a.heldout.content) != (changed.train.content, changed.heldout.content)
    assert b"another text" in texts(changed.train) + texts(changed.heldout)


def test_equal_documents_stay_on_one_side_of_the_split(tmp_path):
    root = folder(tmp_path / "text", num_files=40)
    for i, file in enumerate(sorted(root.rglob("*.txt"))):
        file.with_name(f"copy{i}.txt").write_bytes(file.read_bytes())
    corpus = load_corpus(find_source(root), tmp_path / "cache")
    train, heldout = texts(corpus.train), texts(corpus.heldout)
    assert not set(train) & set(heldout)
    assert all(heldout.count(t) == 2 for t in heldout) and len(heldout) == 4


def test_a_single_file_is_held_out_by_its_end(tmp_path):
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(97, 123)) * 10)
    corpus = load_corpus(find_source(file), tmp_path / "cache", heldout_fraction=0.1)
    assert texts(corpus.train) == [file.read_bytes()[:234]] and texts(corpus.heldout) == [file.read_bytes()[234:]]


def test_max_bytes_reads_no_more_text_than_that_and_may_cut_a_character(tmp_path):
    root = tmp_path / "text"
    root.mkdir()
    (root / "a.txt").write_bytes(b"0123456789")
    (root / "b.txt").write_text("abc\u00e9\u00e9", encoding="utf-8")
    (root / "c.txt").write_bytes(b"never read \xff")
    corpus = load_corpus(find_source(root), tmp_path / "cache", max_bytes=14, heldout_fraction=0.2)
    assert texts(corpus.train) == [b"01234567", b"abc"] and texts(corpus.heldout) == [b"89", b"\xc3"]


def _load(folder_name, cache, barrier, results):
    barrier.wait()
    corpus = load_corpus(find_source(folder_name), cache)
    results.put((corpus.train.content, int(corpus.train.tokens.astype(np.int64).sum()), corpus.heldout.num_documents))


def test_four_processes_may_build_the_cache_at_once(tmp_path):
    root = folder(tmp_path / "text", num_files=200, size=2000)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_load, args=(root, tmp_path / "cache", barrier, results)) for _ in range(4)]
    for w in workers:
        w.start()
    found = {results.get(timeout=30) for _ in workers}
    for w in workers:
        w.join(30)
    assert [w.exitcode for w in workers] == [0] * 4 and len(found) == 1
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == [".bin", ".npy"], "temporary files are left"


def test_a_truncated_cache_is_built_again(tmp_path):
    source = find_source(folder(tmp_path / "text"))
    whole = texts(load_corpus(source, tmp_path / "cache").train)
    for kind, size in (("bin", 100), ("npy", 100), ("npy", 0)):
        os.truncate(next((tmp_path / "cache").glob(f"*.{kind}")), size)
        assert texts(load_corpus(source, tmp_path / "cache").train) == whole


def test_a_failed_build_leaves_no_file_behind(tmp_path, monkeypatch):
    source = find_source(folder(tmp_path / "text"))

    def fails(text):
        raise OSError("disk full")

    monkeypatch.setattr(corpus_module, "encode", fails)
    with pytest.raises(OSError, match="disk full"):
        load_corpus(source, tmp_path / "cache")
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".npy"]
    monkeypatch.undo()
    assert load_corpus(source, tmp_path / "cache").heldout.num_documents == 2


def test_a_file_that_changes_between_the_two_readings_is_an_error(tmp_path, monkeypatch):
    source = find_source(folder(tmp_path / "text"))
    pieces = corpus_module._pieces

    def then_truncate(*args):
        found = pieces(*args)
        found[0].path.write_bytes(b"x")
        return found

    monkeypatch.setattr(corpus_module, "_pieces", then_truncate)
    with pytest.raises(RuntimeError, match="changed while it was read"):
        load_corpus(source, tmp_path / "cache")


def test_the_standard_library_is_source_code_without_tests(tmp_path):
    source = find_source()
    names = [name for name, _ in source.files]
    assert "argparse.py" in names and "json/decoder.py" in names and names == sorted(names)
    assert not any("test" in name.split("/")[:-1] or "site-packages" in name for name in names)
    corpus = load_corpus(source, tmp_path / "cache", max_bytes=400_000)
    parts = texts(corpus.train) + texts(corpus.heldout)
    assert sum(map(len, parts)) == 400_000
    assert b"import" in b"".join(parts)


def test_a_list_a_glob_and_a_folder_of_the_same_files_give_the_same_text(tmp_path):
    root = folder(tmp_path / "text")
    files = sorted(root.rglob("*.txt"))
    ways = [root, str(root / "**" / "*.txt"), [str(f) for f in files], [root, files[0]]]
    contents = {tuple(sorted(texts(c.train) + texts(c.heldout)))
                for c in (load_corpus(find_source(way), tmp_path / "cache") for way in ways)}
    assert len(contents) == 1 and len(next(iter(contents))) == 30
    (root / ".hidden").write_bytes(b"\xff")
    assert len(find_source(root).files) == 30
    assert len(find_source(root, pattern="part1/*.txt").files) == 10


@pytest.mark.parametrize("pattern", ["", "**x", "/abs/*"])
def test_a_pattern_that_is_none_is_refused_by_its_key(tmp_path, pattern):
    with pytest.raises(ValueError, match="data.pattern="):
        find_source(folder(tmp_path / "text"), pattern=pattern)


@pytest.mark.parametrize("make, error, words", [
    (lambda t: t / "nowhere.txt", FileNotFoundError, "nowhere.txt: no such file or folder"),
    (lambda t: t / "no*.txt", FileNotFoundError, r"no\*.txt: no file matches"),
    (lambda t: folder(t / "f", 0), FileNotFoundError, "holds no file that matches"),
    (lambda t: [], ValueError, "names no file"),
    (lambda t: "", ValueError, "names no file"),
    (lambda t: [t / "nowhere.txt"], FileNotFoundError, "nowhere.txt"),
])
def test_a_missing_source_is_refused_with_its_path(tmp_path, make, error, words):
    with pytest.raises(error, match=f"data.path.*{words}"):
        find_source(make(tmp_path))


def test_an_empty_source_is_refused_with_its_path_and_empty_files_are_no_documents(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(ValueError, match="empty.txt: is empty"):
        find_source(empty)
    full = tmp_path / "full.txt"
    full.write_bytes(b"0123456789")
    corpus = load_corpus(find_source([empty, full]), tmp_path / "cache")
    assert texts(corpus.train) + texts(corpus.heldout) == [b"012345678", b"9"]


def test_a_source_that_is_not_text_is_refused_with_path_and_offset(tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"0123\xff567")
    with pytest.raises(ValueError, match=f"{bad} is not UTF-8 text: byte 4 is 0xff"):
        load_corpus(find_source(bad), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_text_too_small_to_split_is_refused_with_the_numbers(tmp_path):
    (tmp_path / "one.txt").write_bytes(b"x")
    with pytest.raises(ValueError, match="one.txt: 1 bytes in 1 documents"):
        load_corpus(find_source(tmp_path / "one.txt"), tmp_path / "cache")
    same = tmp_path / "same"
    same.mkdir()
    for i in range(25):
        (same / f"{i}.txt").write_bytes(b"all the same")
    with pytest.raises(ValueError, match="same: 300 bytes in 25 documents"):
        load_corpus(find_source(same), tmp_path / "cache")


@pytest.mark.parametrize("options, key", [({"heldout_fraction": 0.0}, "data.heldout_fraction=0.0"),
                                          ({"heldout_fraction": 1.0}, "data.heldout_fraction=1.0"),
                                          ({"max_bytes": 0}, "data.max_bytes=0")])
def test_bad_options_are_refused_by_key_before_anything_is_written(tmp_path, options, key):
    source = find_source(folder(tmp_path / "text"))
    with pytest.raises(ValueError, match=key):
        load_corpus(source, tmp_path / "cache", **options)
    assert not (tmp_path / "cache").exists()


def test_unigram_entropy_of_known_texts():
    assert unigram_entropy(np.array([256, 1, 2, 3, 4])) == pytest.approx(math.log(4))
    assert unigram_entropy(np.array([256, 7, 7, 7])) == 0.0
    # bytes 0 and 1 equally often, judged by counts 3 + 1, 0 + 1 of 3 + 256
    crossed = unigram_entropy(np.array([0, 1], np.uint16), np.array([0, 0, 0]))
    assert crossed == pytest.approx(-0.5 * (math.log(4 / 259) + math.log(1 / 259)))
    with pytest.raises(ValueError, match="no byte"):
        unigram_entropy(np.array([256]))


def test_unigram_entropy_of_the_standard_library_is_near_3_2_nats(tmp_path):
    corpus = load_corpus(find_source(), tmp_path / "cache", max_bytes=2_000_000)
    assert 2.8 < unigram_entropy(corpus.train.tokens) < 3.5
    size = os.path.getsize(next((tmp_path / "cache").glob("*.bin")))
    assert size == 2 * (len(corpus.train.tokens) + len(corpus.heldout.tokens))
