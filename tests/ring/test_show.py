"""A plan prints itself: who computes what, what travels, how even the work is."""
import re

import pytest

from ringflash import Layout, Mask
from ringflash.layout import KINDS
from ringflash.ring import show
from ringflash.ring.plan import PASSES, build_plan
from ringflash.tests.support.plan_cases import cases


def test_text_names_each_visit_and_what_travels():
    lines = show.text(build_plan(Mask(), Layout("contiguous", 8, 2)), "backward").splitlines()
    assert lines[0] == "contiguous, 8 tokens on 2 ranks, Mask(causal=True)"
    cells = [line.split() for line in lines[3:-1]]
    assert cells == [
        ["0", "0", "own", "0:4", "10", "-", "0:4", "of", "0", "to", "1"],
        ["0", "1", "own", "0:4", "10", "0:4", "of", "0", "from", "0", "-"],
        ["1", "1", "rank", "0", "0:4", "16", "-", "-"],
        ["2", "0", "-", "-", "0", "grad", "0:4", "of", "0", "from", "1", "-"],
        ["2", "1", "-", "-", "0", "-", "grad", "0:4", "of", "0", "to", "0"],
    ]
    assert lines[-1] == ("moves 0.50 of the full rotation's bytes in 1 hop; neighbour ring (owner to reader directly: as many "
                         "bytes); all to the next rank (the other way: 0.50); "
                         "busiest rank 1.44x the mean over all steps, 1.44x when each step waits for its busiest")


def test_text_names_the_visit_to_the_first_keys_of_documents():
    lines = show.text(build_plan(Mask(window_size=(2, 0), first_tokens=1), Layout("contiguous", 12, 2))).splitlines()
    assert [line.split("  ")[0:1] for line in lines[3:5]] == [["0"], ["0"]]
    assert "own own first keys" in lines[3] and lines[4].split()[2:4] == ["own", "0:6"]
    assert lines[5].split()[2:9] == ["rank", "0", "rank", "0", "first", "keys", "0:1,4:6"]


def test_the_summary_gives_the_reason_for_the_directions():
    assert "all to the previous rank (the other way: 0.94)" in show.summary(build_plan(Mask(), Layout("zigzag", 128, 8)))
    assert "all to the next rank, as demanded" in show.summary(build_plan(Mask(), Layout("zigzag", 128, 8), lanes=(1,)))
    window = build_plan(Mask(window_size=(4, 0)), Layout("zigzag", 128, 8))
    assert "both directions, each range the shorter way" in show.summary(window)
    assert "neighbour ring (owner to reader directly: as many bytes)" in show.summary(window)
    # A ring carries rows of these documents past ranks that do not read them.
    far = Mask(cu_seqlens=[0, 8, 8, 40, 128], chunk_size=64)
    for routing, why in (("auto", "fewer bytes"), ("direct", "as demanded")):
        plan = build_plan(far, Layout("zigzag", 128, 8), routing=routing)
        assert f"steps; owner to reader directly, {why} (neighbour ring: 0." in show.summary(plan)
        assert "the next rank" not in show.summary(plan)
    ring = show.summary(build_plan(far, Layout("zigzag", 128, 8), routing="ring"))
    assert "hops; neighbour ring, as demanded (owner to reader directly: 0." in ring
    assert "nothing travels" in show.summary(build_plan(Mask(window_size=(0, 0)), Layout("zigzag", 128, 8)))
    assert "no pair is allowed" in show.summary(build_plan(Mask(cu_seqlens=[0]), Layout("zigzag", 8, 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_any_plan_can_be_shown_and_its_pairs_add_up(kind):
    for case in cases(kind, 3, seed=14, lengths=1):
        for pass_ in PASSES:
            lines = show.text(case.plan, pass_).splitlines()
            assert all(len(line) == len(line.rstrip()) for line in lines)
        pairs = sum(case.plan.num_pairs(rank, step) for rank in range(3) for step in range(case.plan.num_steps))
        assert pairs == case.allowed.sum()


@pytest.mark.parametrize("options", [dict(), dict(window_size=(4, 0)), dict(cu_seqlens=[0])])
@pytest.mark.parametrize("routing", ["auto", "direct"])
def test_png_is_drawn_for_dense_windowed_and_empty_plans(tmp_path, options, routing):
    path = tmp_path / "plan.png"
    show.png(build_plan(Mask(**options), Layout("zigzag", 64, 4), routing=routing), path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_the_command_prints_the_table_and_draws(tmp_path, capsys):
    path = tmp_path / "missing" / "plan.png"
    arguments = ["--seq-len", "32", "--cp-size", "4", "--layout", "striped", "--mask", "causal", "--window-size", "7", "0"]
    assert show.main([*arguments, "--cu-seqlens", "0", "10", "30", "--png", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "striped, 32 tokens on 4 ranks, Mask(causal=True, window_size=(7, 0), cu_seqlens=[0, 10, 30])" in printed
    assert path.exists() and str(path) in printed


def test_the_command_shows_keys_of_another_length_and_layout(capsys):
    assert show.main(["--seq-len", "8", "--seq-len-k", "20", "--layout-k", "contiguous", "--cp-size", "2"]) == 0
    assert "zigzag, 8 tokens on 2 ranks, keys contiguous of 20 tokens" in capsys.readouterr().out


def test_the_command_takes_every_option_of_a_mask_and_the_routing(capsys):
    documents = ["--cu-seqlens", "0", "8", "20", "--cu-seqlens-k", "0", "3", "30", "--seq-len-k", "30"]
    options = ["--prefix-lens", "2", "--first-tokens", "3", "--window-size", "4", "0", "--routing", "direct"]
    assert show.main(["--seq-len", "20", "--cp-size", "4", *documents, *options]) == 0
    printed = capsys.readouterr().out
    assert "cu_seqlens=[0, 8, 20], cu_seqlens_k=[0, 3, 30], prefix_lens=[2, 2], first_tokens=3" in printed
    assert "owner to reader directly, as demanded" in printed
    assert show.main(["--seq-len", "20", "--cp-size", "4", "--chunk-size", "6"]) == 0
    assert "chunk_size=6" in capsys.readouterr().out


def test_the_command_makes_layouts_from_documents_and_prints_why(capsys):
    size = ["--seq-len", "8192", "--cp-size", "4", "--documents", "lognormal:sigma=1.5,seed=0,mean=256,longest=4096", "--summary"]
    assert show.main([*size, "--layout", "balanced"]) == 0
    first, second, third, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"layout made in [0-9.]+ ms, plan in [0-9.]+ ms", last)
    assert first.startswith("layout balanced: ") and "documents cut over all ranks" in first
    assert second.startswith("balanced, 8,192 tokens on 4 ranks, Mask(causal=True, cu_seqlens=<") and "busiest rank 1.0" in third
    assert show.main([*size, "--layout", "auto"]) == 0
    assert "layout auto: balanced: " in capsys.readouterr().out
    assert show.main([*size, "--layout", "zigzag"]) == 0
    assert capsys.readouterr().out.startswith("zigzag, 8,192 tokens")


@pytest.mark.parametrize(("arguments", "rule"), [
    (["--seq-len", "8", "--cp-size", "2", "--documents", "uniform:seed=1"], "must be like lognormal:sigma=1.0,seed=0"),
    (["--seq-len", "8", "--cp-size", "2", "--documents", "lognormal:seed=1"], "must be like lognormal"),
    (["--seq-len", "8", "--cp-size", "2", "--documents", "lognormal:sigma=1,seed=1", "--cu-seqlens", "0", "8"],
     "give one of them"),
    (["--seq-len", "0", "--cp-size", "2"], "seq_len=0"),
    *((["--seq-len", "8", "--cp-size", "2", "--documents", f"lognormal:sigma=1,seed=1,{wrong}"], f"documents: {rule}")
      for wrong, rule in (("sigma=-1", "sigma=-1.0: must lie in [0, 10]"), ("sigma=nan", "sigma=nan"), ("sigma=1e200", "sigma=1e+200"),
                          ("seed=-1", "seed=-1: must be >= 0"), ("mean=0", "mean=0: must be >= 1"), ("mean=" + "9" * 30, "mean=999"), ("longest=0", "longest=0"),
                          ("first=0", "first=0"))),
    (["--seq-len", "8", "--cp-size", "2", "--png", "x.xyz"], "--png x.xyz: Format 'xyz' is not supported"),
    (["--seq-len", "8", "--cp-size", "2", "--png", f"{__file__}/x.png"], "/x.png: "),
    (["--seq-len", "8", "--cp-size", "2", "--window-size", "3", "1"], "right must be 0 or -1"),
    (["--seq-len", "8", "--cp-size", "2", "--cu-seqlens", "0", "9"], "must end within seq_len=8"),
])
def test_the_command_refuses_bad_input_with_the_rule(arguments, rule, capsys):
    with pytest.raises(SystemExit) as stopped:
        show.main(arguments)
    assert stopped.value.code == 2 and rule in capsys.readouterr().err
