"""A plan prints itself: who computes what, what travels, how even the work is."""
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
    assert lines[-1] == ("moves 0.50 of the full rotation's bytes in 1 hop; all to the next rank (the other way: 0.50); "
                         "busiest rank 1.44x the mean over all steps, 1.44x when each step waits for its busiest")


def test_the_summary_gives_the_reason_for_the_directions():
    assert "all to the previous rank (the other way: 0.94)" in show.summary(build_plan(Mask(), Layout("zigzag", 128, 8)))
    assert "all to the next rank, as demanded" in show.summary(build_plan(Mask(), Layout("zigzag", 128, 8), lanes=(1,)))
    window = build_plan(Mask(window_size=(4, 0)), Layout("zigzag", 128, 8))
    assert "both directions, each range the shorter way" in show.summary(window)
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
def test_png_is_drawn_for_dense_windowed_and_empty_plans(tmp_path, options):
    path = tmp_path / "plan.png"
    show.png(build_plan(Mask(**options), Layout("zigzag", 64, 4)), path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_the_command_prints_the_table_and_draws(tmp_path, capsys):
    path = tmp_path / "plan.png"
    arguments = ["--seq-len", "32", "--cp-size", "4", "--layout", "striped", "--mask", "causal", "--window-size", "7", "0"]
    assert show.main([*arguments, "--cu-seqlens", "0", "10", "30", "--png", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "striped, 32 tokens on 4 ranks, Mask(causal=True, window_size=(7, 0), cu_seqlens=[0, 10, 30])" in printed
    assert path.exists() and str(path) in printed


def test_the_command_shows_keys_of_another_length_and_layout(capsys):
    assert show.main(["--seq-len", "8", "--seq-len-k", "20", "--layout-k", "contiguous", "--cp-size", "2"]) == 0
    assert "zigzag, 8 tokens on 2 ranks, keys contiguous of 20 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "rule"), [
    (["--seq-len", "0", "--cp-size", "2"], "seq_len=0"),
    (["--seq-len", "8", "--cp-size", "2", "--window-size", "3", "1"], "right must be 0 or -1"),
    (["--seq-len", "8", "--cp-size", "2", "--cu-seqlens", "0", "9"], "must end within seq_len=8"),
])
def test_the_command_refuses_bad_input_with_the_rule(arguments, rule, capsys):
    with pytest.raises(SystemExit) as stopped:
        show.main(arguments)
    assert stopped.value.code == 2 and rule in capsys.readouterr().err
