"""torch.compile and the custom ops."""
import os
import shutil

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend

from ringflash import Layout, Mask, ring_attention, simulate
from ringflash.ops import RingArguments, attention_backward, attention_forward
from ringflash.tests.support.ring_cases import differing, make_inputs, run


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _arguments(**changed):
    values = dict(mask=None, causal=-1, left=-1, right=-1, layout=None, layout_kind="zigzag", masks=[], layout_k=None,
                  layout_k_kind="", softmax_scale=0.5, softcap=0.0, group_name="", ulysses_name="", kernel="reference",
                  exchange="auto", rotate="auto", routing="auto", deterministic=False, is_agreed=False, needs_gradients=True)
    return RingArguments(**{**values, **changed}).flatten()


def _by_value():
    masks = (Mask(cu_seqlens=[0, 5, 12]), Mask(window_size=(3, 0), cu_seqlens=[0, 5, 12]))
    layout = Layout("striped", 12, 1, masks)
    return dict(layout=layout.spec, layout_kind="", mask=masks[1].spec, masks=[mask.spec for mask in masks], deterministic=True)


@pytest.mark.parametrize("changed, made", (
    ({}, {}), ({"causal": 0, "left": 3, "right": 2}, {}), (_by_value(), {}),
    ({"softcap": 2.0}, {"sinks": torch.float32, "head_dim_v": 12}), (_by_value(), {"sinks": torch.bfloat16, "head_dim_v": 4})),
    ids=("name", "sugar", "value", "sinks", "value and sinks"))
def test_opcheck_passes_for_both_directions(changed, made):
    inputs = make_inputs(12, **made)
    arguments = _arguments(**changed)
    leaf = None if inputs.sinks is None else inputs.sinks.clone().requires_grad_()
    torch.library.opcheck(attention_forward, (*inputs.fresh(), leaf, *arguments))
    tensors = (inputs.q, inputs.k, inputs.v, inputs.sinks)
    out, lse = attention_forward(*tensors, *arguments)
    for dlse in (None, inputs.dlse):
        torch.library.opcheck(attention_backward, (inputs.dout, dlse, *tensors, out, lse, *arguments))


@pytest.mark.parametrize("options", (
    {}, {"causal": False}, {"causal": True, "window_size": (3, 0)},
    {"causal": False, "window_size": [2, 2]}, {"mask": Mask(causal=False)},
    {"layout": "contiguous", "deterministic": True, "softmax_scale": 0.25, "kernel": "reference"},
    {"layout": Layout("striped", 12, 1, Mask(cu_seqlens=[0, 4, 12]))}, {"layout_k": "striped"}))
def test_one_graph_equals_eager_forward_and_backward(options):
    inputs = make_inputs(12)
    compiled = torch.compile(lambda q, k, v, **more: ring_attention(q, k, v, **options, **more), backend="aot_eager",
                             fullgraph=True)
    assert not differing(run(compiled, inputs), run(ring_attention, inputs, **options))


@pytest.mark.parametrize("options", ({}, {"layout": Layout("striped", 12, 1, Mask(cu_seqlens=[0, 4, 10]))}))
def test_sinks_are_a_differentiable_argument_of_one_graph(options):
    inputs = make_inputs(12, sinks=torch.float32, head_dim_v=4)

    def attend(q, k, v, sinks, **more):
        return ring_attention(q, k, v, sinks=sinks * 2, softcap=1.5, **options, **more)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert not differing(run(compiled, inputs), run(attend, inputs))


def test_new_values_of_softcap_are_compiled_anew_and_right_and_a_wrong_one_is_refused_in_the_graph():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ring_attention, backend=counter, fullgraph=True)
    inputs = make_inputs(12, sinks=torch.float32)
    for softcap in (1.0, 30.0, 0.0, 15.5):
        assert not differing(run(compiled, inputs, softcap=softcap), run(ring_attention, inputs, softcap=softcap))
    count = counter.frame_count
    for softcap in (15.5, 30.0, 1.0):                       # one graph a value, as for softmax_scale: none for those seen before
        run(compiled, inputs, softcap=softcap)
    assert counter.frame_count == count
    with pytest.raises(ValueError, match="softcap=-2.0: must be a finite number >= 0"):
        compiled(inputs.q, inputs.k, inputs.v, softcap=-2.0)
    assert not differing(run(compiled, inputs, softcap=2.0), run(ring_attention, inputs, softcap=2.0))


def test_20_batches_of_different_documents_compile_at_most_twice():
    counter = CompileCounterWithBackend("aot_eager")

    def attend(q, k, v, layout, **options):
        out = q
        for mask in layout.masks:
            out, lse = ring_attention(out, k, v, layout=layout, mask=mask, **options)
        return out, lse

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    inputs = make_inputs(32)
    for number in range(20):
        ends = [0, *sorted({5 + number, *range(1, 1 + number % 7)}), 32]
        layout = Layout("zigzag", 32, 1, (Mask(cu_seqlens=ends), Mask(cu_seqlens=ends, window_size=(6, 0))))
        layout.set_token(f"batch {number}")                 # as shard_batch does: new for each batch
        options = dict(layout=layout, kernel="reference")
        assert not differing(run(compiled, inputs, **options), run(attend, inputs, **options))
    assert counter.frame_count <= 2


def test_lengths_may_change_in_one_dynamic_graph():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v, **more: ring_attention(q, k, v, kernel="cpu", **more), backend=counter,
                             fullgraph=True, dynamic=True)
    counts = []
    for seq_len in (10, 12, 31):                            # not 8, the head_dim: equal sizes are taken for the same symbol
        inputs = make_inputs(seq_len)
        assert not differing(run(compiled, inputs), run(ring_attention, inputs, kernel="cpu"))
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler")
def test_inductor_equals_eager():
    inputs = make_inputs(16)
    compiled = torch.compile(lambda q, k, v, **more: ring_attention(q * 2, k, v, kernel="cpu", **more), fullgraph=True)
    ours = run(compiled, inputs)
    theirs = run(lambda q, k, v, **more: ring_attention(q * 2, k, v, kernel="cpu", **more), inputs)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])


def test_simulate_in_a_compiled_function_breaks_the_graph_and_is_right():
    inputs = make_inputs(9)
    call = lambda q, k, v: simulate(q * 2, k, v, cp_size=2) + 1  # noqa: E731
    assert torch.equal(torch.compile(call, backend="eager")(inputs.q, inputs.k, inputs.v), call(inputs.q, inputs.k, inputs.v))


def test_a_scale_that_is_no_finite_number_is_refused_in_a_compiled_call_too():
    inputs = make_inputs(8)
    call = torch.compile(lambda q, k, v, scale: ring_attention(q, k, v, softmax_scale=scale), backend="aot_eager", fullgraph=True)
    assert torch.equal(call(inputs.q, inputs.k, inputs.v, 0.3), ring_attention(inputs.q, inputs.k, inputs.v, softmax_scale=0.3))
    with pytest.raises(ValueError, match="softmax_scale=nan: must be a finite number"):
        call(inputs.q, inputs.k, inputs.v, float("nan"))
