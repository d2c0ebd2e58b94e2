"""Compiles a kernel as a part of the kernels that call it.

numba compiles a function that another one calls as it compiles any: with wrappers for Python and C,
optimised alone, to machine code, which is thrown away when it is linked into its caller and
optimised again there. Here a part is only lowered to LLVM's representation. It is optimised once,
within each kernel that Python calls. The drafter's kernels compile in half the time.
"""

from typing import Any

import numba
from numba.core import codegen, compiler, types


class _Part(codegen.JITCodeLibrary):
    """A module that is linked into others and never becomes machine code of its own.

    It stands for the code generator, too: numba tells that where the function's environment is,
    in memory that a part does not have. No kernel needs an environment: it is for Python's objects.
    """

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        library: Any = self
        library._finalize_dynamic_globals()
        library._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    @property
    def codegen(self) -> "_Part":
        return self

    def set_env(self, env_name: str, env: Any) -> None:
        pass


class _PartCompiler(compiler.Compiler):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)  # type: ignore[no-untyped-call]
        assert self.state.library is None, "numba makes the library earlier now"
        part: Any = _Part
        self.state.library = part(self.state.targetctx.codegen(), "part")


def compile_calls_as_parts(compiled: Any) -> None:
    """Makes the kernels that call this one compile it as a part of themselves.

    They see the types of its arguments only, not the values of constants, which inlining shows to
    LLVM anyway: each value would be one more version to compile. `compiled.part` is the dispatcher
    that has these versions; Python's calls use those of `compiled` itself.
    """
    njit: Any = numba.njit
    part = njit(
        nogil=True,
        error_model="numpy",
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        pipeline_class=_PartCompiler,
    )(compiled.py_func)
    unliteral: Any = types.unliteral

    def get_call_template(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return part.get_call_template(
            tuple(map(unliteral, arguments)),
            {name: unliteral(kind) for name, kind in keywords.items()},
        )

    compiled.part = part
    compiled.get_call_template = get_call_template
    compiled.get_overload = part.get_overload
