#!/bin/sh
# llvmlite 0.50.0 (LLVM 22.1), code for x86-64 with AVX512-VNNI.
#
# `llvm.x86.avx512.vpdpwssd.512` asks for one instruction: multiply pairs of 16-bit integers and add
# them to sums. LLVM emits it for each chain's first product only, and takes all others apart into
# vpmaddwd, vpaddd and a broadcast that vpdpwssd could have read from memory itself: also where eight
# chains run beside each other, so that no latency is to be saved, and also for processors named
# outright (icelake-server). The tuning `fast-dpwssd`, which znver5 has, leaves them whole. An
# intrinsic is no promise of its instruction: a kernel's gain has to be read in its assembly.
#
# Seen for 1, 4 and 8 chains of 16 products, as (vpdpwssd, vpmaddwd): (1, 15), (4, 60), (8, 120);
# with the tuning (16, 0), (64, 0), (128, 0). Nothing is run, so any processor shows it.
# Fails if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llvmlite==0.50.0
cd "$folder"
cat > probe.py <<'PYTHON'
import re
import llvmlite.binding as llvm

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()


def instructions(num_rows: int, cpu: str, features: str) -> tuple[int, int]:
    """How many of vpdpwssd and vpmaddwd a loop has: for each of some rows, 16 fused products."""
    rows = range(num_rows)
    lines = []
    for step in range(16):
        lines.append(f"%w{step}p = getelementptr <16 x i32>, ptr %w, i64 {step}")
        lines.append(f"%w{step} = load <16 x i32>, ptr %w{step}p")
        for r in rows:
            before = f"%s{r}" if step == 0 else f"%t{r}_{step - 1}"
            lines.append(f"%x{r}_{step}p = getelementptr i32, ptr %x, i64 {64 * r + step}")
            lines.append(f"%x{r}_{step} = load i32, ptr %x{r}_{step}p")
            lines.append(
                f"%i{r}_{step} = insertelement <16 x i32> poison, i32 %x{r}_{step}, i32 0"
            )
            lines.append(
                f"%b{r}_{step} = shufflevector <16 x i32> %i{r}_{step}, <16 x i32> poison, "
                "<16 x i32> zeroinitializer"
            )
            lines.append(
                f"%t{r}_{step} = call <16 x i32> @llvm.x86.avx512.vpdpwssd.512("
                f"<16 x i32> {before}, <16 x i32> %b{r}_{step}, <16 x i32> %w{step})"
            )
    ends = [f"store <16 x i32> %t{r}_15, ptr %o{r}" for r in rows]
    places = [f"%o{r} = getelementptr <16 x i32>, ptr %out, i64 {r}" for r in rows]
    begins = [f"%s{r} = load <16 x i32>, ptr %o{r}" for r in rows]
    body = "\n".join([*places, *begins, *lines, *ends, "ret void"])
    source = f"""
target triple = "x86_64-unknown-linux-gnu"
declare <16 x i32> @llvm.x86.avx512.vpdpwssd.512(<16 x i32>, <16 x i32>, <16 x i32>)
define void @f(ptr %w, ptr %x, ptr %out) {{
{body}
}}
"""
    module = llvm.parse_assembly(source)
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3)
    text = machine.emit_assembly(module)
    return len(re.findall(r"\bvpdpwssd\b", text)), len(re.findall(r"\bvpmaddwd\b", text))


kinds = (
    ("x86-64-v4", "+avx512vnni"),
    ("icelake-server", ""),
    ("x86-64-v4", "+avx512vnni,+fast-dpwssd"),
    ("znver5", ""),
)
seen = {kind: [instructions(rows, *kind) for rows in (1, 4, 8)] for kind in kinds}
print(llvm.llvm_version_info, seen)
apart, together = [(1, 15), (4, 60), (8, 120)], [(16, 0), (64, 0), (128, 0)]
assert [seen[kind] for kind in kinds] == [apart, apart, together, together], seen
PYTHON
./venv/bin/python probe.py
