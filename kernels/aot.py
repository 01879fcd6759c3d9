"""Compile every kernel ahead of time for real GPUs, on a machine that has none.

``python -m icmllab.kernels.aot`` prints the table: registers, spilled bytes, shared memory and the
width of loads and stores for each target.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from icmllab.kernels.registry import Program, specs

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass(frozen=True)
class Compiled:
    """What a kernel became for one target.

    Attributes:
        registers: registers a thread (vector registers on AMD).
        spilled: bytes of local memory (scratch on AMD) a thread; 0 is wanted.
        shared: bytes of shared memory (LDS) a program.
        loads: bits of the widest global load.
        stores: bits of the widest global store.
        assembly: the text that these were read from.
    """

    registers: int
    spilled: int
    shared: int
    loads: int
    stores: int
    assembly: str


@cache
def compile_program(kernel: str, program: str, target: str) -> Compiled:
    """Compile one form of a kernel for one target.

    Args:
        kernel: a kernel's name in the registry.
        program: the name of one of its compiled forms.
        target: one of ``TARGETS``.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    form = specs()[kernel].programs[program]
    if target.startswith("sm_"):
        gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    else:
        gpu = GPUTarget("hip", target, 64)
    source = ASTSource(
        fn=form.kernel,
        signature=_signature(form),
        constexprs=form.constants,
        attrs={
            (form.kernel.arg_names.index(a),): [["tt.divisibility", 16]] for a in form.divisible
        },
    )
    built = triton.compile(source, target=gpu, options={"num_warps": form.num_warps})
    if target.startswith("sm_"):
        return _read_nvidia(built, target)
    return _read_amd(built)


def _signature(form: Program) -> dict[str, str]:
    """Triton wants every argument, in order, constants as ``constexpr``."""
    names = form.kernel.arg_names
    missing = [a for a in names if a not in form.signature and a not in form.constants]
    if missing:
        raise ValueError(f"signature lacks {', '.join(missing)} of {form.kernel.__name__}")
    return {a: "constexpr" if a in form.constants else form.signature[a] for a in names}


def _read_nvidia(built, target: str) -> Compiled:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = _run(tools / "cuobjdump", "--dump-resource-usage", file.name)
        sass = _run(tools / "nvdisasm", file.name)
    numbers = dict(re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage))
    return Compiled(
        registers=int(numbers["REG"]),
        spilled=int(numbers["LOCAL"]) + int(numbers["STACK"]),
        shared=built.metadata.shared,
        loads=_widest(re.findall(r"\bLDG\.E(?:\.\w+)*", sass)),
        stores=_widest(re.findall(r"\bSTG\.E(?:\.\w+)*", sass)),
        assembly=sass,
    )


def _widest(instructions: list[str]) -> int:
    """Bits of the widest of some SASS accesses; one without a width moves 32 or less."""
    widths = {"64": 64, "128": 128, "256": 256}
    found = [widths.get(part, 32) for i in instructions for part in i.split(".")]
    return max(found, default=0)


def _read_amd(built) -> Compiled:
    text = built.asm["amdgcn"]

    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s+(\d+)", text).group(1))

    def widest(kind: str) -> int:
        found = re.findall(
            rf"\b(?:global|buffer|flat)_{kind}_(dwordx[234]|dword|[us]?byte|[us]?short)", text
        )
        words = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64}
        return max((words.get(w, 32) for w in found), default=0)

    return Compiled(
        registers=number("vgpr_count"),
        spilled=number("private_segment_fixed_size") + 4 * number("vgpr_spill_count"),
        shared=built.metadata.shared,
        loads=widest("load"),
        stores=widest("store"),
        assembly=text,
    )


def _run(*command: object) -> str:
    return subprocess.run(
        [str(c) for c in command], check=True, capture_output=True, text=True
    ).stdout


def table() -> str:
    """The compilation table of every kernel as text."""
    rows = [("kernel", "form", "target", "registers", "spilled", "shared", "load", "store")]
    for name, spec in specs().items():
        for form in spec.programs:
            for target in TARGETS:
                c = compile_program(name, form, target)
                numbers = (c.registers, c.spilled, c.shared, f"{c.loads} b", f"{c.stores} b")
                rows.append((name, form, target, *map(str, numbers)))
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


if __name__ == "__main__":
    print(table())
