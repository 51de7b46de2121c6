"""Claims about the decoder."""
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ringflash.model import ModelConfig, Transformer

CONFIG = ModelConfig(vocab_size=61, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, loss_chunk_rows=16)


def attend(q, k, v, *, layout, mask=None):
    """Dense causal attention over the rows at hand; zero rows are legal. layout is where rows are, or None."""
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float().repeat_interleave(group, 2)) / math.sqrt(q.shape[-1])
    allowed = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
    p = torch.softmax(scores.masked_fill(~allowed, -math.inf), -1) if k.shape[1] else scores
    return torch.einsum("bhqk,bkhd->bqhd", p, v.float().repeat_interleave(group, 2)).to(q.dtype)


def batch(length, rows=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, CONFIG.vocab_size, (rows, length), generator=g)
    labels = torch.cat((tokens[:, 1:], torch.full((rows, 1), -100)), 1)
    return tokens, torch.arange(length), labels


def hand_written(model, tokens, positions):
    """The same decoder from its weights in fp64, written differently: interleaved complex pairs, explicit loops over heads."""
    weights = {name: p.detach().double() for name, p in model.named_parameters(remove_duplicate=False)}
    c, head_dim = model.config, model.config.resolved_head_dim

    def norm(x, w):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * w

    def turn(x):
        angle = positions.double()[:, None] / c.rope_base ** (torch.arange(head_dim // 2).double() * 2 / head_dim)
        z = torch.complex(x[..., : head_dim // 2], x[..., head_dim // 2:]) * torch.exp(1j * angle)
        return torch.cat((z.real, z.imag), -1)

    x = weights["embedding.weight"][tokens]
    for n in range(c.num_layers):
        w = {name.removeprefix(f"layers.{n}."): value for name, value in weights.items() if name.startswith(f"layers.{n}.")}
        h = norm(x, w["attention_norm.weight"])
        heads = []
        for i in range(c.num_heads):
            j = i // (c.num_heads // c.num_kv_heads)
            q = turn(h @ w["attention.wq.weight"][i * head_dim:(i + 1) * head_dim].t())
            k = turn(h @ w["attention.wk.weight"][j * head_dim:(j + 1) * head_dim].t())
            v = h @ w["attention.wv.weight"][j * head_dim:(j + 1) * head_dim].t()
            scores = (q @ k.transpose(-1, -2) / head_dim**0.5).masked_fill(torch.ones(len(positions), len(positions)).triu(1) > 0,
                                                                           -math.inf)
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ w["attention.wo.weight"].t()
        h = norm(x, w["ffn_norm.weight"])
        gate = h @ w["ffn.gate.weight"].t()
        x = x + (gate * torch.sigmoid(gate) * (h @ w["ffn.up.weight"].t())) @ w["ffn.down.weight"].t()
    return norm(x, weights["norm.weight"]) @ weights["head.weight"].t()


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("length", [1, 13, 40])
def test_loss_equals_a_decoder_written_out_by_hand_in_fp64(length, tie):
    model = Transformer(replace(CONFIG, tie_embeddings=tie, init_std=0.3), attend)
    weights = dict(model.named_parameters(remove_duplicate=False))
    assert (weights["head.weight"] is weights["embedding.weight"]) == tie
    tokens, positions, labels = batch(length, rows=2)
    logits = hand_written(model, tokens, positions + 5)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = model(tokens, positions + 5, labels)
    assert loss.dtype == torch.float32 and loss.ndim == 0
    assert abs(loss.item() - expected.item()) <= 2e-6 * abs(expected.item()) + 1e-12


def test_without_labels_the_hidden_after_the_last_norm_comes_back():
    model = Transformer(CONFIG, attend)
    tokens, positions, labels = batch(9)
    hidden = model(tokens, positions)
    assert hidden.shape == (1, 9, CONFIG.dim)
    loss = F.cross_entropy((hidden @ model.head.weight.t())[0], labels[0], reduction="sum")
    assert abs(loss.item() - model(tokens, positions, labels).item()) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tie", [False, True])
def test_a_rank_without_rows_has_loss_zero_and_gradients_of_zeros(dtype, tie):
    model = Transformer(replace(CONFIG, tie_embeddings=tie), attend).to(dtype)
    empty = torch.empty(1, 0, dtype=torch.int64)
    loss = model(empty, empty[0], empty)
    loss.backward()
    assert loss.item() == 0.0 and loss.dtype == torch.float32
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.dtype == dtype and not p.grad.any(), name


def test_losses_of_parts_of_the_labels_add_up_to_the_whole():
    model = Transformer(CONFIG, attend)
    tokens, positions, labels = batch(20)
    first, second = labels.clone(), labels.clone()
    first[:, 7:], second[:, :7] = -100, -100
    parts = model(tokens, positions, first) + model(tokens, positions, second)
    assert abs(parts.item() - model(tokens, positions, labels).item()) < 1e-4


def test_initial_loss_is_that_of_uniform_guesses():
    tokens, positions, labels = batch(200)
    loss = Transformer(CONFIG, attend)(tokens, positions, labels) / 199
    assert abs(loss.item() - math.log(CONFIG.vocab_size)) < 0.05


def test_weights_depend_on_seed_and_name_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    a = Transformer(CONFIG, attend, seed=7)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    torch.manual_seed(2)
    b, c = Transformer(CONFIG, attend, seed=7), Transformer(CONFIG, attend, seed=8)
    deeper = dict(Transformer(replace(CONFIG, vocab_size=99), attend, seed=7).named_parameters())
    for (name, x), y, z in zip(a.named_parameters(), b.parameters(), c.parameters()):
        assert torch.equal(x, y), name
        assert x.ndim == 1 or not torch.equal(x, z), name
        assert torch.equal(x, deeper[name]) or name in ("embedding.weight", "head.weight"), name
    assert not torch.equal(a.layers[0].ffn.up.weight, a.layers[1].ffn.up.weight)


def test_a_model_made_on_the_meta_device_gets_the_same_weights_later():
    with torch.device("meta"):
        late = Transformer(CONFIG, attend, seed=3)
    late.to_empty(device="cpu")
    late.init_weights(3)
    for (name, x), y in zip(Transformer(CONFIG, attend, seed=3).named_parameters(), late.parameters()):
        assert torch.equal(x, y), name


def test_initial_spread_is_init_std_and_smaller_into_the_residual_stream():
    layer = Transformer(replace(CONFIG, dim=128, ffn_dim=256, num_layers=8), attend).layers[0]
    for weight in (layer.ffn.up.weight, layer.attention.wq.weight):
        assert abs(weight.std().item() / 0.02 - 1) < 0.05
    for weight in (layer.ffn.down.weight, layer.attention.wo.weight):
        assert abs(weight.std().item() / (0.02 / 4) - 1) < 0.05
    assert torch.equal(layer.ffn_norm.weight, torch.ones(128))


def test_casting_the_model_does_not_change_the_angles():
    seen = {}

    def spy(q, k, v, *, layout, mask=None):
        seen.setdefault(q.dtype, []).append((q, k))
        return attend(q, k, v, layout=layout)

    model = Transformer(replace(CONFIG, num_layers=1), spy)
    model.layers[0].attention_norm.weight.data.zero_()  # q = k = 0, whatever the input ...
    model.layers[0].attention_norm.weight.data[0] = 1.0  # ... but for one dim, exact in bf16
    for w in (model.layers[0].attention.wq.weight, model.layers[0].attention.wk.weight):
        w.data.fill_(1.0)
    model.embedding.weight.data.fill_(1.0)
    tokens, positions = torch.zeros(1, 64, dtype=torch.int64), torch.arange(1_000_000, 1_000_064)
    model(tokens, positions)
    model.to(torch.bfloat16)(tokens, positions)
    for wide, narrow in zip(seen[torch.float32][0], seen[torch.bfloat16][0]):
        assert (wide - narrow.float()).abs().max() <= 2**-8 * 1.5  # one rounding of numbers below 1.5, not of their angles


def test_a_bf16_model_stays_close_to_its_fp32_twin():
    model = Transformer(replace(CONFIG, init_std=0.1), attend)
    tokens, positions, labels = batch(64)
    exact = model(tokens, positions + 1_000_000, labels)
    rounded = model.to(torch.bfloat16)(tokens, positions + 1_000_000, labels)
    assert rounded.dtype == torch.float32
    assert abs(rounded.item() / exact.item() - 1) < 0.01
    rounded.backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())


def test_layout_reaches_attention_and_grouped_heads_are_not_repeated():
    seen = []

    def spy(q, k, v, *, layout, mask=None):
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), layout))
        return attend(q, k, v, layout=layout)

    marker = object()
    Transformer(replace(CONFIG, head_dim=10), spy)(*batch(5, rows=3), layout=marker)
    assert seen == [((3, 5, 4, 10), (3, 5, 2, 10), (3, 5, 2, 10), marker)] * 2


def test_sinks_start_at_0_and_reach_attention_with_the_softcap_only_in_a_model_that_has_them():
    seen = []

    def spy(q, k, v, *, layout, mask=None, **options):
        seen.append(options)
        return attend(q, k, v, layout=layout)

    model = Transformer(replace(CONFIG, sinks=True, softcap=20.0), spy)
    model(*batch(5))
    assert [sorted(options) for options in seen] == [["sinks", "softcap"]] * 2 and seen[0]["softcap"] == 20.0
    assert all(options["sinks"] is layer.attention.sinks for options, layer in zip(seen, model.layers))
    named = dict(model.named_parameters())
    assert torch.equal(named["layers.1.attention.sinks"], torch.zeros(4))
    plain = dict(Transformer(CONFIG, spy).named_parameters())
    assert named.keys() - plain.keys() == {"layers.0.attention.sinks", "layers.1.attention.sinks"}
    assert all(torch.equal(named[name], weight) for name, weight in plain.items())


def test_compiled_in_one_graph_it_gives_the_eager_loss_and_gradients():
    model = Transformer(replace(CONFIG, num_layers=1), attend)
    loss = model(*batch(40))
    expected = torch.autograd.grad(loss, list(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(*batch(40))
    assert abs(compiled.item() - loss.item()) < 1e-4
    for got, e in zip(torch.autograd.grad(compiled, list(model.parameters())), expected):
        assert (got - e).abs().max() <= 1e-5 * e.abs().max() + 1e-7


def test_shapes_that_do_not_fit_are_refused():
    model = Transformer(CONFIG, attend)
    tokens, positions, labels = batch(5)
    with pytest.raises(ValueError, match="share S"):
        model(tokens, positions[:4], labels)
    with pytest.raises(ValueError, match="labels"):
        model(tokens, positions, labels[:, :4])


@pytest.mark.parametrize("change, key, nearest", [
    ({"num_kv_heads": 3}, r"model\.num_kv_heads=3", "2 or 4"),
    ({"num_heads": 6, "num_kv_heads": 6}, r"model\.num_heads=6", "4 or 8"),
    ({"head_dim": 7}, r"model\.head_dim=7", "6 or 8"),
    ({"head_dim": 1}, r"model\.head_dim=1", "2"),
    ({"dim": 36, "num_heads": 4}, r"model\.head_dim=9 \(model.dim / model.num_heads\)", "8 or 10"),
    ({"num_layers": 0}, r"model\.num_layers=0", "at least 1"),
    ({"vocab_size": -5}, r"model\.vocab_size=-5", "at least 1"),
    ({"norm_eps": 0.0}, r"model\.norm_eps=0\.0", "greater than 0"),
    ({"softcap": -2.0}, r"model\.softcap=-2\.0", "nearest: 0"),
    ({"rope_base": math.nan}, r"model\.rope_base=nan", "greater than 0"),
])
def test_a_bad_size_is_refused_with_key_and_nearest_values(change, key, nearest):
    with pytest.raises(ValueError, match=f"{key}.*{nearest}"):
        Transformer(replace(CONFIG, **change), attend)


def test_the_model_learns_a_repeating_sequence():
    model = Transformer(replace(CONFIG, init_std=0.1), attend)
    tokens = torch.arange(40).remainder(5)[None]
    labels = torch.cat((tokens[:, 1:], torch.tensor([[-100]])), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(tokens, torch.arange(40), labels) / 39
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
