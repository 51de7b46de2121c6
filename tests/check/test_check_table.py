"""Claims about verdicts, the table and the exit code of the check."""
import json

import pytest

from ringflash.launch import check
from ringflash.launch.check_cells import TENSORS, Cell
from ringflash.launch.check_table import CellVerdict, grid, report, table, write_json

CELL = Cell("cpu", "fp32", "causal", "zigzag", 3, 4, 61, 32)


def verdict(worst: float = 0.5, **changes) -> CellVerdict:
    return CellVerdict(**{"cell": CELL, "ratios": {**dict.fromkeys(TENSORS, 0.25), "dk": worst}, "bitwise": {}, **changes})


@pytest.mark.parametrize("bad, why", [
    (verdict(1.5), "dk 1.50x"), (verdict(float("inf")), "dk"), (verdict(float("nan")), "dk"),
    (verdict(failure="RuntimeError: no"), "RuntimeError: no"),
    (verdict(bitwise={"out": True, "lse": False}), "lse is not the same bits"),
], ids=["over", "inf", "nan", "failed", "bits"])
def test_a_cell_is_ok_only_when_all_ratios_are_at_most_one_and_all_bits_agree(bad, why):
    assert verdict(1.0, bitwise={"out": True}).ok
    assert not bad.ok and why in bad.why()


def test_the_table_has_one_line_per_kernel_dtype_mask_and_layout_with_the_worst_ratio():
    lines = table([verdict(0.5), verdict(0.9), verdict(0.1)]).splitlines()
    assert len(lines) == 2
    assert lines[1].split() == ["cpu", "fp32", "causal", "zigzag", "3", "0.25", "0.25", "0.25", "0.90", "0.25", "-", "-", "ok"]
    assert "FAIL" in table([verdict(0.5), verdict(1.1)])


def test_a_report_of_no_cells_or_of_one_bad_cell_does_not_hold(capsys):
    assert report("t", [verdict()])
    assert not report("t", [verdict(), verdict(1.2)])
    assert "FAIL cpu fp32 causal zigzag W=3 S=61" in capsys.readouterr().out
    assert not report("t", [])


def test_columns_of_a_grid_line_up():
    lines = grid(["name", "n"], [["a", "1"], ["long name", "100"]]).splitlines()
    assert lines == ["name         n", "a            1", "long name  100"]


def test_json_holds_every_cell_and_no_bare_infinity(tmp_path):
    write_json(tmp_path / "sub" / "check.json", {"matrix": [verdict(), verdict(float("inf"))]}, False)
    found = json.loads((tmp_path / "sub" / "check.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert found["ok"] is False and "torch" in found["environment"]
    assert [cell["ok"] for cell in found["matrix"]] == [True, False]
    assert found["matrix"][0]["mask"] == "causal" and found["matrix"][1]["ratios"]["dk"] is None


@pytest.mark.parametrize("argv, named", [
    (["--masks", "diagonal"], "diagonal"), (["--kernels", "magic"], "magic"), (["--processes", "0"], "processes"),
    (["--dtypes", "int8"], "int8"), (["--planted", "nothing"], "nothing"), (["--run", "x"], "--run"),
    (["--delays", "3"], "--delays"), (["--quick", "--full"], "--full"),
    (["--train", "--run", "no/such/folder"], "no/such/folder"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_options_that_make_no_sense_exit_with_2_and_say_which(argv, named, capsys):
    with pytest.raises(SystemExit) as left:
        check.main(argv)
    assert left.value.code == 2
    assert named in capsys.readouterr().err


def test_a_kernel_that_cannot_run_here_exits_with_1_and_the_reason(capsys):
    assert check.main(["--quick", "--device", "cpu", "--kernels", "hopper"]) == 1
    assert "hopper" in capsys.readouterr().err


def test_memory_without_a_gpu_is_refused(capsys):
    assert check.main(["--memory", "--device", "cpu"]) == 1
    assert "CUDA" in capsys.readouterr().err
