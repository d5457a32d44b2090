"""Vectors of 16 float32 as values of numba's Python, and memory by address: what kernels are written in.

LLVM maps a vector to two AVX2 registers, one of AVX-512 or four of NEON. Left to find vectors in scalar loops
it keeps no tile of a product in registers: 94 GFLOP/s against 15 on one core of an AMD EPYC at 3.1 GHz.

Nothing here is reordered: a sum over lanes is a tree of fixed shape, and a product feeds a sum by a fused
multiply-add only where `fma` says so.

Addresses are int64, in bytes. Vectors need no alignment.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

LANES = 16

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
F32_V, I32_V, I16_V = (ir.VectorType(scalar, LANES) for scalar in (F32, I32, I16))


class Vector(types.Type):
    """16 float32."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: types.Type) -> None:
        super().__init__(manager, fe_type, F32_V)


# What follows builds LLVM's code; kernels call the functions further below.


def pointer(b: Builder, address: ir.Value, to: ir.Type) -> ir.Value:
    return b.inttoptr(address, to.as_pointer())


def load_as(b: Builder, address: ir.Value, kind: ir.Type) -> ir.Value:
    value = b.load(pointer(b, address, kind))
    value.align = 1
    return value


def store_as(b: Builder, address: ir.Value, value: ir.Value) -> None:
    b.store(value, pointer(b, address, value.type)).align = 1


def fetch_line(b: Builder, address: ir.Value) -> None:
    """Have the 64 bytes around `address` brought to the second cache; one of nothing is passed over."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
    read, second_cache, data = (ir.Constant(I32, value) for value in (0, 2, 1))
    b.call(function, [pointer(b, address, I8), read, second_cache, data])


def spread(b: Builder, scalar: ir.Value) -> ir.Value:
    """A vector with `scalar` in all lanes."""
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(I32_V, [0] * LANES))


def number(value: int) -> ir.Constant:
    """An int64."""
    return ir.Constant(I64, value)


def constant(value: float) -> ir.Constant:
    return ir.Constant(F32_V, [value] * LANES)


def call(b: Builder, name: str, *args: ir.Value) -> ir.Value:
    """An LLVM operation on vectors of float32."""
    kind = ir.FunctionType(F32_V, [arg.type for arg in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.{name}.v{LANES}f32"), args)


def widened(b: Builder, bf16: ir.Value) -> ir.Value:
    """16 bfloat16, as int16, to float32."""
    high = b.shl(b.zext(bf16, I32_V), ir.Constant(I32_V, [16] * LANES))
    return b.bitcast(high, F32_V)


def halves_summed(b: Builder, v: ir.Value, combine: Any) -> ir.Value:
    """The scalar that a tree of `combine` makes of the lanes."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (ir.Constant(ir.VectorType(I32, width), list(range(at, at + width))) for at in (0, width))
        v = combine(b.shuffle_vector(v, v, low), b.shuffle_vector(v, v, high))
    return b.extract_element(v, ir.Constant(I32, 0))


def lanes_summed(b: Builder, vectors: list[ir.Value]) -> ir.Value:
    """The sums of the lanes of each of 2^n vectors, up to LANES: a vector of as many, or, of one, a scalar.

    Each sum is the one that `halves_summed` makes; but vectors share the additions, and every pair of them
    takes two shuffles for each halving of both.
    """
    width = LANES
    while len(vectors) > 1:
        paired = []
        for x, y in zip(vectors[::2], vectors[1::2], strict=True):
            lanes = [lane for lane in range(2 * LANES) if lane % width < width // 2]
            low, high = (
                ir.Constant(ir.VectorType(I32, LANES), [lane + at for lane in lanes])
                for at in (0, width // 2)
            )
            paired.append(b.fadd(b.shuffle_vector(x, y, low), b.shuffle_vector(x, y, high)))
        vectors, width = paired, width // 2
    (v,) = vectors
    count = LANES // width
    while width > 1:
        width //= 2
        lanes = [lane for lane in range(2 * width * count) if lane % (2 * width) < width]
        low, high = (
            ir.Constant(ir.VectorType(I32, len(lanes)), [lane + at for lane in lanes]) for at in (0, width)
        )
        v = b.fadd(b.shuffle_vector(v, v, low), b.shuffle_vector(v, v, high))
    return v if count > 1 else b.extract_element(v, ir.Constant(I32, 0))


def exponential(b: Builder, x: ir.Value) -> ir.Value:
    """exp of each lane within 2 units of the last place (Cephes); 0 below -87.3, infinity above 88.7."""
    small = b.fcmp_ordered("<", x, constant(-87.3))
    large = b.fcmp_ordered(">", x, constant(88.7))
    n = call(b, "rint", b.fmul(x, constant(1.4426950408889634)))
    r = call(b, "fma", n, constant(-0.693359375), x)
    r = call(b, "fma", n, constant(2.12194440e-4), r)
    p = constant(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = call(b, "fma", p, r, constant(c))
    p = call(b, "fma", p, b.fmul(r, r), r)
    power = b.shl(b.fptosi(n, I32_V), ir.Constant(I32_V, [23] * LANES))  # added to the exponent of 1 + p
    value = b.bitcast(b.add(b.bitcast(b.fadd(p, constant(1.0)), I32_V), power), F32_V)
    value = b.select(small, constant(0.0), b.select(large, constant(float("inf")), value))
    return b.select(b.fcmp_unordered("uno", x, x), x, value)


def halves(b: Builder, bits: ir.Value) -> ir.Value:
    """16 float16, as int16, to float32."""
    return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), F32_V)


def nibbles(b: Builder, address: ir.Value) -> ir.Value:
    """16 codes of four bits as int16, from 8 bytes, the first 8 of them in the low nibbles."""
    eight = ir.VectorType(I8, 8)
    codes = load_as(b, address, eight)
    low, high = b.and_(codes, ir.Constant(eight, [15] * 8)), b.lshr(codes, ir.Constant(eight, [4] * 8))
    both = b.shuffle_vector(low, high, ir.Constant(I32_V, list(range(LANES))))
    return b.zext(both, I16_V)


def same(kind: ir.Type, value: int) -> ir.Constant:
    """A vector of integers that are all alike."""
    return ir.Constant(kind, [value] * LANES)


# What kernels call.


@intrinsic
def load(_: Any, address: Any) -> Any:
    """16 float32 from `address` on."""
    return vector(types.int64), lambda context, b, sig, args: load_as(b, args[0], F32_V)


@intrinsic
def load_bf16(_: Any, address: Any) -> Any:
    """16 bfloat16 from `address` on."""
    return vector(types.int64), lambda context, b, sig, args: widened(b, load_as(b, args[0], I16_V))


@intrinsic
def load_f16(_: Any, address: Any) -> Any:
    """16 float16 from `address` on."""
    return vector(types.int64), lambda context, b, sig, args: halves(b, load_as(b, args[0], I16_V))


@intrinsic
def load_e2m1(_: Any, address: Any) -> Any:
    """16 e2m1 times 2^-14, as `nibbles`.

    Their exponent and mantissa are the lowest of exponent and the highest of mantissa of a float16, where
    subnormals are alike.
    """

    def build(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        wide = nibbles(b, args[0])
        size = b.shl(b.and_(wide, same(I16_V, 7)), same(I16_V, 9))
        sign = b.shl(b.and_(wide, same(I16_V, 8)), same(I16_V, 12))
        return halves(b, b.or_(size, sign))

    return vector(types.int64), build


@intrinsic
def load_int4(_: Any, address: Any) -> Any:
    """16 integers from -8 to 7, whose codes are 8 more, as `nibbles`."""

    def build(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        return b.sitofp(b.sub(nibbles(b, args[0]), same(I16_V, 8)), F32_V)

    return vector(types.int64), build


@intrinsic
def load_e4m3(_: Any, address: Any) -> Any:
    """16 e4m3 times 2^-8, by the same likeness to float16; a NaN reads as 480 (times 2^-8)."""

    def build(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        wide = b.zext(load_as(b, args[0], ir.VectorType(I8, LANES)), I16_V)
        size = b.shl(b.and_(wide, same(I16_V, 127)), same(I16_V, 7))
        sign = b.shl(b.and_(wide, same(I16_V, 128)), same(I16_V, 8))
        return halves(b, b.or_(size, sign))

    return vector(types.int64), build


@intrinsic
def load_e8m0(_: Any, address: Any) -> Any:
    """16 e8m0, powers of two from 2^-127 on; a NaN reads as infinity."""

    def build(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        wide = b.zext(load_as(b, args[0], ir.VectorType(I8, LANES)), I32_V)
        normal = b.shl(wide, same(I32_V, 23))
        least = b.icmp_unsigned("==", wide, same(I32_V, 0))
        return b.bitcast(b.select(least, same(I32_V, 1 << 22), normal), F32_V)

    return vector(types.int64), build


@intrinsic
def store(_: Any, address: Any, v: Any) -> Any:
    def build(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        store_as(b, *args)
        return context.get_dummy_value()

    return types.void(types.int64, vector), build


@intrinsic
def fetch(_: Any, address: Any) -> Any:
    """See `fetch_line`."""

    def build(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        fetch_line(b, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), build


@intrinsic
def splat(_: Any, scalar: Any) -> Any:
    """All lanes alike."""
    return vector(types.float32), lambda context, b, sig, args: spread(b, args[0])


@intrinsic
def fma(_: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    return vector(vector, vector, vector), lambda context, b, sig, args: call(b, "fma", *args)


@intrinsic
def rounded_to_bf16(_: Any, x: Any) -> Any:
    """The nearest bfloat16 of each lane, ties to even; NaN comes out as any number."""

    def build(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        bits = b.bitcast(args[0], I32_V)
        odd = b.and_(b.lshr(bits, same(I32_V, 16)), same(I32_V, 1))
        up = b.add(bits, b.add(odd, same(I32_V, 0x7FFF)))
        return b.bitcast(b.and_(up, same(I32_V, 0xFFFF0000)), F32_V)

    return vector(vector), build


@intrinsic
def exp(_: Any, x: Any) -> Any:
    return vector(vector), lambda context, b, sig, args: exponential(b, args[0])


@intrinsic
def smaller(_: Any, x: Any, y: Any) -> Any:
    """The smaller of each pair of lanes; x's where either is NaN or they are equal."""

    def build(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        return b.select(b.fcmp_ordered("<", args[1], args[0]), args[1], args[0])

    return vector(vector, vector), build


@intrinsic
def larger(_: Any, x: Any, y: Any) -> Any:
    """The larger of each pair of lanes; x's where either is NaN or they are equal."""

    def build(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        return b.select(b.fcmp_ordered(">", args[1], args[0]), args[1], args[0])

    return vector(vector, vector), build


@intrinsic
def first_lanes(_: Any, v: Any, count: Any, other: Any) -> Any:
    """The first `count` lanes of v, the rest `other`: a number, or the same lanes of another vector."""

    def build(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        lanes = ir.Constant(I32_V, list(range(LANES)))
        kept = b.icmp_signed("<", lanes, spread(b, b.trunc(args[1], I32)))
        return b.select(kept, args[0], args[2] if other == vector else spread(b, args[2]))

    return vector(vector, types.int64, vector if other == vector else types.float32), build


@intrinsic
def total(_: Any, v: Any) -> Any:
    """The sum of the lanes."""

    def build(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        return halves_summed(b, args[0], b.fadd)

    return types.float32(vector), build


@intrinsic
def largest(_: Any, v: Any) -> Any:
    """The largest lane; NaN is passed over."""

    def build(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        def pick(x: ir.Value, y: ir.Value) -> ir.Value:
            return b.select(b.fcmp_ordered(">", y, x), y, x)

        return halves_summed(b, args[0], pick)

    return types.float32(vector), build


def _scalar(kind: ir.Type, numba_type: Any) -> tuple[Any, Any]:
    """Intrinsics that read and write one value of a type."""

    @intrinsic
    def get(_: Any, address: Any) -> Any:
        return numba_type(types.int64), lambda context, b, sig, args: load_as(b, args[0], kind)

    @intrinsic
    def put(_: Any, address: Any, value: Any) -> Any:
        def build(context: Any, b: Builder, sig: Any, args: Any) -> Any:
            store_as(b, *args)
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), build

    return get, put


get_f32, put_f32 = _scalar(F32, types.float32)
get_i32, put_i32 = _scalar(I32, types.int32)
get_i64, put_i64 = _scalar(I64, types.int64)
get_u8, _ = _scalar(I8, types.uint8)


@intrinsic(prefer_literal=True)
def stack(_: Any, size: Any) -> Any:
    """Address of `size` bytes, a literal, that live as long as the function that asks for them."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    count = size.literal_value

    def build(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        space = cgutils.alloca_once(b, ir.ArrayType(I8, count))
        space.align = 64
        return b.ptrtoint(space, I64)

    return types.int64(size), build


@intrinsic
def take(_: Any, counter: Any) -> Any:
    """The int64 at address `counter`, which grows by one; no two threads get the same."""

    def build(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        return b.atomic_rmw("add", pointer(b, args[0], I64), number(1), "monotonic")

    return types.int64(types.int64), build


def _operation(name: str) -> Any:
    @intrinsic
    def operation(_: Any, x: Any, y: Any) -> Any:
        return vector(vector, vector), lambda context, b, sig, args: getattr(b, name)(*args)

    def apply(x, y):
        return operation(x, y)

    apply.__qualname__ = f"vector_{name}"  # see jit.py

    def typed(x, y):  # numba compares signatures, annotations too
        return apply if x == y == vector else None

    return typed


for _operator, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    overload(_operator)(_operation(_name))


@njit(forceinline=True)
def zeros() -> Any:
    return splat(types.float32(0.0))
