"""A run with sharded weights that was stopped goes on: to the bit on the same ranks, within rounding on others, sharded or not."""
import dataclasses
import functools
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_runs import StopAfter, figures, go, kept, rows, same_bits, weights, whole
from train_ranks import run_ranks

from ringflash.degrees import shard_size
from ringflash.train.world import connect, single

CPU = torch.device("cpu")
# The run that is stopped after step 3: four samples a step. name -> dp, cp, shard, accumulation of the one that goes on.
FOUR = {"the same ranks": (2, 2, -1, 2), "two copies on two ranks each": (2, 2, 2, 2), "whole on every rank": (2, 2, 1, 2),
        "another cp": (4, 1, -1, 1), "a ring of four": (1, 4, 2, 4)}
TWO = {"two ranks": (1, 2, -1, 4), "two ranks, dp": (2, 1, -1, 2)}


def config(dp, cp, shard, accumulation, **checkpoint):
    cfg = kept(model={"tie_embeddings": True, "sinks": True}, **checkpoint)
    return dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, dp=dp, cp=cp, shard=shard),
                               train=dataclasses.replace(cfg.train, accumulation=accumulation))


def run_on(folder: Path, dp, cp, shard, accumulation, stop=None, **checkpoint):
    cfg = config(dp, cp, shard, accumulation, **checkpoint)
    world = single() if dp * cp == 1 else connect(dp, cp, CPU, timeout_s=60.0, shard=shard_size(cfg.parallel, dp * cp))
    return go(cfg, world, folder, stop=stop)


def four_ranks(rank: int, folder: Path) -> None:
    run_on(folder / "plain", 2, 2, -1, 2)
    run_on(folder / "asynchronous", 2, 2, -1, 2, asynchronous=True)
    run_on(folder / "stopped", 2, 2, -1, 2, stop=StopAfter(3))
    run_on(folder / "stopped whole", 2, 2, 1, 2, stop=StopAfter(3))
    torch.distributed.barrier()
    for name, degrees in FOUR.items():
        copy(rank, folder, "stopped", name)
        run_on(folder / name, *degrees)
    copy(rank, folder, "stopped whole", "from whole to shards")
    run_on(folder / "from whole to shards", 2, 2, -1, 2)


def copy(rank: int, folder: Path, source: str, name: str) -> None:
    if rank == 0:
        shutil.copytree(folder / source, folder / name)
    torch.distributed.barrier()


def two_ranks(rank: int, folder: Path) -> None:
    for name, degrees in TWO.items():
        copy(rank, folder, "stopped", name)
        run_on(folder / name, *degrees)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for size, body in ((4, four_ranks), (2, two_ranks)):
        (folder / f"store{size}").mkdir()
        run_ranks(functools.partial(body, folder=folder), size, folder / f"store{size}")
    return folder


def test_three_steps_and_three_after_a_resume_are_six_to_the_bit(folder):
    assert whole(folder / "stopped") == ["step-00000003"]
    assert [row["step"] for row in rows(folder / "the same ranks")] == [1, 2, 3, 4, 5, 6]
    for name in ("the same ranks", "asynchronous"):
        assert figures(folder / name) == figures(folder / "plain")
        assert same_bits(weights(folder / name), weights(folder / "plain"))


@pytest.mark.parametrize("name", [*list(FOUR)[1:], *TWO, "from whole to shards"])
def test_a_run_goes_on_on_other_ranks_and_other_shards_within_rounding(folder, name):
    assert_same_within_rounding(folder / name, folder / "plain")


def test_a_run_of_four_shards_goes_on_on_one_rank(folder, capsys):
    shutil.copytree(folder / "stopped", folder / "alone")
    run_on(folder / "alone", 1, 1, 1, 4)
    said = capsys.readouterr().err
    assert "saved on dp 2 x cp 2, weights over 4, on cpu, now dp 1 x cp 1 on cpu: equal within rounding" in said
    assert_same_within_rounding(folder / "alone", folder / "plain")


def test_weights_that_were_saved_whole_have_one_copy_of_what_is_tied(folder):
    saved = weights(folder / "plain")
    assert not any(isinstance(weight, torch.distributed.tensor.DTensor) for weight in saved.values())
    assert saved["head.weight"].data_ptr() == saved["embedding.weight"].data_ptr()


def assert_same_within_rounding(folder: Path, plain: Path) -> None:
    got, want = rows(folder), rows(plain)
    keys = ("step", "lr", "tokens", "valid_tokens")
    assert [[row[key] for key in keys] for row in got] == [[row[key] for key in keys] for row in want]
    assert [r["loss"] for r in got] == pytest.approx([r["loss"] for r in want], rel=2e-5)
    reference = weights(plain)
    for name, weight in weights(folder).items():
        # Adam divides by the root of tiny second moments, which magnifies rounding: a hundredth of the rate.
        torch.testing.assert_close(weight, reference[name], rtol=0, atol=1e-4)
