"""Each cross-field rule: the dotted key with its value, the rule with its numbers, the nearest valid values."""
import subprocess
import sys

import pytest

from ringflash.config import Config, parallel_degrees, validate


def changed(**values) -> Config:
    """A default Config with dotted keys replaced: model__dim=3 is model.dim=3."""
    cfg = Config()
    for name, value in values.items():
        group, key = name.split("__")
        setattr(getattr(cfg, group), key, value)
    return cfg


RULES = [
    (dict(model__num_kv_heads=3), 1, "model.num_kv_heads=3: must divide model.num_heads=4; nearest: 2 or 4"),
    (dict(model__dim=0), 1, "model.dim=0: must be at least 1; nearest: 1"),
    (dict(model__dim=130), 1, "model.num_heads=4: must divide model.dim=130 while model.head_dim is null; nearest: 2 or 5"),
    (dict(model__head_dim=33), 1, "model.head_dim=33: must be even (RoPE turns pairs) and at most 256; nearest: 32 or 34"),
    (dict(model__head_dim=300), 1, "model.head_dim=300: must be even (RoPE turns pairs) and at most 256; nearest: 256"),
    (dict(model__dim=1028), 1, "model.head_dim=257 (model.dim / model.num_heads): must be even"),
    (dict(model__rope_base=float("nan")), 1, "model.rope_base=nan: must be a finite number above 0"),
    (dict(model__softcap=-1.0), 1, "model.softcap=-1.0: must be 0 (none) or from 1e-30 to 1e+30; nearest: 0"),
    (dict(model__softcap=float("inf")), 1, "model.softcap=inf: must be 0 (none) or from 1e-30 to 1e+30; nearest: 1e+30"),
    (dict(model__vocab_size=256), 1, "model.vocab_size=256: the tokens are 256 bytes and the start of a document; nearest: 257"),
    (dict(parallel__shard=3), 4, "parallel.shard=3: must divide dp * cp = 4, or be -1 for all of them; nearest: 2 or 4"),
    (dict(parallel__shard=0), 4, "parallel.shard=0: must divide dp * cp = 4, or be -1 for all of them; nearest: 1"),
    (dict(parallel__shard=8), 4, "parallel.shard=8: must divide dp * cp = 4, or be -1 for all of them; nearest: 4"),
    (dict(parallel__reduce="first"), 4, "parallel.reduce=first: valid: last, each"),
    (dict(parallel__reduce="each", train__accumulation=2), 4,
     "parallel.reduce=each: weights are not sharded, parallel.shard=1; nearest: last"),
    (dict(parallel__reduce="each", parallel__shard=-1), 4,
     "parallel.reduce=each: a step has one micro-batch, train.accumulation=1; nearest: last"),
    (dict(data__seq_len=1), 1, "data.seq_len=1: must be at least 2; nearest: 2"),
    (dict(data__batch_size=4, train__accumulation=2), 1, "data.batch_size=4: packed documents (data.document_mask=true) need "
     "batch_size 1, since all rows of a batch share one mask; nearest: 1, with train.accumulation=8"),
    (dict(data__positions="local"), 1, "data.positions=local: valid: global, document"),
    (dict(data__positions="document", data__document_mask=False), 1, "data.positions=document: data.document_mask=false, so "
     "tokens of several documents would see each other at the same positions; nearest: global, or data.document_mask=true"),
    (dict(model__z_loss=-1.0), 1, "model.z_loss=-1.0: must be at least 0; nearest: 0"),
    (dict(data__heldout_fraction=0.0), 1, "data.heldout_fraction=0.0: a share of the documents, above 0 and below 1"),
    (dict(data__path=""), 1, "data.path='': names no file"),
    (dict(data__max_bytes=0), 1, "data.max_bytes=0: must be at least 1, or null"),
    (dict(attention__layout="zig-zag"), 1, "attention.layout=zig-zag: valid: contiguous, zigzag, striped"),
    (dict(attention__layout="spiral"), 1, "attention.layout=spiral: valid: contiguous, zigzag, striped, balanced, auto"),
    (dict(attention__kernel="flash"), 1, "attention.kernel=flash: valid: auto, hopper, triton, cpu, reference"),
    (dict(attention__routing="star"), 1, "attention.routing=star: valid: auto, ring, direct, allgather"),
    (dict(attention__rotate="kq"), 1, "attention.rotate=kq: valid: auto, kv, q"),
    (dict(attention__exchange="mpi"), 1, "attention.exchange=mpi: valid: auto, copy, nccl, gloo"),
    (dict(attention__exchange="copy", run__device="cpu"), 1, "attention.exchange=copy: run.device=cpu has no copy engines"),
    (dict(attention__exchange="nccl", run__device="cpu"), 1, "attention.exchange=nccl: run.device=cpu has no NCCL"),
    (dict(attention__window_size=[4]), 1, "attention.window_size=[4]: two numbers, [left, right]; e.g. [4,0]"),
    (dict(attention__window_size=[-2, 0]), 1, "attention.window_size=[-2, 0]: each is at least 0, or -1 for "
     "unlimited; nearest: [-1,0]"),
    (dict(attention__window_size=[8, 3]), 1, "attention.window_size=[8, 3]: attention is causal, so "
     "right is 0 or -1; nearest: [8,0]"),
    (dict(attention__layers=["windows"]), 1, "attention.layers=windows: valid: global, window, chunk"),
    (dict(attention__layers=["window", "global", "global"], attention__window_size=[7, 0]), 1, "attention.layers=[window,global,"
     "global]: 3 kinds, of which model.num_layers=2 layers take the first 2; nearest: [window,global], or model.num_layers=3"),
    (dict(attention__layers=["window", "global"]), 1, "attention.layers=[window,global]: a window layer needs a window, "
     "attention.window_size has left=-1; nearest: attention.window_size=[1023,0], or global layers"),
    (dict(attention__layers=["global"], attention__window_size=[7, 0]), 1, "attention.window_size=[7, 0]: no layer of "
     "attention.layers=[global] takes it; nearest: [-1,-1], or a window layer"),
    (dict(attention__layers=["chunk", "global"]), 1, "attention.layers=[chunk,global]: a chunk layer needs attention.chunk_size"),
    (dict(attention__chunk_size=64), 1, "attention.chunk_size=64: no layer of attention.layers=[] takes it; nearest: null, or "
     "attention.layers=[chunk]"),
    (dict(attention__chunk_size=0, attention__layers=["chunk"]), 1, "attention.chunk_size=0: must be at least 1, or null; "
     "nearest: 1"),
    (dict(attention__first_tokens=-1), 1, "attention.first_tokens=-1: must be at least 0; nearest: 0"),
    (dict(attention__first_tokens=4), 1, "attention.first_tokens=4: kept beside a window, attention.window_size has left=-1; "
     "nearest: 0, or attention.window_size=[1023,0]"),
    (dict(parallel__dp=3, parallel__cp=-1), 8, "parallel.dp=3: must divide the world size 8 to "
     "leave cp whole ranks; nearest: 2 or 4"),
    (dict(parallel__dp=-1, parallel__cp=5), 8, "parallel.cp=5: must divide the world size 8 to "
     "leave dp whole ranks; nearest: 4 or 8"),
    (dict(parallel__dp=2, parallel__cp=3), 8, "parallel.dp=2, parallel.cp=3: dp * cp must be the world size, 2 * 3 = 6 is not 8; "
     "nearest: parallel.dp=2 parallel.cp=4 or parallel.dp=4 parallel.cp=2 (or start 6 ranks)"),
    (dict(parallel__dp=-1, parallel__cp=-1), 8, "parallel.dp=-1, parallel.cp=-1: only one of them can be what is left"),
    (dict(parallel__cp=0), 8, "parallel.cp=0: a degree is at least 1, or -1 for what is left of 8 ranks"),
    (dict(parallel__ulysses=3), 8, "parallel.ulysses=3: must divide the 8 ranks of a sequence (parallel.cp) and model.num_heads=4; "
     "nearest: 2 or 4"),
    (dict(parallel__ulysses=8), 8, "parallel.ulysses=8: must divide the 8 ranks of a sequence (parallel.cp) and model.num_heads=4; "
     "nearest: 4"),
    (dict(parallel__ulysses=4, parallel__dp=4), 8, "parallel.ulysses=4: must divide the 2 ranks of a sequence (parallel.cp)"),
    (dict(parallel__ulysses=0), 8, "parallel.ulysses=0: must divide the 8 ranks"),
    (dict(parallel__nproc=0), 8, "parallel.nproc=0: workers of a plain start, at least 1"),
    (dict(run__dir=""), 1, "run.dir='': names no folder; nearest: null"),
    (dict(parallel__timeout_s=1e30), 1, "parallel.timeout_s=1e+30: must be at most 10000000; nearest: 10000000"),
    (dict(checkpoint__timeout_s=1e30), 1, "checkpoint.timeout_s=1e+30: must be at most 10000000"),
    (dict(train__profile=1, train__profile_ranks=[]), 1, "train.profile=1: train.profile_ranks=[] names no rank"),
    (dict(parallel__timeout_s=0.0), 1, "parallel.timeout_s=0.0: must be a finite number above 0"),
    (dict(optim__name="adam"), 1, "optim.name=adam: valid: adamw, sgd"),
    (dict(optim__lr=-1.0), 1, "optim.lr=-1.0: must be a finite number above 0"),
    (dict(optim__beta2=1.0), 1, "optim.beta2=1.0: must lie in [0, 1)"),
    (dict(optim__momentum=0.9), 1, "optim.momentum=0.9: taken by optim.name=sgd only; adamw has optim.beta1=0.9"),
    (dict(optim__warmup_steps=200), 1, "optim.warmup_steps=200: must not exceed train.steps=100; nearest: 100"),
    (dict(optim__min_lr_ratio=2.0), 1, "optim.min_lr_ratio=2.0: must lie in [0, 1]"),
    (dict(optim__grad_clip=-1.0), 1, "optim.grad_clip=-1.0: must be at least 0; nearest: 0"),
    (dict(train__steps=0), 1, "train.steps=0: must be at least 1; nearest: 1"),
    (dict(train__accumulation=0), 1, "train.accumulation=0: must be at least 1; nearest: 1"),
    (dict(train__dtype="fp16"), 1, "train.dtype=fp16: is not built yet; valid: auto, fp32, bf16"),
    (dict(train__activations="full"), 1, "train.activations=full: valid: none, block, block_save_attention, offload, auto"),
    (dict(train__residual_dtype="fp16"), 1, "train.residual_dtype=fp16: valid: fp32, bf16"),
    (dict(train__residual_dtype="bf16", train__dtype="fp32"), 1, "train.residual_dtype=bf16: activations are fp32 with "
     "train.dtype=fp32; nearest: fp32, or train.dtype=bf16"),
    (dict(train__tile_rows=-1), 1, "train.tile_rows=-1: must be at least 0; nearest: 0 (no tiles)"),
    (dict(train__loss="fused"), 1, "train.loss=fused: valid: chunked, liger"),
    (dict(optim__name="sgd", optim__offload=True), 1, "optim.offload=true: moves the moments of optim.name=adamw, optim.name=sgd"),
    (dict(checkpoint__every=-1), 1, "checkpoint.every=-1: must be at least 0; nearest: 0"),
    (dict(checkpoint__keep=0), 1, "checkpoint.keep=0: must be at least 1; nearest: 1"),
    (dict(checkpoint__on_error="ignore"), 1, "checkpoint.on_error=ignore: valid: warn, stop"),
    (dict(checkpoint__grace_s=0.0), 1, "checkpoint.grace_s=0.0: must be a finite number above 0"),
    (dict(checkpoint__timeout_s=float("inf")), 1, "checkpoint.timeout_s=inf: must be a finite number above 0"),
    (dict(checkpoint__resume=""), 1, "checkpoint.resume='': valid: auto, none, or a folder with checkpoints"),
    (dict(checkpoint__restarts=2, checkpoint__every=0), 1, "checkpoint.restarts=2: with checkpoint.every=0 each would begin at "
     "step 1 again; nearest: 0"),
    (dict(checkpoint__restarts=2, checkpoint__resume="none"), 1, "checkpoint.restarts=2: with checkpoint.resume=none each would"),
    (dict(run__device="tpu"), 1, "run.device=tpu: valid: auto, cpu, cuda"),
    (dict(run__name="a/b"), 1, "run.name='a/b': becomes the name of a folder"),
]


@pytest.mark.parametrize(("values", "world_size", "message"), RULES, ids=[str(r[0]) for r in RULES])
def test_a_broken_rule_names_key_value_rule_and_nearest_values(values, world_size, message):
    with pytest.raises(ValueError) as caught:
        validate(changed(**values), world_size)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value), "one broken rule is one line"


def test_every_broken_rule_is_told_at_once():
    with pytest.raises(ValueError) as caught:
        validate(changed(model__num_kv_heads=3, train__steps=-1, parallel__cp=7), 4)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "parallel.dp=1, parallel.cp=7", "model.num_kv_heads=3", "train.steps=-1"]


@pytest.mark.parametrize(("dp", "cp", "world_size", "expected"), [
    (1, -1, 8, (1, 8)), (-1, 1, 8, (8, 1)), (2, -1, 8, (2, 4)), (-1, 2, 8, (4, 2)), (2, 3, 6, (2, 3)), (1, -1, 1, (1, 1)),
])
def test_minus_one_is_what_is_left(dp, cp, world_size, expected):
    assert parallel_degrees(changed(parallel__dp=dp, parallel__cp=cp), world_size) == expected
    assert validate(changed(parallel__dp=dp, parallel__cp=cp), world_size) == expected


def test_any_length_is_valid_on_any_ring():
    # No padding: shards may differ by a row, or be empty.
    for seq_len in (2, 3, 7, 1021):
        assert validate(changed(data__seq_len=seq_len), 8) == (1, 8)


def test_configuration_needs_neither_torch_nor_hydra():
    code = "import sys, ringflash.config; assert not {'torch', 'numpy', 'hydra', 'omegaconf'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=__file__.rsplit("/tests/", 1)[0]).returncode == 0


def test_no_ranks_at_all_is_one_problem():
    with pytest.raises(ValueError) as refused:
        validate(changed(parallel__nproc=0), 0)
    assert str(refused.value).splitlines() == ["parallel.nproc=0: workers of a plain start, at least 1 (or null: one per GPU)"]
