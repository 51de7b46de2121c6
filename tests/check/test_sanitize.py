"""Claims about what sanitizers watch (the script itself: test_prove.py): rewritten PTX is the same kernel, with more arrivals."""
import re

import pytest
import torch

from ringflash.launch import prove, sanitize_racecheck

triton = pytest.importorskip("triton", reason="needs the triton package")

from ringflash.kernels.triton_support import INTERPRETED  # noqa: E402

compiles = pytest.mark.skipif(INTERPRETED, reason="under TRITON_INTERPRET=1 nothing is compiled")

SMALL = """\
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel()
{
$L__func_begin0:
	mov.u32 	%r9, %tid.x;
	and.b32 	%r8, %r9, 127;
	and.b32 	%r7, %r9, 31;
	setp.eq.b32 	%p1, %r8, 0;
	setp.eq.b32 	%p2, %r7, 0;
	@%p1 mbarrier.init.shared::cta.b64 [%r1], 3;
	bar.sync 	0, 128;
	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];
	bra.uni 	$L__BB0_1;
$L__BB0_1:
	bar.warp.sync 	-1;
	@%p2 mbarrier.arrive.shared::cta.b64 _, [%r1];
	@%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 512;
	barrier.sync 	1;
	ret;
}"""


def kernel_of(name: str):
    """(kernel, arguments, options) of a launch."""
    from ringflash.kernels.hopper_backward_kernel import backward_kernel
    from ringflash.kernels.hopper_forward import forward_kernel
    from ringflash.launch.sanitize_probes import RECORDS, WORDS, record_kernel
    from ringflash.tests.kernels import test_hopper_backward_compile, test_hopper_compile

    part, _, head_dim = name.partition("-")
    if part == "probe":
        return record_kernel, {"out": torch.zeros(2, WORDS, dtype=torch.int32), "RECORDS": RECORDS, "WORDS": WORDS,
                               "READER_WAITS": True, "WRITER_WAITS": True}, {"num_warps": 4}
    if part == "forward":
        return forward_kernel, *test_hopper_compile.launch(int(head_dim), torch.bfloat16, True, True, 0.0, True)
    return backward_kernel, *test_hopper_backward_compile.launch(int(head_dim), torch.bfloat16, 0.0, part == "backward")[1:]


@compiles
@pytest.mark.parametrize("name", ["probe", "forward-64", "forward-128", "forward-256", "backward-64", "backward-128",
                                  "deterministic-64", "deterministic-128"])
def test_every_thread_arrives_for_itself_and_some_threads_meet_at_mbarriers(name):
    from ringflash.tests.support.gluon_compile import compiled
    from ringflash.tests.support.triton_compile import _ptxas

    plain = compiled(*kernel_of(name)).asm["ptx"]
    made = sanitize_racecheck.followed(plain)
    assert re.search(r"bar\.sync\s+\d+, \d+", plain) and not re.search(r"bar\.sync\s+\d+, \d+", made)
    assert made.count("barrier.sync") == plain.count("barrier.sync"), "those of all threads stay"
    assert not re.search(r"@%p\d+ mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];", made)
    counts = [[int(n) for n in re.findall(r"mbarrier\.init\.shared::cta\.b64 \[%r\d+\], (\d+);", text)] for text in (plain, made)]
    assert counts[0] and counts[1] == [128 * n for n in counts[0]]
    report = _ptxas(made, re.search(r"\.target (sm_\w+)", made).group(1))
    assert "1024 bytes smem" in report and "(C7" not in report


@compiles
@pytest.mark.parametrize("with_dq", [True, False])
def test_the_backward_initialises_the_barriers_that_it_uses_and_no_others(with_dq):
    """racecheck found it: Triton gives the memory of a barrier that nothing waits at to the arguments of the partitions, which all
    threads write while one of them initialises the barrier."""
    from ringflash.tests.support.gluon_compile import compiled

    ptx = compiled(*kernel_of("backward-64" if with_dq else "deterministic-64")).asm["ptx"]
    # kv_full, done, q_full and q_empty of two stages; dq_empty, and ds_full, ds_empty, dq_full of two
    assert ptx.count("mbarrier.init") == 6 + (7 if with_dq else 0)


def test_a_small_kernel_is_rewritten_as_expected():
    made = [line.strip() for line in sanitize_racecheck.followed(SMALL).split("\n")]
    assert "@%p1 mbarrier.init.shared::cta.b64 [%r1], 384;" in made
    assert "mbarrier.arrive.shared::cta.b64 _, [%r1];" in made, "a warpgroup: 128 arrivals"
    assert "mbarrier.arrive.shared::cta.b64 _, [%r1], 4;" in made, "a warp: 32 arrivals of 4"
    assert "@%p2 mbarrier.arrive.shared::cta.b64 _, [%r2], 127;" in made, "beside the one that brings bytes"
    assert "@first mbarrier.init.shared::cta.b64 [racecheck_smem+0], 128;" in made
    assert made.index("bar.sync 0;") < made.index("mbarrier.arrive.shared::cta.b64 _, [racecheck_smem+0];")
    assert "barrier.sync \t1;" in made


def test_a_barrier_whose_number_is_in_a_register_may_be_any():
    made = sanitize_racecheck.followed(SMALL.replace("bar.sync \t0, 128;", "bar.sync \t%r5, 128;"))
    assert "mad.lo.u32 address, %r5, 8, address;" in made and "mbarrier.arrive.shared::cta.b64 _, [address];" in made
    assert re.findall(r"@first mbarrier\.init\.shared::cta\.b64 \[racecheck_smem\+(\d+)\], 128;", made) == [
        str(8 * number) for number in range(16)]


@pytest.mark.parametrize("old, new, word", [
    ("bar.warp.sync \t-1;", "bra $L__BB0_2;", "an arrival of None threads"),
    # between the barrier and the arrival: an access that the others' arrivals would order too; a smaller barrier
    ("bar.sync \t0, 128;", "bar.sync \t0, 128;\n\tst.shared.b32 \t[%r3], 1;", "an arrival of None threads"),
    ("bar.sync \t0, 128;", "bar.sync \t0, 128;\n\t@%p1 ld.shared.v4.b32 \t{%r3}, [%r4];", "an arrival of None threads"),
    ("bar.sync \t0, 128;", "bar.sync \t0, 128;\n\t@%p1 st.shared.b32 [%r3], 1; add.s32 %r3, %r3, 1;", "an arrival of None"),
    ("bar.sync \t0, 128;", "bar.sync \t0, 128;\n\tld.b32 \t%r3, [%rd4];", "an arrival of None threads"),
    ("bar.sync \t0, 128;", "bar.sync \t0, 128;\n\tcp.async.bulk.commit_group;", "an arrival of None threads"),
    ("bar.sync \t0, 128;", "bar.sync \t0, 128;\nagain:", "an arrival of None threads"),
    ("bar.sync \t0, 128;", "bar.sync \t0, 128;\n\tbar.warp.sync \t-1;", "an arrival of 0 threads"),
    ("bar.warp.sync \t-1;", "@%p3 bar.warp.sync \t-1;", "an arrival of None threads"),
    ("bar.warp.sync \t-1;", "bar.warp.sync \t1;", "an arrival of None threads"),
    ("init.shared::cta.b64 [%r1], 3;", "init.shared::cta.b64 [%r1], %r4;", "of which 0 are initialised"),
    # not the group's first thread, or not known to be
    ("and.b32 \t%r8, %r9, 127;", "and.b32 \t%r8, %r9, 31;", "by who knows which"),
    ("setp.eq.b32 \t%p1, %r8, 0;", "and.pred \t%p1, %p3, %p4;", "by who knows which"),
    ("setp.eq.b32 \t%p1, %r8, 0;", "setp.eq.b32 \t%p1, %r8, 0;\n\tsetp.eq.b32 \t%p1, %r6, 0;", "by who knows which"),
    ("mov.u32 \t%r9, %tid.x;", "mov.u32 \t%r9, %tid.y;", "by who knows which"),
    ("$L__BB0_1:", "$L__BB0_1:\n\t@%p3 setp.eq.b32 \t%p1, %r6, 0;", "by who knows which"),
    ("$L__BB0_1:", "$L__BB0_1:\n\tld.global.v2.b32 \t{%r6, %r8}, [%rd1];", "by who knows which"),
    ("bar.sync \t0, 128;", "bar.sync \t0, 96;", "an arrival of 96 threads"),
    ("_, [%r1];", "_, [%r1], 2;", "of a known form"),
    ("barrier.sync \t1;", "barrier.sync \t1, 256;", "a barrier of an unknown form"),
    ("barrier.sync \t1;", "bar.sync \t0, 256;", "of 128 threads and of 256"),
    ("$L__func_begin0:", "", "where the kernel begins"),
])
def test_ptx_of_another_form_is_refused(old, new, word):
    assert old in SMALL
    with pytest.raises(ValueError, match=word):
        sanitize_racecheck.followed(SMALL.replace(old, new))


@compiles
def test_triton_compiles_what_was_rewritten(monkeypatch, tmp_path):
    from triton import knobs

    from ringflash.tests.support.gluon_compile import compiled

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))  # which is also what triton writes
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)
    monkeypatch.setattr(sanitize_racecheck, "rewritten", 0)
    assert "racecheck_smem" not in compiled(*kernel_of("probe")).asm["ptx"]
    sanitize_racecheck.install()
    assert re.fullmatch(re.escape(f"{tmp_path / 'cache'}-racecheck-") + "[0-9a-f]{12}", knobs.cache.dir), "of this rewriting alone"
    assert "racecheck_smem" in compiled(*kernel_of("probe")).asm["ptx"]
    assert sanitize_racecheck.rewritten == 1


def test_a_report_of_a_sanitizer_is_a_failure_of_its_part(monkeypatch):
    monkeypatch.setattr(prove, "find_sanitizer", lambda: "/somewhere/compute-sanitizer")
    parts = {part.name: part.argv for part in prove.gpu_parts(1, True) if part.argv[0] == "/somewhere/compute-sanitizer"}
    assert set(parts) == {"memcheck", "racecheck"}
    for name, argv in parts.items():
        assert argv[1:5] == ("--tool", name, "--error-exitcode", "9")
        assert ("--for-racecheck" in argv) == (name == "racecheck")
