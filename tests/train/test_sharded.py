"""Training with sharded weights is training on one rank: weights, gradients, norm after plain SGD; and what is whole where."""
import copy
import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from train_ranks import run_ranks, text, tiny

from ringflash.config import OptimConfig
from ringflash.degrees import shard_size
from ringflash.model.transformer import RMSNorm
from ringflash.train import equivalence
from ringflash.train.sharded import full_state_dict, load_full_state_dict, reshard, whole
from ringflash.train.trainer import Trainer
from ringflash.train.world import World, connect, single

CPU = torch.device("cpu")
WORLDS = [(4, 1), (2, 2), (1, 4)]
SHARDS = (-1, 2)  # all ranks share one copy; two copies, each on two neighbours
# name -> what differs from the plain model. Tied: one weight in two modules.
MODELS = {"untied": {}, "tied, sinks": {"tie_embeddings": True, "sinks": True, "qk_norm": True}}
SAMPLES = (4, 8)  # of one optimizer step: at dp = 4 one or two micro-batches per rank
# What the backward computes again: nothing, a layer, a layer but its attention and the rest of it by tiles of rows.
KEPT = {"all": {}, "block": {"activations": "block"}, "attention, tiles": {"activations": "block_save_attention", "tile_rows": 8}}
# A part of all combinations, in which every choice meets every choice of every other option.
CASES = [(WORLDS[row], SHARDS[a], SAMPLES[b], list(MODELS)[(row + a + b) % 2], list(KEPT)[(row + b * (1 + a)) % 3])
         for row, a, b in itertools.product(range(3), range(2), range(2))]
ADAMW = OptimConfig(name="adamw", lr=0.01, warmup_steps=0, weight_decay=0.5, grad_clip=0.05)


def config(world=(1, 1), shard=1, samples=4, model="untied", keep="all", *, seq_len=45, dtype="fp32", optim=equivalence._SGD,
           reduce="last", deterministic=False, ulysses=1):
    dp, cp = world
    cfg = tiny(dp=dp, cp=cp, accumulation=samples // dp, seq_len=seq_len, **KEPT[keep])
    return dataclasses.replace(
        cfg, model=dataclasses.replace(cfg.model, **MODELS[model]), optim=optim,
        parallel=dataclasses.replace(cfg.parallel, shard=shard, reduce=reduce, ulysses=ulysses),
        attention=dataclasses.replace(cfg.attention, deterministic=deterministic),
        train=dataclasses.replace(cfg.train, dtype=dtype, eval_sequences=5))


def data_of(cfg, *, no_labels=False):
    """Documents of 1 to 60 tokens. no_labels: of every second sample no token has a successor in its document."""
    data = text(cfg)
    if no_labels:
        cut = data.train.cu_seqlens
        data.train.cu_seqlens = lambda n: np.arange(cfg.data.seq_len + 1, dtype=np.int32) if n % 2 else cut(n)
    return data


@functools.cache
def world_of(dp: int, cp: int, shard: int, ulysses: int) -> World:
    return single() if dp * cp == 1 else connect(dp, cp, CPU, timeout_s=60.0, shard=shard, ulysses=ulysses)


def trainer_of(cfg, **options) -> Trainer:
    dp, cp = cfg.parallel.dp, cfg.parallel.cp
    return Trainer(cfg, world_of(dp, cp, shard_size(cfg.parallel, dp * cp), cfg.parallel.ulysses), data_of(cfg, **options))


def steps(cfg, count, **options) -> dict:
    """Everything whole after `count` steps, and the norm of each."""
    made = trainer_of(cfg, **options)
    norms = [made.train_step(step).grad_norm for step in range(count)]
    heldout = made.evaluate()
    return {"norms": norms, "heldout": (heldout.loss, heldout.tokens),
            "weights": {n: whole(p.detach()).clone() for n, p in made.model.named_parameters()}}


@functools.cache
def one_rank(samples, model, keep="all", seq_len=45, dtype="fp32", no_labels=False):
    cfg = config((1, 1), 1, samples, model, keep, seq_len=seq_len, dtype=dtype)
    return equivalence._step(trainer_of(cfg, no_labels=no_labels), None)


def wrong(got, *reference, dtype="fp32", **options) -> list[str]:
    want = one_rank(*reference, **options)
    own = want if dtype == "fp32" else one_rank(*reference, dtype=dtype, **options)
    rows = equivalence.compare(got, own, want, single(), {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    return [f"{row.name}: {row.error:.2e} of {row.budget:.2e}" for row in rows if not row.ok]


def count_reductions(body) -> int:
    """Calls of the collective that fully_shard reduces gradients with; its name is another in every other torch."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    original, calls = getattr(dist, name), []
    setattr(dist, name, lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    try:
        body()
    finally:
        setattr(dist, name, original)
    return len(calls)


def step_and_dtypes(cfg) -> dict:
    """A step, and the dtypes inside its forward, by name."""
    made, seen = trainer_of(cfg), {}
    block = made.model.blocks[1]

    def note(module, inputs, *_):
        seen["wq"], seen["norm"] = module.attention.wq.weight.dtype, module.ffn_norm.weight.dtype
        seen["x"], seen["cos"] = inputs[0].dtype, inputs[1].dtype

    block.attention_norm.register_forward_pre_hook(lambda *_: note(block, block_inputs[0]))
    block_inputs = []
    block.register_forward_pre_hook(lambda module, inputs: block_inputs.append(inputs))
    made.model.embedding.register_forward_hook(lambda module, *_: seen.update(embedding=module.weight.dtype))
    made.model.head.register_forward_hook(lambda module, *_: seen.update(head=module.weight.dtype))
    found = equivalence._step(made, None)
    seen["masters"] = {p.dtype for p in made.parameters} | {p.grad.dtype for p in made.parameters}
    return found | {"seen": seen}


def body(rank: int) -> dict:
    found = {"step": {case: equivalence._step(trainer_of(config(*case)), None) for case in CASES}}
    found["no rows"] = {shard: equivalence._step(trainer_of(config((1, 4), shard, seq_len=3)), None) for shard in SHARDS}
    found["no labels"] = {world: equivalence._step(trainer_of(config(world, -1, 4), no_labels=True), None) for world in WORLDS}
    found["ulysses"] = equivalence._step(trainer_of(config((1, 4), -1, ulysses=2)), None)
    found["each"] = equivalence._step(trainer_of(config((2, 2), 2, 8, reduce="each")), None)
    found["bf16"] = {shard: step_and_dtypes(config((2, 2), shard, 4, "tied, sinks", dtype="bf16")) for shard in (1, *SHARDS)}

    cfg = config((4, 1), -1)
    made = trainer_of(cfg)
    found["start"] = copy.deepcopy(full_state_dict(made.model))
    found["bytes"] = {n: (p.numel(), whole(p.detach()).shape.numel(), p.to_local().numel() if p.ndim > 1 else p.numel())
                      for n, p in made.model.named_parameters()}
    made.evaluate()
    found["after evaluation"] = all(type(p) is type(q) for p, q in zip(made.model.parameters(), made.parameters))
    found["decayed"] = [sorted({p.ndim for p in group["params"]}) for group in made.optimizer.param_groups]
    twice = {name: weight * 2 for name, weight in one_rank(4, "untied").items() if name.startswith("weight ")}
    load_full_state_dict(made.model, {name.removeprefix("weight "): weight.float() for name, weight in twice.items()})
    found["loaded"] = {f"weight {n}": whole(p.detach()) for n, p in made.model.named_parameters()}
    try:
        load_full_state_dict(made.model, {"head.weight": torch.zeros(1)})
    except RuntimeError as error:
        found["other model"] = str(error)

    found["reductions"] = {}
    for reduce in ("last", "each"):
        made = trainer_of(config((2, 2), -1, 4, reduce=reduce))
        found["reductions"][reduce] = count_reductions(lambda: made.train_step(0))

    found["adamw"] = {shard: steps(config((2, 2), shard, 4, optim=ADAMW), 2) for shard in (1, *SHARDS)}
    offloaded = dataclasses.replace(ADAMW, offload=True)
    found["adamw"]["moments on the host"] = steps(config((2, 2), -1, 4, optim=offloaded), 2)
    again = [steps(config((2, 2), -1, 4, optim=ADAMW, deterministic=True), 1) for _ in range(2)]
    found["again"] = again[0]["norms"] == again[1]["norms"] and all(
        torch.equal(again[0]["weights"][name], weight) for name, weight in again[1]["weights"].items())

    # Planted: a mean over the ranks, as fully_shard does by itself.
    made = trainer_of(config((2, 2), -1))
    for module in made.model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(4.0)
    found["planted mean"] = equivalence._step(made, None)
    # Planted: the first of four micro-batches counts for nothing.
    made = trainer_of(config((2, 2), -1, 8))
    loss_sum, calls = made.loss_sum, []

    def forgetful(sharded):
        calls.append(1)
        return loss_sum(sharded) * (0.0 if len(calls) == 1 else 1.0)

    made.loss_sum = forgetful
    found["planted loss of a micro-batch"] = equivalence._step(made, None)
    return found if rank in (0, 3) else {name: found[name] for name in ("start", "bytes", "adamw", "again")}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(body, 4, tmp_path_factory.mktemp("sharded"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_sgd_step_with_sharded_weights_is_that_of_one_rank(ranks, case):
    for rank in (ranks[0], ranks[3]):
        assert not wrong(rank["step"][case], *case[2:])


def test_ranks_without_rows_take_part(ranks):
    for shard in SHARDS:
        assert not wrong(ranks[3]["no rows"][shard], 4, "untied", seq_len=3)


def test_ranks_without_labels_take_part_and_count_for_nothing(ranks):
    for world in WORLDS:
        assert not wrong(ranks[3]["no labels"][world], 4, "untied", no_labels=True)


def test_reducing_in_each_micro_batch_gives_the_same_step(ranks):
    assert not wrong(ranks[0]["each"], 8, "untied")


def test_gradients_are_reduced_once_a_step_unless_each_micro_batch_is_asked_for(ranks):
    # Two layers, the head, the embedding; two micro-batches.
    assert ranks[0]["reductions"] == {"last": 4, "each": 8}


def test_a_mean_over_ranks_is_found(ranks):
    found = wrong(ranks[0]["planted mean"], 4, "untied")
    assert any(line.startswith("gradient norm") for line in found)
    assert sum(line.startswith("gradient of") for line in found) == sum(line.startswith("weight") for line in found) >= 15


def test_a_forgotten_micro_batch_is_found(ranks):
    assert any(line.startswith("gradient of layers.0") for line in wrong(ranks[0]["planted loss of a micro-batch"], 8, "untied"))


def test_bf16_layers_compute_what_replicated_ones_do_over_fp32_masters(ranks):
    replicated = ranks[0]["bf16"][1]
    for shard in SHARDS:
        for rank in (ranks[0], ranks[3]):
            got = dict(rank["bf16"][shard])
            seen = got.pop("seen")
            assert not wrong(got, 4, "tied, sinks", dtype="bf16")
            # The same forward to the bit: rounding of weights is where autocast has it.
            assert torch.equal(got["loss"], replicated["loss"])
            assert seen["wq"] == torch.bfloat16 and seen["masters"] == {torch.float32}
            for name in ("norm", "embedding", "head", "x", "cos"):
                assert seen[name] == torch.float32, name
    assert replicated["seen"]["wq"] == torch.float32


def test_weights_at_the_start_are_those_of_one_rank_to_the_bit(ranks):
    want = trainer_of(config()).model.state_dict()
    assert ranks[0]["start"].keys() == want.keys()
    assert all(torch.equal(ranks[0]["start"][name], weight) for name, weight in want.items())
    assert ranks[3]["start"] is None, "whole weights are rank 0's alone"


def test_a_rank_has_its_share_of_each_matrix_and_no_more(ranks):
    for name, (numel, full, _) in ranks[0]["bytes"].items():
        locals_ = [rank["bytes"][name][2] for rank in ranks]
        assert numel == full
        if name.endswith("norm.weight"):
            assert locals_ == [full] * 4
        else:
            rows = trainer_of(config()).model.get_parameter(name).shape[0]
            assert sum(locals_) == full and max(locals_) == -(-rows // 4) * (full // rows)


def test_an_evaluation_leaves_nothing_gathered(ranks):
    assert ranks[0]["after evaluation"]


def test_weight_decay_is_for_what_has_two_dims_whatever_its_shard_looks_like(ranks):
    assert ranks[0]["decayed"] == [[2], [1]]


def test_whole_weights_load_into_shards(ranks):
    want = one_rank(4, "untied")
    assert all(torch.equal(loaded, 2 * want[name].float()) for name, loaded in ranks[3]["loaded"].items())
    assert ranks[0]["other model"].startswith("the weights are of another model: embedding.weight, ")


def test_adamw_with_clipping_and_decay_is_that_of_replicated_weights(ranks):
    want = ranks[0]["adamw"][1]
    for shard in (*SHARDS, "moments on the host"):
        for rank in ranks:
            got = rank["adamw"][shard]
            assert got["norms"] == ranks[0]["adamw"][shard]["norms"], "one norm on all ranks, to the bit"
            assert got["norms"] == pytest.approx(want["norms"], rel=1e-5) and min(got["norms"]) > ADAMW.grad_clip
            assert got["heldout"] == (pytest.approx(want["heldout"][0], rel=1e-5), want["heldout"][1])
            for name, weight in want["weights"].items():
                assert torch.equal(got["weights"][name], ranks[0]["adamw"][shard]["weights"][name])
                # Adam divides by the root of tiny second moments: a hundredth of two steps' 0.02.
                torch.testing.assert_close(got["weights"][name], weight, rtol=0, atol=2e-4)


def test_moments_of_shards_on_the_host_change_no_bit(ranks):
    for rank in ranks:
        got, want = rank["adamw"]["moments on the host"], rank["adamw"][-1]
        assert got["norms"] == want["norms"]
        assert all(torch.equal(got["weights"][name], weight) for name, weight in want["weights"].items())


def test_heads_apart_and_weights_in_shards_go_together(ranks):
    assert not wrong(ranks[3]["ulysses"], 4, "untied")


def test_a_deterministic_step_has_the_same_bits_twice(ranks):
    assert all(rank["again"] for rank in ranks)


def test_one_rank_needs_no_shards():
    made = trainer_of(config(shard=-1))
    reshard(made.model)
    assert all(type(p) is torch.nn.Parameter for p in made.parameters)
    assert isinstance(made.model.norm, RMSNorm) and full_state_dict(made.model).keys() == made.model.state_dict().keys()
