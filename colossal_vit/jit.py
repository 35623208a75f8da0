"""Programs that Numba compiles."""

from collections.abc import Callable
from typing import Any


def cached(compiler: Callable[..., Callable], signature: Any, function: Callable, **options: Any) -> Callable:
    """`compiler(signature, **options)(function)`; the next process finds the program, where a folder can keep it.

    It does so until the function's file changes; constants from other files are not looked at.

    Args:
        compiler: `numba.njit` or `numba.cfunc`.
        signature: types of the result and the arguments.
        function: in the subset of Python that Numba compiles.
        options: of the compiler.
    """
    try:
        return compiler(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):  # no folder to keep it in, or no space
        return compiler(signature, **options)(function)
