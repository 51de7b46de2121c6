"""Training on dp x cp ranks is training on one: loss, gradients, norm, weights, evaluation, schedule. Four real ranks."""
import dataclasses
import functools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from train_ranks import run_ranks, text, tiny, with_train

from ringflash.train import equivalence, trainer
from ringflash.train.trainer import NonFiniteError, Trainer
from ringflash.train.world import connect, single

CPU = torch.device("cpu")
WORLDS = [(4, 1), (2, 2), (1, 4)]
SAMPLES = (4, 8)  # of one optimizer step: one or two micro-batches per dp rank at dp = 4
LENGTHS = (45, 3)  # 3 on a ring of four: one rank has no rows at all


def config(dp, cp, samples, seq_len, **train):
    return tiny(dp=dp, cp=cp, accumulation=samples // dp, seq_len=seq_len, **train)


def step_of(cfg, world) -> dict:
    """One plain SGD step and the evaluation after it."""
    made = Trainer(cfg, world, text(cfg))
    result = made.train_step(0)
    named = list(made.model.named_parameters())
    return {"loss": result.loss, "norm": result.grad_norm, "tokens": result.tokens, "valid": result.valid_tokens,
            "heldout": made.evaluate()[:2], "gradients": {n: p.grad.clone() for n, p in named},
            "weights": {n: p.detach().clone() for n, p in named}}


def with_sinks(cfg):
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, sinks=True, softcap=0.5))


class GivenLosses(Trainer):
    """Losses are given as (valid labels, sum of their losses) for each dp rank, so that the objective is known by hand."""

    def __init__(self, cfg, world, given):
        super().__init__(cfg, world, text(cfg))
        self.given = given

    def shard(self, batch):
        return SimpleNamespace(num_valid=self.given[self.world.dp_rank][0])

    def loss_sum(self, sharded):
        # The last norm's first weight is 1 at the start: its gradient is this rank's loss.
        return self.model.norm.weight[0] * float(self.given[self.world.dp_rank][1])


def ring_body(rank: int) -> dict:
    found = {"one step": {}, "sinks": {}, "rates": {}, "uniform": {}, "report": {}}
    for dp, cp in WORLDS:
        for samples in SAMPLES:
            for seq_len in LENGTHS:
                cfg = config(dp, cp, samples, seq_len, eval_sequences=5)
                world = connect(dp, cp, CPU, timeout_s=60.0)
                found["one step"][dp, cp, samples, seq_len] = step_of(cfg, world)
        for seq_len in LENGTHS:
            cfg = with_sinks(config(dp, cp, 4, seq_len, eval_sequences=5))
            found["sinks"][dp, cp, 4, seq_len] = step_of(cfg, connect(dp, cp, CPU, timeout_s=60.0))
        cfg = with_train(config(dp, cp, 4, 45), steps=4)
        cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, warmup_steps=2))
        made = Trainer(cfg, connect(dp, cp, CPU, timeout_s=60.0), text(cfg))
        found["rates"][dp, cp] = [(r.lr, r.tokens) for r in map(made.train_step, range(4))]
        cfg = config(dp, cp, 4, 45)
        cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=1024))
        made = Trainer(cfg, connect(dp, cp, CPU, timeout_s=60.0), text(cfg))
        torch.nn.init.zeros_(made.model.head.weight)
        found["uniform"][dp, cp] = made.train_step(0).loss
        report = equivalence.run(config(dp, cp, 8, 45), text(cfg), device=CPU, group=dist.group.WORLD)
        found["report"][dp, cp] = (report.ok, report.table())
        report = equivalence.run(with_sinks(config(dp, cp, 4, 45)), text(cfg), device=CPU, group=dist.group.WORLD)
        found["report"][dp, cp, "sinks"] = (report.ok, report.table())
        report = equivalence.run(with_train(config(dp, cp, 8, 45), dtype="bf16"), text(cfg), device=CPU, group=dist.group.WORLD)
        found["report"][dp, cp, "bf16"] = (report.ok, report.table())

    world = connect(4, 1, CPU, timeout_s=60.0)
    given = GivenLosses(tiny(dp=4, cp=1), world, [(1, 8.0), (7, 0.0), (0, 0.0), (0, 0.0)])
    result = given.train_step(0)
    found["by hand"] = (result.loss, result.valid_tokens, float(given.model.norm.weight.grad[0]), result.grad_norm)
    given = GivenLosses(tiny(dp=4, cp=1), world, [(0, 0.0)] * 4)
    found["nothing valid"] = (given.train_step(0).loss, float(given.model.norm.weight.grad.abs().max()))
    broken = GivenLosses(tiny(dp=4, cp=1), world, [(1, 1.0), (1, math.nan), (1, 1.0), (1, 1.0)])
    try:
        broken.train_step(0)
    except NonFiniteError as error:
        found["non-finite"] = (str(error), float(broken.model.norm.weight.detach()[0]))

    # Planted: gradients averaged instead of added, as data-parallel wrappers do.
    right = trainer.sum_gradients

    def mean_gradients(parameters, group):
        right(parameters, group)
        if group is not None:
            for parameter in parameters:
                parameter.grad.div_(4)

    trainer.sum_gradients = mean_gradients
    report = equivalence.run(config(2, 2, 4, 45), text(tiny()), device=CPU, group=dist.group.WORLD)
    found["planted mean"] = [row.name for row in report.rows if not row.ok]
    report = equivalence.run(with_train(config(2, 2, 4, 45), dtype="bf16"), text(tiny()), device=CPU, group=dist.group.WORLD)
    found["planted mean, bf16"] = [row.name for row in report.rows if not row.ok]
    trainer.sum_gradients = right

    # Planted: one rank's own single-rank reference sees other weights than the others' do.
    step = equivalence._step
    calls = []

    def other_reference(made, weights):
        calls.append(made)
        result = step(made, weights)
        if len(calls) > 1 and rank == 3:
            result["gradient of head.weight"] = result["gradient of head.weight"] * 1.01
        return result

    equivalence._step = other_reference
    report = equivalence.run(config(2, 2, 4, 45), text(tiny()), device=CPU, group=dist.group.WORLD)
    found["planted reference"] = [row.name for row in report.rows if not row.ok]
    equivalence._step = step
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(ring_body, 4, tmp_path_factory.mktemp("ring"))


@functools.cache
def one_rank(samples: int, seq_len: int) -> dict:
    return step_of(config(1, 1, samples, seq_len, eval_sequences=5), single())


@functools.cache
def one_rank_with_sinks(samples: int, seq_len: int) -> dict:
    return step_of(with_sinks(config(1, 1, samples, seq_len, eval_sequences=5)), single())


def assert_same_step(got: dict, want: dict) -> None:
    assert (got["tokens"], got["valid"]) == (want["tokens"], want["valid"])
    assert got["loss"] == pytest.approx(want["loss"], rel=2e-6)
    assert got["norm"] == pytest.approx(want["norm"], rel=1e-5)
    for name, reference in want["gradients"].items():
        atol = 1e-5 * float(reference.abs().max()) + 1e-12
        torch.testing.assert_close(got["gradients"][name], reference, rtol=0, atol=atol)
        torch.testing.assert_close(got["weights"][name], want["weights"][name], rtol=0, atol=1e-6)
    assert max(float((got["weights"][n] - w).abs().max()) for n, w in want["weights"].items()) < 1e-6


CASES = [(dp, cp, samples, seq_len) for dp, cp in WORLDS for samples in SAMPLES for seq_len in LENGTHS]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_sgd_step_is_that_of_one_rank(ranks, case):
    for rank in ranks:
        assert_same_step(rank["one step"][case], one_rank(*case[2:]))


@pytest.mark.parametrize("case", [case for case in CASES if case[2] == 4], ids=str)
def test_one_sgd_step_of_a_model_with_sinks_and_softcap_is_that_of_one_rank(ranks, case):
    want = one_rank_with_sinks(*case[2:])
    for rank in ranks:
        assert_same_step(rank["sinks"][case], want)
    for layer in range(2):
        # every head's sink is moved, and away from its start at 0
        assert want["gradients"][f"layers.{layer}.attention.sinks"].shape == (4,)
        assert bool((want["weights"][f"layers.{layer}.attention.sinks"] != 0).all())
    assert want["loss"] != one_rank(*case[2:])["loss"]


def test_the_step_moves_every_weight_so_that_equality_means_something():
    before = {n: p.detach().clone() for n, p in Trainer(tiny(), single(), text(tiny())).model.named_parameters()}
    after = one_rank(4, 45)["weights"]
    assert all(float((after[name] - weight).abs().max()) > 1e-5 for name, weight in before.items())


def test_all_ranks_end_with_the_same_bits(ranks):
    for case in CASES:
        first = ranks[0]["one step"][case]["weights"]
        for rank in ranks[1:]:
            assert all(torch.equal(rank["one step"][case]["weights"][name], weight) for name, weight in first.items())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_evaluation_is_that_of_one_rank_also_when_dp_does_not_divide_its_sequences(ranks, case):
    loss, valid = one_rank(*case[2:])["heldout"]
    for rank in ranks:
        assert rank["one step"][case]["heldout"] == (pytest.approx(loss, rel=5e-6), valid)


def test_one_label_with_loss_8_and_seven_with_loss_0_make_an_objective_of_1(ranks):
    for rank in ranks:
        loss, valid, gradient, norm = rank["by hand"]
        assert (loss, valid) == (1.0, 8)
        assert gradient == 1.0 and norm == pytest.approx(1.0)


def test_a_step_without_any_valid_label_has_loss_0_and_gradient_0(ranks):
    assert all(rank["nothing valid"] == (0.0, 0.0) for rank in ranks)


def test_uniform_logits_over_1024_classes_cost_their_logarithm(ranks):
    for rank in ranks:
        assert list(rank["uniform"].values()) == [pytest.approx(6.931472, abs=1e-6)] * len(WORLDS)


def test_learning_rate_and_tokens_seen_depend_on_dp_alone(ranks):
    for rank in ranks:
        assert rank["rates"][4, 1] == rank["rates"][2, 2] == rank["rates"][1, 4]
        assert [rate for rate, _ in rank["rates"][4, 1]] == pytest.approx([0.25, 0.5, 0.5, 0.05])
        assert {tokens for _, tokens in rank["rates"][4, 1]} == {4 * 45}


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_the_weights_change(ranks):
    messages = {rank["non-finite"] for rank in ranks}
    assert len(messages) == 1
    message, weight = messages.pop()
    assert message.startswith("step 1: the loss is nan") and weight == 1.0


def test_the_equivalence_report_finds_every_world_within_budget(ranks):
    for rank in ranks:
        for ok, table in rank["report"].values():
            assert ok, table
            assert "gradient of layers.1.attention.wk.weight" in table


def test_the_equivalence_report_catches_a_rank_whose_reference_is_another(ranks):
    # Every rank says so, not only the odd one.
    assert all(rank["planted reference"] == ["gradient of head.weight"] for rank in ranks)


def test_the_equivalence_report_catches_gradients_that_are_averaged(ranks):
    for wrong in (ranks[0]["planted mean"], ranks[0]["planted mean, bf16"]):
        assert "gradient norm" in wrong and "loss" not in wrong
        assert sum(name.startswith("gradient of") for name in wrong) == sum(name.startswith("weight") for name in wrong) == 21
