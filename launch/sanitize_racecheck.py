"""Orders that racecheck (2025.3) does not follow, written out for it in the PTX of the same kernels. See Note [Racecheck].

1. A group meets in a barrier, then one of its threads arrives at an mbarrier for all: taken for the order of that thread's
   accesses. Here each thread arrives, and 128 arrivals stand for one. (One that also announces bytes, `expect_tx`, arrives 1 + 127
   times: it orders no more than its own accesses, then as before.)
2. After a barrier of some of a CTA's threads, one of all, `__syncthreads` included, orders nothing. Here a barrier of some is an
   mbarrier at which they arrive and wait.

The same threads meet at the same places as before: nothing is ordered that was not. So an arrival is rewritten only where a
barrier of its group stands before it with nothing but arithmetic in between, and its thread is the group's first.
"""
from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

FOR_ALL = 128  # arrivals that stand for one
BARRIERS = 16  # of a CTA
MEMORY = 1024  # bytes in front of the kernel's own shared memory, which begins at a multiple of as many

_MEET = re.compile(r"^\s*bar\.sync\s+(\d+|%r\d+), (\d+);\s*$")
_SOME = re.compile(r"\bbar(rier)?(\.cta)?\.(sync|arrive|red)\S*\s+[^;]*,")
_ARRIVE = re.compile(r"@(%p\d+) (mbarrier\.arrive\.shared(?:::cta)?\.b64 _, \[[^\]]+\]);")
_EXPECT = re.compile(r"(@%p\d+) mbarrier\.arrive\.expect_tx\.shared(?:::cta)?\.b64 _, (\[[^\]]+\]), \d+;")
_INIT = re.compile(r"(mbarrier\.init\.shared(?:::cta)?\.b64 \[[^\]]+\]), (\d+);")
_WARP = re.compile(r"^\s*bar\.warp\.sync\s+-1;\s*$")
# What may stand between a barrier and its arrival: arithmetic on registers, and what is no instruction.
_HARMLESS = re.compile(
    r"^\s*((add|sub|mad|mul|shl|shr|and|or|xor|not|mov|setp|selp)(\.\w+)+\s+%[^;\[\]]*;)?\s*(//.*)?$"
    r"|^\s*\.loc\s|^\$L__tmp\d+:$")
_BEGIN = "$L__func_begin0:"

_MEETING = """\
{{
	.reg .pred met;{address}
	mbarrier.arrive.shared::cta.b64 _, [{at}];
meetLoop:
	mbarrier.try_wait.parity.shared::cta.b64 met, [{at}], %racecheck_phase;
	@!met bra.uni meetLoop;
}}
	xor.b32 %racecheck_phase, %racecheck_phase, 1;
	bar.warp.sync -1;"""
_ADDRESS = """
	.reg .b32 address;
	mov.u32 address, racecheck_smem;
	mad.lo.u32 address, {number}, 8, address;"""

_START = """\
	.reg .b32 %racecheck_phase;
{{
	.reg .pred first;
	.reg .b32 thread;
	mov.u32 thread, %tid.x;
	setp.eq.u32 first, thread, 0;
{inits}
	bar.sync 0;
}}
	mov.b32 %racecheck_phase, 0;"""

rewritten = 0  # kernels


def followed(ptx: str) -> str:
    """The kernel's PTX with both orders written out. A thread meets with one group only, as in Triton's partitions (not checked).

    Raises ValueError for PTX in which it does not know who arrives: another Triton may write it in another way.
    """
    source = ptx.split("\n")
    lines, group, known, started, groups = [], None, 0, 0, {}
    for line in source:
        if _WARP.match(line):
            group = 32 if group in (None, 32) else 0
        elif met := _MEET.match(line):
            number, group = met.group(1), int(met.group(2))
            if groups.setdefault(number, group) != group:
                raise ValueError(f"barrier {number} is of {groups[number]} threads and of {group}")
            line = _meeting(number)
        elif one := _ARRIVE.search(line):
            if not group or FOR_ALL % group:
                raise ValueError(f"an arrival of {group} threads: {line.strip()}")
            _check_first_of(one.group(1), group, source)
            known += 1
            each = "" if group == FOR_ALL else f", {FOR_ALL // group}"
            line = line[:one.start()] + one.group(2) + each + ";" + line[one.end():]
        elif one := _EXPECT.search(line):
            known += 1
            line += f"\n\t{one.group(1)} mbarrier.arrive.shared::cta.b64 _, {one.group(2)}, {FOR_ALL - 1};"
        elif start := _INIT.search(line):
            started += 1
            line = f"{line[:start.start()]}{start.group(1)}, {int(start.group(2)) * FOR_ALL};{line[start.end():]}"
        elif not _HARMLESS.match(line):
            group = None
        lines.append(line)
    if known != ptx.count("mbarrier.arrive"):
        raise ValueError(f"{ptx.count('mbarrier.arrive')} arrivals, of which {known} are of a known form")
    if started != ptx.count("mbarrier.init"):
        raise ValueError(f"{ptx.count('mbarrier.init')} mbarriers, of which {started} are initialised in a known form")
    if left := [line for line in lines if _SOME.search(line)]:
        raise ValueError(f"a barrier of an unknown form: {left[0].strip()}")
    if lines.count(_BEGIN) != 1:
        raise ValueError(f"{lines.count(_BEGIN)} places where the kernel begins")
    inits = "\n".join(f"\t@first mbarrier.init.shared::cta.b64 [racecheck_smem+{8 * number}], {threads};"
                      for number, threads in sorted(_numbered(groups).items()))
    lines.insert(lines.index(_BEGIN) + 1, _START.format(inits=inits))
    entry = next(i for i, line in enumerate(lines) if line.startswith(".visible .entry"))
    lines.insert(entry, f".shared .align {MEMORY} .b8 racecheck_smem[{MEMORY}];")
    return "\n".join(lines)


def _meeting(number: str) -> str:
    if number.isdigit():
        return _MEETING.format(address="", at=f"racecheck_smem+{8 * int(number)}")
    return _MEETING.format(address=_ADDRESS.format(number=number), at="address")


def _numbered(groups: dict[str, int]) -> dict[int, int]:
    """{barrier: its threads}. Triton 3.8 merges partitions and keeps the number in a register: then it may be any other one."""
    known = {int(number): threads for number, threads in groups.items() if number.isdigit()}
    others = {threads for number, threads in groups.items() if not number.isdigit()}
    if len(others) > 1:
        raise ValueError(f"barriers whose number is in a register, of {sorted(others)} threads")
    return {number: min(others) for number in range(BARRIERS)} | known if others else known


def _check_first_of(predicate: str, group: int, source: Sequence[str]) -> None:
    """Raises ValueError unless that is the predicate of a group's first thread, and of it alone."""
    text = _definition(predicate, source)
    compared = re.search(rf"setp\.eq\.[bsu]32\s+{predicate}, (%r\d+), 0;", text)
    masked = compared and re.search(r"and\.b32\s+%r\d+, (%r\d+), (\d+);", _definition(compared.group(1), source))
    if not masked or int(masked.group(2)) != group - 1 or "%tid.x" not in _definition(masked.group(1), source):
        raise ValueError(f"an arrival of {group} threads by who knows which: {text.strip()}")


def _definition(register: str, source: Sequence[str]) -> str:
    """The one instruction that writes it."""
    found = []
    for line in source:
        written = re.match(r"\s*(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|[^,]*),", line)
        if written and re.search(rf"{register}\b", re.sub(r"\[[^\]]*\]", "", written.group(1))):
            found.append(line)
    return found[0] if len(found) == 1 else f"{register} is written {len(found)} times"


def install() -> None:
    """From now on triton compiles kernels with mbarriers this way, into a cache of their own beside the usual one."""
    from triton import knobs

    key = f"racecheck-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]}"

    def hook(backend=None, stages=None, *unused):
        if stages is None:
            return key, key
        plain = stages["ptx"]
        stages["ptx"] = lambda source, metadata: _rewritten(plain(source, metadata))

    if not knobs.cache.dir.endswith(key):
        knobs.cache.dir = f"{Path(knobs.cache.dir)}-{key}"  # 3.6 has no part of a hook in its keys
    knobs.runtime.add_stages_inspection_hook = hook


def _rewritten(ptx: str) -> str:
    global rewritten
    if "mbarrier.init" not in ptx:
        return ptx
    rewritten += 1
    return followed(ptx)
