"""What can be wrong around a run, a row each: a clear error before anything is trained where that is possible, and nothing lost.

A run of 6 steps was stopped after 5 and is started again with the fault. Refused: the folder is as it was. Else the message is
there. Either way the run ends, once the fault is gone, with the figures and weights of one that was never stopped.
"""
import builtins
import contextlib
import dataclasses
import errno
import gc
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoint_runs import StopAfter, figures, kept, same_bits, weights, whole
from torch.distributed.checkpoint.filesystem import FileSystem

from ringflash.config import DataConfig, validate
from ringflash.data import prepared
from ringflash.train import loop
from ringflash.train.checkpoint import SaveError
from ringflash.train.folder import claim_run_folder
from ringflash.train.loop import train
from ringflash.train.text import open_data
from ringflash.train.world import single

STEPS = 6


def config(base: Path, **data):
    cfg = kept(steps=STEPS, every=2)
    text = DataConfig(path=str(base / "text" / "a.bin"), cache_dir=str(base / "cache"), seq_len=45)
    run = dataclasses.replace(cfg.run, dir=str(base / "run"))
    return dataclasses.replace(cfg, data=dataclasses.replace(text, **data), run=run)


def start(cfg, stop=None):
    """A start, as launch/train.py goes about it, of one rank."""
    validate(cfg, 1)
    data = open_data(cfg)
    return train(cfg, single(), data, claim_run_folder(cfg.run.dir, resume=True), stop)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run that nothing happens to; the text is 2,000 tokens behind llm.c's header."""
    base = tmp_path_factory.mktemp("plain")
    (base / "text").mkdir()
    head = np.array([20240520, 1, 2000] + [0] * 253, "<i4").tobytes()
    (base / "text" / "a.bin").write_bytes(head + np.random.default_rng(0).integers(0, 40, 2000).astype("<u2").tobytes())
    assert start(config(base)) is not None
    return base


@pytest.fixture(scope="module")
def stopped(plain, tmp_path_factory):
    base = tmp_path_factory.mktemp("stopped")
    shutil.copytree(plain / "text", base / "text")
    assert start(config(base), StopAfter(5)) is None
    assert whole(base / "run") == ["step-00000002", "step-00000004", "step-00000005"]
    return base


@contextlib.contextmanager
def changed(path: Path, content: bytes):
    """The file holds something else for a while, and has its old time again afterwards, as a repaired disk would."""
    before, times = path.read_bytes(), path.stat()
    path.write_bytes(content)
    yield
    path.write_bytes(before)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def flipped(*steps: int):
    @contextlib.contextmanager
    def fault(base: Path, patch):
        with contextlib.ExitStack() as stack:
            for step in steps:
                path = base / "run" / "checkpoints" / f"step-{step:08d}" / "__0_0.distcp"
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 1
                stack.enter_context(changed(path, bytes(content)))
            yield {}
            if len(steps) == 1:
                stack.pop_all()  # it was passed over, and is another by now
    return fault


@contextlib.contextmanager
def cut_bin(base: Path, patch):
    path = base / "text" / "a.bin"
    with changed(path, path.read_bytes()[:-101]):
        yield {}


@contextlib.contextmanager
def small_vocabulary(base: Path, patch):
    yield {"vocab_size": 30}


@contextlib.contextmanager
def no_text(base: Path, patch):
    (base / "empty").mkdir()
    yield {"path": str(base / "empty")}


@contextlib.contextmanager
def no_field(base: Path, patch):
    (base / "b.jsonl").write_text('{"content": "a text", "id": 3}\n' * 30)
    yield {"path": str(base / "b.jsonl"), "text_field": "contents"}


@contextlib.contextmanager
def torn_cache(base: Path, patch):
    (tokens,) = (base / "cache").glob("*.tokens/tokens.bin")
    with changed(tokens, tokens.read_bytes()[:100]):
        yield {}


@contextlib.contextmanager
def full_cache(base: Path, patch):
    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(prepared, "_to_disk", fail)
    yield {"cache_dir": str(base / "other")}


@contextlib.contextmanager
def full_disk(base: Path, patch):
    create = FileSystem.create_stream

    def fail(self, path, mode):
        if "w" in mode:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(self, path, mode)

    patch.setattr(FileSystem, "create_stream", fail)
    yield {}


@contextlib.contextmanager
def no_room(base: Path, patch):
    usage = shutil.disk_usage(base)
    patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    yield {"on_error": "stop"}


@contextlib.contextmanager
def read_only_folder(base: Path, patch):
    true_open = builtins.open

    def fail(path, mode="r", *args, **options):
        if str(path).startswith(str(base / "run")) and set(mode) & set("wa+"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return true_open(path, mode, *args, **options)

    patch.setattr(builtins, "open", fail)
    yield {}


@contextlib.contextmanager
def no_folder(base: Path, patch):
    yield {"dir": str(base / "text" / "a.bin" / "run")}


REFUSED = {
    "every checkpoint corrupt": (flipped(2, 4, 5), "holds no whole checkpoint; checkpoint.resume=none and another run.dir start"),
    "truncated .bin": (cut_bin, "cut short or damaged: its header says 2000 tokens of 2 bytes, so 5024 bytes, and it has 4923"),
    "truncated prepared text": (torn_cache, "tokens.bin is cut short or damaged: 100 bytes, not "),
    "wrong vocabulary": (small_vocabulary, "need 40 (the largest is 39); nearest: 40"),
    "empty folder": (no_text, "empty: the folder holds no file that matches '**/*'"),
    "unknown dataset field": (no_field, "data.text_field=contents: "),
    "full disk under the cache": (full_cache, "No space left on device"),
    "a disk with room for none": (no_room, "a checkpoint takes about 0.3 MiB, the disk has 0.1 MiB left; nearest: another run.dir"),
    "read-only run folder": (read_only_folder, "checkpoints: Read-only file system; nearest: another run.dir"),
    "no run folder": (no_folder, "a.bin/run: the folder cannot be made"),
}
SURVIVED = {
    "corrupt checkpoint": (flipped(5), "step-00000005 is passed over: __0_0.distcp holds other bytes than were written"),
    "full disk": (full_disk,
                  "the checkpoint of step 6 could not be saved: No space left on device; the newest is still step-00000005"),
}


@pytest.mark.parametrize("name", [*REFUSED, *SURVIVED])
def test_a_fault_is_told_before_anything_is_trained_or_survived_and_nothing_is_lost(plain, stopped, tmp_path, capsys, name):
    base = tmp_path / "base"
    shutil.copytree(stopped, base)
    fault, words = (REFUSED | SURVIVED)[name]
    with pytest.MonkeyPatch.context() as patch, fault(base, patch) as given:
        cfg = config(base, **{key: value for key, value in given.items() if key in DataConfig.__dataclass_fields__})
        model = dataclasses.replace(cfg.model, vocab_size=given.get("vocab_size", cfg.model.vocab_size))
        cfg = dataclasses.replace(cfg, model=model,
                                  run=dataclasses.replace(cfg.run, dir=given.get("dir", cfg.run.dir)),
                                  checkpoint=dataclasses.replace(cfg.checkpoint, on_error=given.get("on_error", "warn")))
        before = contents(base / "run")
        capsys.readouterr()
        if name in REFUSED:
            with pytest.raises((ValueError, OSError)) as caught:
                start(cfg)
            assert words in str(caught.value) and contents(base / "run") == before
            del caught  # whose frames hold the lock of the run folder
            gc.collect()
            assert not (base / "other").exists() or not list((base / "other").iterdir()), "half a cache is left"
        else:
            assert start(cfg) is not None and words in capsys.readouterr().err
            assert "step-00000004" in " ".join(whole(base / "run"))
            (base / "run" / "weights.pt").unlink()
    assert start(config(base)) is not None
    assert figures(base / "run") == figures(plain / "run") and same_bits(weights(base / "run"), weights(plain / "run"))


def test_results_that_find_no_room_are_told_in_words_and_written_by_the_next_start(plain, stopped, tmp_path, monkeypatch):
    base = tmp_path / "base"
    shutil.copytree(stopped, base)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_weights", full)
        with pytest.raises(SaveError, match="run: No space left on device; the checkpoint of step 6 has them") as caught:
            start(config(base))
    del caught
    gc.collect()
    assert start(config(base)) is not None
    assert figures(base / "run") == figures(plain / "run") and same_bits(weights(base / "run"), weights(plain / "run"))
