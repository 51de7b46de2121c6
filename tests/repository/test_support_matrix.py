"""The README's tables of what works with what: every cell that says yes is run and right, every other one raises and says why."""
import itertools
import re
from pathlib import Path

import pytest
import torch

from ringflash import Layout, Mask, ring_attention, simulate
from ringflash.kernels import cpu, dispatch, hopper, reference
from ringflash.tests.support.masks import allowed_pairs
from ringflash.tests.support.ring_cases import judge, make_inputs, run

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
LENGTH, RANKS = 30, 3
DOCUMENTS = {"cu_seqlens": (0, 9, 9, 28), "cu_seqlens_k": (0, 11, 14, 33)}


def table(first_header: str) -> list[dict[str, str]]:
    """The rows of the table whose first column has this name, by column."""
    found = re.search(rf"^\| {re.escape(first_header)} \|.*\n(?:\|.*\n)+", README, flags=re.M)
    assert found, first_header
    header, _, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in found.group().splitlines())
    assert all(len(row) == len(header) for row in rows)
    return [dict(zip(header, row)) for row in rows]


def mask_rows() -> dict[str, tuple[dict, dict[str, str]]]:
    """(arguments of Mask, cells) by mask; "each of these with ..." stands for as many."""
    found, plain = {}, {}
    for row in table("mask"):
        name, cells = row.pop("mask"), row
        if name.startswith("each of these with"):
            lists = {key: DOCUMENTS[key] for key in re.findall(r"`(\w+)`", name)}
            found |= {f"{text}, {', '.join(lists)}": (options | lists, cells) for text, options in plain.items()}
        else:
            plain[name.strip("`")] = eval(name.strip("`"), {"Mask": dict})
            found[name.strip("`")] = (plain[name.strip("`")], cells)
    return found


MASKS = mask_rows()
COLUMNS = list(table("mask")[0])[1:]
KERNELS = {row["kernel"].strip("`"): row for row in table("kernel")}
REFUSED = [(row["refused"].strip("`"), row["names"].split(", ")) for row in table("refused")]


def ways(column: str) -> list[dict]:
    """What a column stands for: arguments of a ring, of inputs, or both."""
    words = column.replace(",", "").split()
    kinds = {"rotate": "rotate", "routing": "routing"}
    if words[0] in kinds:
        return [{kinds[words[0]]: value} for value in words[1:]]
    named = {"softcap": [{"softcap": 1.5}], "sinks": [{"made": {"sinks": torch.float32}}],
             "Dv != D": [{"made": {"head_dim_v": 12}}, {"made": {"head_dim_v": 3}}], "Ulysses": [{"ulysses_size": 2}],
             "B > 1": [{"made": {"batch": 2}}], "Sq != Sk": [{"made": {"seq_len_k": 37}}, {"made": {"seq_len_k": 17}}]}
    return named[column] if column in named else [{"layout": kind} for kind in words]


def attempt(options: dict, way: dict) -> list[str]:
    """What is out of budget of a ring of three with this mask, asked for this way."""
    way = dict(way)
    made = {"heads": 4, "kv_heads": 2, "head_dim": 8} | way.pop("made", {})
    if "cu_seqlens_k" in options:
        made.setdefault("seq_len_k", 37)
        if made["seq_len_k"] < options["cu_seqlens_k"][-1]:
            options = options | {"cu_seqlens_k": (0, 5, 8, made["seq_len_k"])}
    inputs, mask, ulysses_size = make_inputs(LENGTH, **made), Mask(**options), way.pop("ulysses_size", 1)
    keys = inputs.k.shape[1]
    layout = Layout(way.pop("layout", "zigzag"), LENGTH, RANKS, mask, ulysses_size)
    layout_k = Layout("striped", keys, RANKS, None, ulysses_size) if keys != LENGTH else None
    ours = run(simulate, inputs, cp_size=RANKS, layout=layout, layout_k=layout_k, mask=mask, kernel="reference", **way)
    pairs = allowed_pairs(torch.arange(LENGTH), torch.arange(keys), seq_len_q=LENGTH, seq_len_k=keys, **options)
    softcap = {name: way[name] for name in ("softcap",) if name in way}
    return [str(verdict) for verdict in judge(ours, inputs, allowed=pairs, **softcap)]


def test_the_tables_cover_every_option_of_a_mask_every_kernel_and_every_way_to_ask():
    assert len(MASKS) == 3 * 10 and len(REFUSED) > 20
    given = set().union(*(options for options, _ in MASKS.values()))
    assert given == {"causal", "window_size", "cu_seqlens", "cu_seqlens_k", "prefix_lens", "chunk_size", "first_tokens"}
    assert KERNELS.keys() == set(dispatch.KERNELS) - {"auto"}
    values = {key: {way[key] for column in COLUMNS for way in ways(column) if key in way}
              for key in ("layout", "rotate", "routing")}
    assert values == {"layout": {"contiguous", "zigzag", "striped", "balanced", "auto"}, "rotate": {"kv", "q"},
                      "routing": {"ring", "direct", "allgather"}}
    assert {cell for _, cells in MASKS.values() for cell in cells.values()} == {"yes", "no"}


@pytest.mark.parametrize("column", COLUMNS)
def test_every_cell_of_this_column_is_right_or_is_refused_naming_the_option(column):
    supported = 0
    for name, (options, cells) in MASKS.items():
        for way in ways(column):
            if cells[column] == "yes":
                assert not attempt(options, way), (name, way)
                supported += 1
            else:
                with pytest.raises((ValueError, NotImplementedError), match="cu_seqlens"):
                    attempt(options, way)
    assert supported >= 10


@pytest.mark.parametrize("name", [name for name, row in KERNELS.items() if name in ("reference", "cpu")])
def test_kernels_that_run_here_take_what_their_row_says(name):
    row = KERNELS[name]
    mask = dict(window_size=(5, 0), first_tokens=3)
    pairs = allowed_pairs(torch.arange(LENGTH), torch.arange(LENGTH), seq_len_q=LENGTH, seq_len_k=LENGTH, **mask)
    columns = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16, fp16", torch.float16: "bf16, fp16"}
    assert row["D"] == "any" and row["Dv != D"] == row["softcap"] == "yes"
    for dtype, column in columns.items():
        for head_dim, deterministic in itertools.product((3, 40, 300), (False, True)):
            inputs = make_inputs(LENGTH, heads=2, kv_heads=1, head_dim=head_dim, head_dim_v=5, dtype=dtype, sinks=torch.float32)
            arguments = dict(cp_size=RANKS, mask=Mask(**mask), kernel=name, softcap=2.0, deterministic=deterministic)
            if row[column] == "yes":
                assert not judge(run(simulate, inputs, **arguments), inputs, allowed=pairs, softcap=2.0), (dtype, head_dim)
            else:
                with pytest.raises(RuntimeError, match=f"kernel='{name}'.*dtype"):
                    run(simulate, inputs, **arguments)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_s_row_is_what_it_says_of_itself(name):
    """Wherever the GPU kernels may run: they judge dtype and head dims before they ask for a device."""
    backend, row = {"reference": reference, "cpu": cpu, "hopper": hopper}.get(name), KERNELS[name]
    if backend is None:
        backend = pytest.importorskip("ringflash.kernels.triton_backend")
    device = torch.device("cuda" if name in ("triton", "hopper") else "cpu")

    def complaint(dtype=torch.bfloat16, head_dim=64, head_dim_v=None):
        reason = backend.unavailable(device, dtype, head_dim, True, head_dim_v)
        return reason is not None and reason.startswith(("dtype", "head_dim"))

    for column, dtypes in (("fp64", [torch.float64]), ("fp32", [torch.float32]), ("bf16, fp16", [torch.bfloat16, torch.float16])):
        assert {complaint(dtype) for dtype in dtypes} == {row[column] == "no"}, column
    assert complaint(head_dim_v=48) == (row["Dv != D"] == "no")
    dims = row["D"]
    taken = [head_dim for head_dim in range(1, 300) if not complaint(head_dim=head_dim)]
    low, _, high = dims.partition(" to ")
    assert taken == (list(range(1, 300)) if dims == "any" else list(range(int(low), int(high) + 1)) if high
                     else [int(n) for n in dims.split(", ")])


@pytest.mark.parametrize(("expression", "names"), REFUSED, ids=[expression for expression, _ in REFUSED])
def test_what_is_refused_raises_before_anything_is_computed_and_names_the_option(expression, names, monkeypatch):
    monkeypatch.setattr(reference, "forward", None)
    monkeypatch.setattr(cpu, "forward", None)
    inputs = make_inputs(LENGTH, heads=4, kv_heads=2)
    scope = {"Mask": Mask, "Layout": Layout, "ring_attention": ring_attention, "simulate": simulate, "torch": torch,
             "q": inputs.q, "k": inputs.k, "v": inputs.v}
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        eval(expression, scope)
    assert all(name in str(caught.value) for name in names), caught.value
