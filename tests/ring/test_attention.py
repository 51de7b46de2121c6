"""ring_attention on one rank: what it refuses and how, and that every option takes effect."""
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from ringflash import Layout, Mask, ring_attention, simulate
from ringflash.tests.support.ring_cases import differing, judge, make_inputs, run

_Q = torch.zeros(1, 8, 4, 8)
_K = torch.zeros(1, 8, 2, 8)
_TWO = torch.zeros(2, 8, 2, 8)

_REFUSED = [
    # options, error, what the message names
    (dict(kernel="fast"), ValueError, "kernel='fast'.*auto.*cpu.*reference"),
    (dict(kernel="hopper"), RuntimeError, "kernel='hopper'"),
    (dict(kernel="triton"), RuntimeError, "kernel='triton'"),
    (dict(exchange="mpi"), ValueError, "exchange='mpi'.*auto, nccl, gloo"),
    (dict(layout="spiral"), ValueError, "spiral.*contiguous, zigzag, striped"),
    (dict(layout="balanced"), ValueError, r"'balanced' cannot be given by name.*make a Layout\('balanced'"),
    (dict(layout="auto"), ValueError, r"'auto' cannot be given by name.*make a Layout\('auto'"),
    (dict(layout=3), ValueError, "layout=3"),
    (dict(layout=Layout("zigzag", 8, 2)), ValueError, "cp_size=2.*cp_size=1"),
    (dict(layout=Layout("zigzag", 9, 1)), ValueError, "q: 8 local rows.*seq_len=9.*gives it 9"),
    (dict(layout_k="spiral"), ValueError, "spiral"),
    (dict(layout=Layout("zigzag", 8, 1), mask=Mask(causal=False)), ValueError, "not among layout.masks"),
    (dict(mask=Mask(), causal=False), ValueError, "mask together with causal"),
    (dict(mask=Mask(), window_size=(1, 0)), ValueError, "mask together with window_size"),
    (dict(mask="causal"), ValueError, "mask='causal'"),
    (dict(window_size=(-2, 0)), ValueError, "window_size"),
    (dict(window_size=(2, 1)), ValueError, "right"),
    (dict(cu_seqlens=[0, 9]), ValueError, r"cu_seqlens\[-1\]=9"),
    (dict(cu_seqlens=[1, 8]), ValueError, "start at 0"),
    (dict(softcap=-1.0), ValueError, "softcap=-1.0: must be a finite number >= 0.*nearest valid: 0.0$"),
    (dict(softcap=float("nan")), ValueError, "softcap=nan.*nearest valid: 0.0$"),
    (dict(softcap=float("inf")), ValueError, "softcap=inf.*nearest valid: 1e.30, 0.0$"),
    (dict(softcap=1e-40), ValueError, "softcap=1e-40.*nearest valid: 0.0, 1e-30$"),
    (dict(softcap="30 degrees"), ValueError, "softcap='30 degrees': must be a finite number >= 0"),
    (dict(softcap=None), ValueError, "softcap=None"),
    (dict(sinks=torch.zeros(2)), ValueError, r"sinks: shape \(2,\).*one logit per query head of q, .Hq. = \(4,\)"),
    (dict(sinks=torch.zeros(1, 4)), ValueError, r"sinks: shape \(1, 4\)"),
    (dict(sinks=torch.zeros(4, dtype=torch.int32)), ValueError, "sinks.dtype=torch.int32.*torch.bfloat16"),
    (dict(sinks=torch.zeros(4, device="meta")), ValueError, "sinks: on meta, but q is on cpu"),
    (dict(sinks=torch.zeros(4).to_sparse()), ValueError, "sinks: must be a dense tensor"),
    (dict(sinks=[0.0] * 4), ValueError, "sinks: must be a torch.Tensor.*got list"),
    (dict(return_lse=1), ValueError, "return_lse=1: must be a bool"),
    (dict(rotate="left"), ValueError, "rotate='left': unknown; valid: auto, kv, q"),
    (dict(rotate=None), ValueError, "rotate=None: unknown"),
    (dict(routing="nowhere"), ValueError, "routing='nowhere': unknown; valid: auto, ring, direct, allgather"),
    (dict(q=torch.zeros(8, 4, 8)), ValueError, "q: shape.*3 dims"),
    (dict(q="q"), ValueError, "q: must be a torch.Tensor"),
    (dict(q=_Q.bfloat16()), ValueError, "dtype: q, k and v.*q torch.bfloat16"),
    (dict(q=_Q.int(), k=_K.int(), v=_K.int()), ValueError, "q.dtype=torch.int32.*torch.bfloat16"),
    (dict(q=torch.zeros(1, 8, 5, 8)), ValueError, "num_kv_heads=2 must divide num_heads=5.*nearest valid: .1, 5"),
    (dict(k=torch.zeros(1, 7, 2, 8)), ValueError, "v: shape"),
    (dict(k=torch.zeros(1, 8, 2, 4), v=torch.zeros(1, 8, 2, 4)), ValueError, "k: head_dim 4.*q has 8"),
    (dict(v=torch.zeros(1, 8, 2, 0)), ValueError, "v: head_dim 0; must be > 0"),
    (dict(q=torch.zeros(2, 8, 4, 8)), ValueError, "k: batch size 1.*q has 2"),
    (dict(q=torch.zeros(2, 8, 4, 8), k=_TWO, v=_TWO, cu_seqlens=[0, 8]), ValueError, "cu_seqlens with batch size 2.*B == 1"),
    (dict(k=torch.zeros(1, 8, 2, 8, device="meta"), v=torch.zeros(1, 8, 2, 8, device="meta")), ValueError, "device: q, k and v"),
]


@pytest.mark.parametrize("options, error, names", _REFUSED,
                         ids=[f"{i}-{error.__name__}" for i, (_, error, _) in enumerate(_REFUSED)])
def test_what_cannot_be_is_refused_with_the_key_and_the_rule(options, error, names, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for attend in (ring_attention, lambda q, k, v, **rest: simulate(q, k, v, cp_size=1, **rest)):
        if attend is not ring_attention and "seq_len=9" in names:
            names = "8 rows.*seq_len=9"
        with pytest.raises(error, match=names):
            attend(**{"q": _Q, "k": _K, "v": _K, **options})


def test_a_group_that_is_none_of_the_kinds_is_refused():
    with pytest.raises(ValueError, match="group='world'.*ProcessGroup.*DeviceMesh"):
        ring_attention(_Q, _K, _K, group="world")
    with pytest.raises(ValueError, match="exchange='nccl'.*simulate"):
        simulate(_Q, _K, _K, cp_size=2, exchange="nccl")
    with pytest.raises(ValueError, match="cp_size"):
        simulate(_Q, _K, _K, cp_size=0)


@pytest.mark.parametrize("options", (
    {}, {"causal": False}, {"window_size": (2, 0)}, {"cu_seqlens": [0, 3, 3, 8]},
    {"cu_seqlens": torch.tensor([0, 5]), "causal": False}))
def test_every_option_has_a_right_backward_on_one_rank(options):
    inputs = make_inputs(11)
    for more in ({"layout": "striped"}, {"deterministic": True}, {"kernel": "reference"}, {"kernel": "cpu", "exchange": "gloo"},
                 {"softmax_scale": 0.7}):
        ours = run(ring_attention, inputs, **options, **more)
        scale = {"softmax_scale": more["softmax_scale"]} if "softmax_scale" in more else {}
        assert not judge(ours, inputs, **options, **scale), more
        with_value = Layout("zigzag", 11, 1, Mask(**options))
        assert not differing(run(ring_attention, inputs, **{**more, "layout": with_value}), ours)


def test_without_return_lse_the_gradients_are_those_of_out_alone():
    inputs = make_inputs(11)
    q, k, v = inputs.fresh()
    out = ring_attention(q, k, v)
    out.backward(inputs.dout)
    expected = run(ring_attention, inputs, with_dlse=False)
    assert torch.equal(out, expected["out"]) and torch.equal(q.grad, expected["dq"])
    assert not judge(expected, inputs, with_dlse=False)


def test_a_layout_of_several_masks_takes_each_and_starts_with_its_first():
    inputs = make_inputs(9)
    window, full = Mask(window_size=(2, 0)), Mask(causal=False)
    layout = Layout("zigzag", 9, 1, (window, full))
    assert not differing(run(ring_attention, inputs, layout=layout), run(ring_attention, inputs, mask=window))
    assert not differing(run(ring_attention, inputs, layout=layout, causal=False), run(ring_attention, inputs, mask=full))


@pytest.mark.parametrize("kernel", ("reference", "cpu"))
def test_no_rows_of_q_or_of_k_are_legal(kernel):
    # An empty shard meets this on every step; here with a ring of more ranks than rows.
    inputs = make_inputs(2, seq_len_k=1)
    ours = run(simulate, inputs, cp_size=8, kernel=kernel)
    assert not judge(ours, inputs)
    assert ours["out"].shape == (1, 2, 4, 8)


def test_double_backward_is_refused():
    q, k, v = make_inputs(6).fresh()
    out = ring_attention(q, k, v)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


@pytest.mark.parametrize("attend", (ring_attention, partial(simulate, cp_size=2)))
@pytest.mark.parametrize("compiled", (False, True))
def test_forward_mode_ad_is_refused_and_not_silently_zero(attend, compiled):
    q, k, v = (x.detach() for x in make_inputs(6).fresh())
    sinks = torch.zeros(q.shape[2])

    def call(q, k, v, sinks):
        return attend(q, k, v, sinks=sinks)

    run_it = torch.compile(call, backend="aot_eager") if compiled else call
    plain = run_it(q, k, v, sinks)
    for which in range(4):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode AD"):
            run_it(*(forward_ad.make_dual(x, x) if i == which else x for i, x in enumerate((q, k, v, sinks))))
    for derive in (lambda f: torch.func.jvp(f, (q,), (q,)), lambda f: torch.func.jacfwd(f)(q)):
        if not compiled:
            with pytest.raises(NotImplementedError, match="forward-mode AD"):
                derive(lambda q: call(q, k, v, sinks))
    with forward_ad.dual_level():
        forward_ad.make_dual(q, q)
        if not compiled:
            assert torch.equal(run_it(q, k, v, sinks), plain)  # of no tangent here: what is computed is right
    assert torch.equal(run_it(q, k, v, sinks), plain)


def test_meta_tensors_give_shapes_on_one_rank():
    q, k, v = (x.detach().to("meta") for x in make_inputs(6).fresh())
    assert ring_attention(q, k, v).shape == q.shape


def test_tensors_are_left_as_they_were():
    inputs = make_inputs(8)
    before = [x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)]
    run(ring_attention, inputs, cu_seqlens=[0, 5])
    run(simulate, inputs, cp_size=3, cu_seqlens=[0, 5])
    assert all(torch.equal(x, y) for x, y in zip(before, (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)))
