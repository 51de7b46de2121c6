"""A mistake of any kind on one rank, of a wrong type or in its data too, is told to all: nobody is left waiting."""
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from torch.autograd import forward_ad

from ringflash import Layout, Mask, ring_attention, shard_batch, simulate, unshard
from ringflash.agreement import _PAYLOAD_BYTES, _state_problem
from ringflash.ring import loop
from ringflash.tests.support.distributed import check_ranks
from ringflash.tests.support.ring_cases import make_inputs

_TOKENS = torch.arange(16)[None]


class _BrokenSource:
    shape = (1, 16)

    def __getitem__(self, key):
        raise OSError("the disk is gone")


class _Unprintable:
    shape = (1, 16)

    def __getitem__(self, key):
        class Unprintable(ValueError):
            def __str__(self):
                raise ValueError
        raise Unprintable


class _NoText:
    def __str__(self):
        raise ZeroDivisionError("no text")


def _one_rank_errs(rank, world_size):
    odd, group = rank == 1, dist.group.WORLD
    base = make_inputs(4)

    def attend(**wrong):
        return ring_attention(base.q, base.k, base.v, group=group, **(wrong if odd else {}))

    def batch(good=_TOKENS, wrong=_TOKENS, **options):
        return shard_batch({"tokens": wrong if odd else good}, group=group, **(options if odd else {}))

    def attend_dual():
        with forward_ad.dual_level():
            q = forward_ad.make_dual(base.q, base.q) if odd else base.q
            return ring_attention(q, base.k, base.v, group=group)

    def attend_agreed():
        # The first call on a group compares also under a token, so a refusal before it has to be told too.
        fresh = dist.new_group()
        layout = Layout("zigzag", 4, world_size, group=fresh)
        return ring_attention(*(x[:, :2] for x in (base.q, base.k, base.v)), layout=layout, group=fresh,
                              rotate="left" if odd else "auto")

    def whole(good=torch.ones(1, 8), wrong=None, layout="zigzag", **options):
        return unshard(good if wrong is None or not odd else wrong, layout if odd else "zigzag", group=group,
                       **(options if odd else {}))

    meta = torch.zeros(1, 8, 2, 8, device="meta")
    cases = {
        "softmax_scale=[1]": lambda: attend(softmax_scale=[1]),
        "softmax_scale=nan": lambda: attend(softmax_scale=float("nan")),
        "softcap=[1]": lambda: attend(softcap=[1]),
        "softcap=nan": lambda: attend(softcap=float("nan")),
        "sinks: must be a torch.Tensor": lambda: attend(sinks=[0.0] * 4),
        "sinks differs": lambda: attend(sinks=torch.zeros(4)),
        "sinks: on meta": lambda: attend(sinks=torch.zeros(4, device="meta")),
        "kernel=None": lambda: attend(kernel=None),
        "deterministic='yes'": lambda: attend(deterministic="yes"),
        "window_size=": lambda: attend(window_size=(2**63, 0)),
        "must be ints": lambda: attend(cu_seqlens=torch.tensor([0.0, 8.0]).bfloat16()),
        "layout kind": lambda: attend(layout="\u0416" * 4000),
        "sparse": lambda: ring_attention(*(x.detach().to_sparse() if odd else x for x in (base.q, base.k, base.v)), group=group),
        "masks=3": lambda: Layout("zigzag", 8, world_size, 3 if odd else None, group=group),
        "bytes, more than": lambda: Layout("zigzag", 8, world_size, [Mask(window_size=(i, 0)) for i in range(200 if odd else 2)],
                                           group=group),
        "OSError: the disk is gone": lambda: batch(wrong=_BrokenSource()),
        "must be integers": lambda: batch(wrong=_TOKENS.float()),
        "a mapping": lambda: shard_batch(None if odd else {"tokens": _TOKENS}, group=group),
        "together with group": lambda: batch(rank=1),
        "nowhere": lambda: batch(device="nowhere"),
        "device=cuda:99": lambda: batch(device="cuda:99"),
        "device=3.5": lambda: batch(device=3.5),
        "layout=3: must be": lambda: shard_batch({"tokens": _TOKENS}, 3 if odd else "zigzag", group=group),
        "layout is a mesh": lambda: shard_batch({"tokens": _TOKENS}, group if odd else "zigzag", group=group),
        "ZeroDivisionError: no text": lambda: Layout("zigzag", 8, world_size, group=group, agree=_NoText() if odd else 1),
        "(an error that cannot be printed)": lambda: batch(wrong=_Unprintable()),
        "an odd half": lambda: Layout("zigzag", 8, world_size, group=group, agree="an odd half \ud800" * 20 if odd else 1),
        "forward-mode AD": attend_dual,
        "rotate='left'": attend_agreed,
        "return_lse=None": lambda: attend(return_lse=None),
        "on the meta device": lambda: ring_attention(meta, meta, meta, group=group) if odd else attend(),
        "layout=7": lambda: whole(layout=7),
        "rows": lambda: whole(layout=Layout("zigzag", 9, world_size)),
        "x_local.dtype differs": lambda: whole(wrong=torch.ones(1, 8).double()),
        "x_local: must be": lambda: whole(dim=2),
        "other dims differs": lambda: whole(wrong=torch.ones(2, 8)),
        "needs gradients differs": lambda: whole(wrong=torch.ones(1, 8).requires_grad_()),
    }
    texts = {}
    for name, call in cases.items():
        start = time.monotonic()
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        texts[name] = f"{caught.type.__name__}: {caught.value}"
        assert name in texts[name] and time.monotonic() - start < 10, texts[name]
    everyone = [None] * world_size
    dist.all_gather_object(everyone, texts)
    assert everyone[0] == everyone[1]


def test_whatever_one_rank_does_wrong_all_ranks_raise_the_same_error_at_once():
    check_ranks(_one_rank_errs, 2, timeout_s=100, group_timeout_s=15)


@pytest.mark.parametrize("layout", (3, None, b"zigzag"))
def test_what_is_neither_layout_nor_mesh_is_refused_as_layout(layout):
    with pytest.raises(ValueError, match="^layout=.*must be a ringflash.Layout"):
        shard_batch({"tokens": _TOKENS}, layout)


def _same_mask_in_other_words(rank, world_size):
    """Equal masks and layouts, however they were written, are no disagreement."""
    base = make_inputs(4)
    Layout("zigzag", 8, 2, Mask() if rank else Mask(causal=False, window_size=(-1, 0)), group=dist.group.WORLD)
    layout = "zigzag" if rank else Layout("zigzag", 8, 2)
    ring_attention(base.q, base.k, base.v, layout=layout, group=dist.group.WORLD)


def test_ranks_that_say_the_same_in_other_words_agree():
    check_ranks(_same_mask_in_other_words, 2)


@pytest.mark.parametrize("text", ("\u0416" * 5000, "\0" * 5000, '"\\' * 5000))
def test_a_stated_problem_fits_the_payload_whatever_its_characters(text):
    import json

    assert len(json.dumps(_state_problem(ValueError(text)))) < _PAYLOAD_BYTES / 2


def test_intervals_of_batches_that_never_come_again_are_let_go():
    # 16 bytes a row would let a quarter of a million small ones stay, and summing their sizes made each call slower.
    q, k, v = (torch.zeros(1, 8, 1, 2) for _ in range(3))
    for cut in range(1, 8):
        simulate(q, k, v, cp_size=2, cu_seqlens=[0, cut, 8])
    assert loop._intervals.weight >= len(loop._intervals) * 2**13
    assert loop._intervals.max_weight <= 256 * 2**20


@pytest.mark.parametrize("tokens", (torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool), np.ones((1, 4)),
                                    torch.ones(1, 4, dtype=torch.bfloat16), torch.ones(1, 4, dtype=torch.complex64)))
def test_tokens_and_labels_that_are_no_integers_are_refused_not_rounded(tokens):
    with pytest.raises(ValueError, match="must be integers"):
        shard_batch({"tokens": tokens})
    with pytest.raises(ValueError, match="must be integers"):
        shard_batch({"tokens": torch.ones(1, 4, dtype=torch.long), "labels": tokens})


def test_a_rank_of_a_layout_by_name_is_refused_by_shard_batch():
    with pytest.raises(ValueError, match="does not say how many ranks"):
        shard_batch({"tokens": _TOKENS}, "zigzag", rank=0)
