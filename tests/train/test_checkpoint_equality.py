"""A run that was stopped and resumed is the run that was not: to the bit on the same ranks, within rounding on others."""
import dataclasses
import functools
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_runs import StopAfter, figures, go, kept, rows, same_bits, seed_all, weights, whole
from torch.distributed.fsdp import fully_shard
from train_ranks import run_ranks, text

from ringflash.config import OptimConfig
from ringflash.train.checkpoint import Checkpoints
from ringflash.train.trainer import Trainer
from ringflash.train.world import connect, single

CPU = torch.device("cpu")
SGD = OptimConfig(name="sgd", lr=0.5, warmup_steps=2, weight_decay=0.0, grad_clip=0.0)
# name -> configuration, and size of the text: 6 and 5 samples of 45 tokens are an epoch that ends with step 3, and inside it
CASES = {
    "adamw": (kept(), 4000),
    "momentum": (kept(optim=dataclasses.replace(SGD, momentum=0.9, lr=0.1)), 4000),
    "no optimizer state, tied embeddings, sinks": (kept(optim=SGD, model={"tie_embeddings": True, "sinks": True}), 4000),
    "epoch ends with step 3": (kept(), 6 * 45),
    "epoch ends inside step 3, asynchronous": (kept(asynchronous=True), 5 * 45),
}
OTHER_RANKS = {"1 x 4": (1, 4, 2), "2 x 2": (2, 2, 1), "4 x 1, twice the samples": (4, 1, 1)}


def on(dp, cp, accumulation, cfg=None):
    cfg = kept() if cfg is None else cfg
    return dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, dp=dp, cp=cp),
                               train=dataclasses.replace(cfg.train, accumulation=accumulation))


def two_ranks(rank: int, folder: Path) -> dict:
    found = {}
    for name, (cfg, num_tokens) in CASES.items():
        world = connect(1, 2, CPU, timeout_s=60.0)
        seed_all(10 + rank)
        plain = StopAfter()
        summary, served = go(cfg, world, folder / name / "plain", stop=plain, num_tokens=num_tokens)
        seed_all(10 + rank)
        first = StopAfter(3)
        nothing, served_before = go(cfg, world, folder / name / "resumed", stop=first, num_tokens=num_tokens)
        assert nothing is None and len(first.drawn) == 3
        if rank == 0:
            shutil.copytree(folder / name / "resumed", folder / name / "stopped")
        seed_all(99)
        second = StopAfter()
        again, served_after = go(cfg, world, folder / name / "resumed", stop=second, num_tokens=num_tokens)
        found[name] = {"plain": summary, "resumed": again, "served": (served, served_before + served_after),
                       "drawn": (plain.drawn, first.drawn + second.drawn)}
    return found


def four_ranks(rank: int, folder: Path) -> dict:
    found = {}
    for name, (dp, cp, accumulation) in OTHER_RANKS.items():
        world = connect(dp, cp, CPU, timeout_s=60.0)
        found[name] = go(on(dp, cp, accumulation), world, folder / name)[1]
    # Sharded weights: saved as DTensors by four ranks, loaded as plain tensors by the test.
    cfg = on(1, 4, 2)
    world = connect(1, 4, CPU, timeout_s=60.0)
    trainer = Trainer(cfg, world, text(cfg))
    for layer in trainer.model.layers:
        fully_shard(layer)
    fully_shard(trainer.model)
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.1)
    for index, parameter in enumerate(trainer.model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.5 + index)
    trainer.optimizer.step()
    checkpoints = Checkpoints(cfg, world, trainer, folder / "sharded")
    checkpoints.restore()
    checkpoints.save(1, {})
    checkpoints.close()
    found["sharded"] = {name: tensor.full_tensor().clone() for name, tensor in trainer.model.state_dict().items()}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def pair(folder):
    (folder / "store2").mkdir()
    return run_ranks(functools.partial(two_ranks, folder=folder), 2, folder / "store2")


@pytest.fixture(scope="module")
def four(folder, pair):
    for name in OTHER_RANKS:
        shutil.copytree(folder / "adamw" / "stopped", folder / name)
    (folder / "store4").mkdir()
    return run_ranks(functools.partial(four_ranks, folder=folder), 4, folder / "store4")


@pytest.mark.parametrize("name", CASES)
def test_three_steps_and_three_after_a_resume_are_six_to_the_bit(folder, pair, name):
    plain, resumed = folder / name / "plain", folder / name / "resumed"
    assert [row["step"] for row in rows(resumed)] == [1, 2, 3, 4, 5, 6]
    assert len({row["lr"] for row in rows(resumed)}) >= 5, "the schedule moves, so that equal rates mean something"
    assert figures(plain) == figures(resumed)
    assert same_bits(weights(plain), weights(resumed))
    for rank in pair:
        found = rank[name]
        assert found["served"][0] == found["served"][1] and len(found["served"][0]) == 12
        for key in ("first_loss", "train_loss_last_10", "heldout_loss", "tokens"):
            assert found["plain"][key] == found["resumed"][key]


@pytest.mark.parametrize("name", CASES)
def test_random_generators_go_on_on_every_rank(pair, name):
    for rank in pair:
        plain, resumed = rank[name]["drawn"]
        assert plain == resumed and len(set(plain)) == 6
    assert pair[0][name]["drawn"][0] != pair[1][name]["drawn"][0]


@pytest.mark.parametrize("name", ["adamw", "epoch ends with step 3", "epoch ends inside step 3, asynchronous"])
def test_a_run_on_two_ranks_goes_on_on_one_also_at_the_end_of_an_epoch(folder, pair, capsys, name):
    cfg, num_tokens = CASES[name]
    shutil.copytree(folder / name / "stopped", folder / f"{name} alone")
    _, served = go(on(1, 1, 2, cfg), single(), folder / f"{name} alone", num_tokens=num_tokens)
    assert "goes on after step 3, sample 6" in (said := capsys.readouterr().err)
    assert "saved on dp 1 x cp 2 on cpu, now dp 1 x cp 1 on cpu: equal within rounding" in said
    assert served == pair[0][name]["served"][0][6:] and len(served) == 6, "the same batches"
    assert_same_within_rounding(folder / f"{name} alone", folder / name / "plain")


@pytest.mark.parametrize("name", ["1 x 4", "2 x 2"])
def test_a_run_on_two_ranks_goes_on_on_four_in_whatever_order(folder, pair, four, name):
    served = sorted({number for rank in four for numbers in rank[name] for number in numbers})
    assert served == list(range(6, 12)), "the same samples, each once"
    assert sorted(number for numbers in pair[0]["adamw"]["served"][0][6:] for number in numbers) == served
    assert_same_within_rounding(folder / name, folder / "adamw" / "plain")


def assert_same_within_rounding(folder: Path, plain: Path) -> None:
    got, want = rows(folder), rows(plain)
    assert [(r["step"], r["lr"], r["tokens"], r["valid_tokens"]) for r in got] == \
        [(r["step"], r["lr"], r["tokens"], r["valid_tokens"]) for r in want]
    assert [r["loss"] for r in got] == pytest.approx([r["loss"] for r in want], rel=2e-5)
    reference = weights(plain)
    for name, weight in weights(folder).items():
        # Adam divides by the root of tiny second moments, which magnifies rounding: a hundredth of the rate, of three steps' 0.03.
        torch.testing.assert_close(weight, reference[name], rtol=0, atol=1e-4)


def test_with_more_samples_in_a_step_each_sample_is_still_served_once(folder, pair, four):
    before = [number for numbers in pair[0]["adamw"]["served"][0][:6] for number in numbers]
    assert before == list(range(6))
    after = sorted({number for rank in four for numbers in rank["4 x 1, twice the samples"][:3] for number in numbers})
    assert after == list(range(6, 6 + 3 * 4))
    assert [row["tokens"] for row in rows(folder / "4 x 1, twice the samples")] == [90, 180, 270, 450, 630, 810]


def test_sharded_weights_and_optimizer_load_into_replicated_ones(folder, four):
    cfg = on(1, 1, 2)
    trainer = Trainer(cfg, single(), text(cfg))
    checkpoints = Checkpoints(cfg, single(), trainer, folder / "sharded")
    assert checkpoints.restore()["step"] == 1
    checkpoints.close()
    assert same_bits(dict(trainer.model.state_dict()), four[0]["sharded"])
    for index, parameter in enumerate(trainer.model.parameters()):
        moment = trainer.optimizer.state[parameter]["exp_avg"]
        torch.testing.assert_close(moment, torch.full_like(parameter, (0.5 + index) * 0.1))


def test_the_run_folders_hold_what_was_asked_for(folder, pair):
    assert whole(folder / "adamw" / "plain") == ["step-00000003", "step-00000006"]
    assert (folder / "adamw" / "stopped" / "stopped.json").exists()
    assert not (folder / "adamw" / "resumed" / "stopped.json").exists()
