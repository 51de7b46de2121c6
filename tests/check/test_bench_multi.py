"""bench multi without GPUs: its options, its tables and pictures, and what makes it fail."""
import argparse

import pytest
import torch

from ringflash.launch import bench, bench_multi, bench_multi_check, bench_multi_show

RECORDS = [
    {"section": "stress", "without": None, "steps": 10, "blocks": 20, "wrong": 0, "seconds": 0.1, "ok": True},
    {"section": "matrix", "carrier": "copy", "cells": 2, "ok": 2, "worst_of_budget": 0.3, "bad": [], "seconds": 1.0},
    {"section": "link", "carrier": "copy", "bytes": 4 << 20, "rows": 1024, "ms": 0.03, "gb_per_s": 140.0, "host_ms": 0.02},
    {"section": "overlap", "carrier": "copy", "rows": 8192, "kernel": "triton", "kernel_ms": 1.0, "hop_ms": 0.1, "both_ms": 1.01,
     "added": 0.01, "hidden": 0.9, "kernel_tflops": 500.0, "host_ms": {}},
    {"section": "ring", "candidate": "one GPU", "rows": 8192, "failure": None, "kernel": "triton", "forward_ms": 1.0,
     "both_ms": 3.0, "forward_tflops": 500.0, "backward_tflops": 400.0, "both_tflops": 420.0, "both_of_one_gpu": 1.0,
     "difference": None},
    {"section": "ring", "candidate": "torch allgather flash", "rows": 8192, "failure": "RuntimeError: refused"},
    {"section": "nccl", "failure": "no NCCL"},
]


def read(*arguments):
    parser = argparse.ArgumentParser()
    bench_multi.add_parser(parser.add_subparsers(dest="what"))
    return bench_multi.read(parser.parse_args(["multi", *arguments]))


def test_options_are_read_and_refused_by_name():
    assert read("--rows", "8,16", "--exchanges", "copy").rows == (8, 16)
    assert "trace" not in read().sections and "trace" in read("--trace", "x").sections
    with pytest.raises(ValueError, match="--sections=speed: unknown; valid: stress, matrix"):
        read("--sections", "link,speed")
    for wrong in ("gloo", ""):
        with pytest.raises(ValueError, match="--exchanges=.*valid are nccl, nccl-high, copy"):
            read("--exchanges", wrong)


def test_peers_are_named_by_what_travels_how_and_kernel():
    assert read().peers == ("allgather-cudnn", "allgather-flash", "alltoall-cudnn", "alltoall-flash")
    assert read("--peers", "").peers == ()
    with pytest.raises(ValueError, match="--peers=ring: unknown; valid: allgather-cudnn"):
        read("--peers", "ring")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_without_gpus_it_ends_with_one_message(capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["multi"])
    assert ended.value.code == 2
    assert "bench multi: needs GPUs" in capsys.readouterr().err


def test_every_record_is_in_a_table_and_a_picture(tmp_path):
    shown = bench_multi_show.table(RECORDS)
    for text in ("nothing", "140", "90", "one GPU", "refused", "NCCL groups: no NCCL", "0.30"):
        assert text in shown, text
    bench_multi_show.draw(RECORDS, str(tmp_path / "bench"))
    assert {path.name for path in tmp_path.iterdir()} == {"bench-links.png", "bench-overlap.png", "bench-ring.png"}


def test_wrong_blocks_a_cell_over_budget_and_a_section_that_did_not_run_fail_the_run():
    assert [bench_multi.held(record) for record in RECORDS] == [True] * 6 + [False]
    assert not bench_multi.held({**RECORDS[0], "ok": False}) and not bench_multi.held({**RECORDS[1], "ok": 1})


def test_the_matrix_of_several_gpus_has_every_mask_and_layout():
    cells = bench_multi_check.matrix_cells(("triton",), ("bf16",), 2)
    assert len({(cell.mask, cell.layout) for cell in cells}) == 15 and {cell.cp_size for cell in cells} == {2}
