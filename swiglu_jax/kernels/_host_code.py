# ruff: noqa: PLC0415 - the DSL is the build's, and is imported where a kernel is compiled
"""Host code of an exported kernel that runs on every x86-64, whatever machine built it."""

from typing import Any

BASELINE_CPU = "x86-64"
BASELINE_FEATURES = ("+cx8", "+fxsr", "+mmx", "+sse", "+sse2", "+x87")


def use_baseline_host_code(compiled: Any) -> None:
    """Compile the host half of ``compiled`` for baseline x86-64 when it is exported.

    The DSL generates code for the build machine's own processor (AVX-512 where it has it), and has
    no option against that for tvm-ffi functions. LLVM lets a function name its own target, which
    takes precedence.

    Args:
        compiled: what ``cute.compile`` returned; its module is changed in place.

    Raises:
        RuntimeError: where the module has no host function to mark.
    """
    from cutlass._mlir import ir

    module = compiled.ir_module
    marked = 0
    with module.context:
        features = ", ".join(f'"{feature}"' for feature in BASELINE_FEATURES)
        features_attribute = ir.Attribute.parse(f"#llvm.target_features<[{features}]>")
        cpu_attribute = ir.StringAttr.get(BASELINE_CPU)

        def mark(operation: Any) -> Any:
            nonlocal marked
            if operation.name == "llvm.func" and operation.opview.operation.regions[0].blocks:
                operation.attributes["target_cpu"] = cpu_attribute
                operation.attributes["target_features"] = features_attribute
                marked += 1
            return ir.WalkResult.ADVANCE

        module.operation.walk(mark)
    if marked == 0:
        raise RuntimeError("the compiled module has no host functions: its form has changed")
