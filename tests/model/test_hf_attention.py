"""ringflash.hf over rings of real ranks against transformers' own attention on one, loss and every gradient; what is refused."""
import copy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from ringflash import Layout, Mask, hf, hf_attention, shard_batch  # noqa: E402
from ringflash.hf_config import layer_masks  # noqa: E402
from ringflash.tests.support.distributed import check_ranks  # noqa: E402
from ringflash.tests.support.hf_cases import VOCAB, config_of, gradients, model_of, own_attention  # noqa: E402

CU = [0, 5, 6, 6, 37, 61]
# name: (kind, what its configuration says beyond its sizes, layout, recompute layers in the backward)
CASES = {
    "llama": ("llama", {}, "zigzag", False), "llama, tied": ("llama", {"tie_word_embeddings": True}, "striped", True),
    "qwen3": ("qwen3", {}, "balanced", False),
    "qwen3, windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 6,
                                 "layer_types": ["sliding_attention", "full_attention"]}, "zigzag", False),
    "mistral": ("mistral", {}, "contiguous", False), "mistral, recomputed": ("mistral", {}, "zigzag", True),
    "gpt_oss": ("gpt_oss", {}, "zigzag", False), "gemma2": ("gemma2", {}, "zigzag", True),
}
RINGS = (2, 3)


def batch() -> dict:
    return {"tokens": torch.randint(0, VOCAB, (1, CU[-1]), generator=torch.Generator().manual_seed(3)), "cu_seqlens": CU}


def body(rank: int, world_size: int) -> dict:
    found = {}
    for size in RINGS:
        group = dist.new_group(list(range(size)))
        for name, (kind, changes, layout, recomputed) in CASES.items():
            if rank < size:
                found[size, name] = on_ring(model_of(config_of(kind, **changes)), layout, recomputed, group)
    return found


def on_ring(model, layout: str, recomputed: bool, group) -> tuple[float, int, dict]:
    """(loss, valid tokens, gradients), added up over the ranks of the ring."""
    hf.enable(model, group, kernel="reference")
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sharded = shard_batch(batch(), layout, group=group, masks=hf.masks(model))
    loss = model(**hf.inputs(sharded)).loss
    loss.backward()
    total, grads = loss.detach().double(), gradients(model)
    for tensor in (total, *grads.values()):
        dist.all_reduce(tensor, group=group)
    return float(total), sharded.num_valid, grads


@pytest.fixture(scope="module")
def ranks():
    return check_ranks(body, max(RINGS), timeout_s=110.0)


@pytest.mark.parametrize("size", RINGS)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_every_gradient_over_packed_documents_are_those_of_one_rank_with_transformers_own_attention(ranks, name, size):
    kind, changes, *_ = CASES[name]
    loss, count, grads = ranks[0][size, name]
    whole = shard_batch(batch())
    assert count == whole.num_valid == CU[-1] - 4  # one document is empty
    expected_loss, expected = own_attention(model_of(config_of(kind, **changes)), whole.tokens, whole.labels, CU, count)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert grads.keys() == expected.keys()
    for key, value in grads.items():
        assert float((value - expected[key]).abs().max()) < 5e-5 * float(expected[key].abs().max()) + 1e-6, key


def test_a_batch_in_two_halves_over_the_count_of_both_is_the_whole(tmp_path):
    model, tokens = hf.enable(model_of(config_of("llama")), kernel="reference"), batch()["tokens"]
    halves = [shard_batch({"tokens": tokens[:, rows]}, masks=hf.masks(model)) for rows in (slice(0, 37), slice(37, 61))]
    whole = shard_batch({"tokens": tokens, "cu_seqlens": [0, 37, 61]}, masks=hf.masks(model))
    count = sum(half.num_valid for half in halves)
    shares = [model(**hf.inputs(half, num_items=count)).loss for half in halves]
    assert float(sum(shares).detach()) == pytest.approx(float(model(**hf.inputs(whole)).loss.detach()), rel=1e-6)


def test_a_configuration_that_another_model_shares_is_left_as_it_was():
    from transformers import AutoModelForCausalLM

    config = config_of("mistral")
    reference, model = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    assert reference.config is model.config is config and model.model.layers[0].self_attn.config is config
    before = copy.deepcopy(vars(config))
    hf.enable(model, kernel="reference")
    assert vars(config) == before and config._attn_implementation == "eager"
    holders = [module for module in model.modules() if hasattr(module, "config")]
    assert {id(module.config) for module in holders} == {id(model.config)} and model.config is not config
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    assert reference(input_ids=tokens).logits.shape == (1, 5, VOCAB)  # without a layout: its attention is its own


def test_a_copied_model_is_on_the_same_ring():
    model = hf.enable(model_of(config_of("llama")), kernel="reference")
    sharded = shard_batch(batch())
    assert torch.equal(copy.deepcopy(model)(**hf.inputs(sharded)).logits, model(**hf.inputs(sharded)).logits)


def test_masks_are_each_layer_s_own_and_a_window_counts_the_query_itself():
    config = config_of("gemma2")
    assert layer_masks(config) == (Mask(window_size=(5, 0)), Mask())
    assert layer_masks(config_of("mistral")) == (Mask(window_size=(6, 0)),) * 2
    config.layer_types, config.attention_chunk_size = ["chunked_attention", "full_attention"], 4
    assert layer_masks(config) == (Mask(chunk_size=4), Mask())


def test_a_layer_with_half_of_its_window_is_found_by_this_comparison(monkeypatch):
    """A planted defect: what these equalities would tell of a window that is one too narrow."""
    monkeypatch.setattr(hf_attention, "layer_masks", lambda config: (Mask(window_size=(5, 0)),) * 2)
    model = hf.enable(model_of(config_of("mistral")), kernel="reference")
    sharded = shard_batch(batch(), masks=Mask(window_size=(5, 0)))
    with pytest.raises(ValueError, match=r"layers.0.self_attn: its configuration means .*\(5, 0\).* asked for .*\(6, 0\)"):
        model(**hf.inputs(sharded))


@pytest.mark.parametrize("kind, changes, told", [
    ("llama", {"attention_dropout": 0.1}, "config.attention_dropout=0.1"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type=dynamic"),
    ("llama", {"head_dim": 512}, "config.head_dim=512"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "config.use_bidirectional_attention=True"),
    ("qwen3", {"is_causal": False}, "config.is_causal=False"),
    ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, r"layers.1: config.layer_types\[1\]=linear_attention"),
    ("mixtral", {"output_router_logits": True}, "config.output_router_logits=True"),
    ("llama", {"output_attentions": True}, "config.output_attentions=True")])
def test_a_model_that_cannot_be_spread_is_refused_by_its_option(kind, changes, told):
    model = model_of(config_of(kind))
    for key, value in changes.items():
        setattr(model.config, key, value)
    with pytest.raises(ValueError, match=told):
        hf.enable(model)
    assert model.config._attn_implementation == "eager"


def test_a_kind_of_model_that_nobody_compared_is_refused_unless_it_is_asked_for():
    from transformers import AutoConfig, AutoModelForCausalLM

    small = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
    with torch.device("meta"):
        unknown = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_neox", **small))
        with pytest.raises(ValueError, match="model_type=gpt_neox: not among those .*untested=True"):
            hf.enable(unknown)
        hf.enable(unknown, untested=True)
    with pytest.raises(ValueError, match="must be a model of transformers, got Linear"):
        hf.enable(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="rotate='x'"):
        hf.enable(model_of(config_of("llama")), rotate="x")


PADDED = torch.tensor([[1] * 60 + [0]])


@pytest.mark.parametrize("change, told", [
    ({"layout": None}, "layers.0.self_attn: no layout"),
    ({"attention_mask": PADDED}, "attention_mask: padding"),
    ({"attention_mask": torch.zeros(1, 1, 61, 61)}, "layers.0.self_attn: attention_mask is a 4-D tensor"),
    ({"use_cache": True}, "use_cache=True"), ({"output_attentions": True}, "layers.0.self_attn: output_attentions=True"),
    ({"is_causal": False}, "both directions"), ({"seq_idx": torch.zeros(1, 61)}, "layers.0.self_attn: seq_idx: documents"),
    ({"cu_seq_lens_q": torch.tensor(CU)}, "layers.0.self_attn: cu_seq_lens_q: documents"),
    ({"position_bias": torch.zeros(1)}, "layers.0.self_attn: position_bias: not known"),
    ({"layout": Layout("zigzag", 61, 1, Mask(window_size=(3, 0)))},
     "layers.0.self_attn: .*not among the layout's masks.*masks=ringflash")])
def test_a_call_that_cannot_be_meant_is_refused_by_layer_and_option(change, told):
    model = hf.enable(model_of(config_of("llama")), kernel="reference")
    given = hf.inputs(shard_batch(batch()))
    with pytest.raises(ValueError, match=told):
        model(**given | change)
    # An all-ones mask equals none.
    assert torch.isfinite(model(**given, attention_mask=torch.ones(1, 61)).loss)


def test_a_model_that_was_given_another_attention_since_is_refused():
    model = hf.enable(model_of(config_of("llama")))
    inputs = hf.inputs(shard_batch(batch(), masks=hf.masks(model)))
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="layers.0.self_attn: attn_implementation=eager: would see this rank's rows alone"):
        model(**inputs)
    assert torch.isfinite(hf.enable(model)(**inputs).loss)


def test_a_mask_of_a_model_s_own_making_is_refused():
    from transformers import masking_utils

    def asked(function):
        return hf_attention._mask(mask_function=function, q_length=4, kv_length=4)

    causal = masking_utils.causal_mask_function
    assert asked(masking_utils.sliding_window_causal_mask_function(4)) == Mask(window_size=(3, 0))
    assert asked(masking_utils.chunked_causal_mask_function(4, torch.zeros(1))) == Mask(chunk_size=4)
    with pytest.raises(ValueError, match="mask or_masks.*: not known"):
        asked(masking_utils.or_masks(causal, masking_utils.bidirectional_mask_function))
    with pytest.raises(ValueError, match="lambda.*not known"):
        asked(masking_utils.and_masks(causal, lambda b, h, q, k: q == k))
    with pytest.raises(ValueError, match="both directions"):
        asked(masking_utils.bidirectional_mask_function)
    with pytest.raises(ValueError, match="a cache of keys"):
        hf_attention._mask(mask_function=causal, q_length=1, kv_length=4, q_offset=3)


def test_a_shard_without_rows_is_refused_on_every_rank():
    for rank in range(3):
        sharded = shard_batch({"tokens": torch.zeros(1, 2, dtype=torch.int64)}, Layout("zigzag", 2, 3), rank=rank)
        with pytest.raises(ValueError, match="seq_len=2 over 3 ranks: some rank has no rows"):
            hf.inputs(sharded)


def test_importing_it_does_not_import_transformers_nor_say_no_without():
    code = ("import sys; sys.modules['transformers'] = None; import ringflash.hf, ringflash.hf_config, ringflash.model.build\n"
            "try: ringflash.hf.enable(None)\nexcept RuntimeError as error: print('pip install' in str(error))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr
