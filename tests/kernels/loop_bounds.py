"""For scripts that run kernels in Triton's interpreter: its loop bounds that are known at run time only."""

from __future__ import annotations

from triton.runtime import interpreter


def teach() -> None:
    """Let the interpreter loop to them: they are arrays of one element, which numpy 2.5 no longer takes for
    integers."""
    patch = interpreter._patch_lang_tensor

    def patch_index(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index
