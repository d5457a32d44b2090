"""For scripts that run kernels in Triton's interpreter, whose insides this changes."""

from __future__ import annotations

from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter


def prepare() -> None:
    """Let kernels loop to bounds that are known at run time only, and call functions in less time.

    Such bounds are arrays of one element, which numpy 2.5 no longer takes for integers. And every call of a
    function by a kernel replaced the language's functions anew, which took longer than most functions do:
    now the launch of the kernel does it for all of them.
    """
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # as kernels and tl's own name it

    def patch_index(tensor, scope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index
    interpreter._patch_lang = lambda kernel: patch_language(language)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
