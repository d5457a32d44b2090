"""For scripts that run kernels in Triton's interpreter, whose insides this changes."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def prepare() -> None:
    """Let kernels loop to bounds that are known at run time only, and call functions in less time.

    Such bounds are arrays of one element, which numpy 2.5 no longer takes for integers. And every call of a
    function by a kernel replaced the language's functions again, which took longer than most functions do:
    now the launch of the kernel does it for all of them.
    """
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    language = SimpleNamespace(__globals__={"tl": tl, "core": core})  # as kernels and tl's own name it

    def patch_index(tensor, scope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index
    interpreter._patch_lang = lambda kernel: patch_language(language)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
    _compute_no_overflow()
    _make_types_once()


def _compute_no_overflow() -> None:
    """Without debug mode the interpreter does sums and products of integers again in 64 bits, for a check
    that it then leaves out."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _make_types_once() -> None:
    """Every operation makes the type of its result, and the shape, and the type of the shape: half the time
    of a kernel of small blocks. Now equal types share what they hold, and tuples have a type when asked."""
    init_block, numpy_type = core.block_type.__init__, interpreter._get_np_dtype
    describe, find = core._type_for_tuple_values, core.tuple.__getattr__
    blocks, numpy_types = {}, {}  # by the name of the element's type: pointers have no hash
    scalar = core.tuple([]), core.constexpr(1)

    def block(self, element_ty, shape) -> None:
        key = element_ty.name, tuple(core._unwrap_if_constexpr(size) for size in shape)
        if key not in blocks:
            init_block(self, element_ty, shape)
            sizes = core.tuple([core.constexpr(size) for size in self.shape])
            self.of_tensor = sizes, core.constexpr(math.prod(self.shape))
            blocks[key] = self.__dict__
        self.__dict__ = blocks[key]

    def tensor(self, handle, type) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else scalar

    def tuple_of(self, args, type=None) -> None:
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def attribute(self, name):
        if name != "type":
            return find(self, name)
        self.type = describe(self.values)
        return self.type

    def as_numpy(type):
        name = type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(type)
        return numpy_types[name]

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    core.tuple.__init__, core.tuple.__getattr__ = tuple_of, attribute
    interpreter._get_np_dtype = as_numpy
