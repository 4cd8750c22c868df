"""Arithmetic on whole vectors of 16-bit values, for numba kernels: LLVM vectors written out, not left to chance.

numba's loop vectoriser gives up half of the speed on these loops and all of it on short rows, so each step is an
intrinsic over `lanes` values at an address (LLVM cuts them to the machine's width). The same definitions as
`kernels.floats`: integer operations, comparisons, and float32 add, subtract and multiply with one rounding each. No
fused multiply-add and no libm call, so the bytes are those of the reference.

Split order. Making 32 bits of 16 in natural order takes a shuffle across the vector, and shuffles and shifts are scarce
(EPYC Zen 4: one of either a cycle, two of what else is used here). So vectors may be widened as their lanes 0, 2, 4, ..
followed by 1, 3, 5, ..: a shift and a mask over pairs. Narrowing takes a shuffle in any case, which puts the lanes back
at no cost.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["LINE", "Lanes", "copy_bytes", "each_vector", "fence", "step", "stream_lines"]

_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_LANES = 32
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer, ties to even, in the low bits
LINE = 64  # bytes of a line of the cache


class Lanes:
    """Emits operations on vectors of `count` lanes."""

    def __init__(self, builder, count: int):
        self.builder, self.count = builder, count

    def constant(self, element, value):
        return ir.Constant(ir.VectorType(element, self.count), [value] * self.count)

    def cast(self, name, value, element):
        return getattr(self.builder, name)(value, ir.VectorType(element, self.count))

    def splat(self, scalar):
        undefined = ir.Constant(ir.VectorType(scalar.type, self.count), ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(first, undefined, self.constant(_I32, 0))

    def load(self, address, element):
        pointer = self.builder.inttoptr(address, ir.VectorType(element, self.count).as_pointer())
        return self.builder.load(pointer, align=element.width // 8 if element != _F32 else 4)

    def store(self, value, address, stream: bool = False):
        """Store at an address; past the cache if `stream`, which must be aligned to the vector, or to a line."""
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        if not stream or self.count == 1:
            self.builder.store(value, pointer, align=1)
            return
        stored = self.builder.store(value, pointer, align=min(LINE, self.count * value.type.element.width // 8))
        stored.set_metadata("nontemporal", self.builder.module.add_metadata([ir.Constant(_I32, 1)]))

    def parameter(self, value, index=None):
        """A float32 for every lane, or the address of one a lane (the first at `index`)."""
        if value.type == _F32:
            return self.splat(value)
        return self.load(value if index is None else step(self.builder, value, index, 4), _F32)

    def and_(self, value, mask):
        return self.builder.and_(value, self.constant(value.type.element, mask))

    def shifted(self, name, value, bits):
        return getattr(self.builder, name)(value, self.constant(value.type.element, bits))

    def plus(self, value, number):
        return self.builder.add(value, self.constant(value.type.element, number & 0xFFFFFFFF))

    def pick(self, vector, indices):
        """The lanes of a vector at constant indices."""
        return self.builder.shuffle_vector(
            vector, ir.Constant(vector.type, ir.Undefined), ir.Constant(ir.VectorType(_I32, len(indices)), indices)
        )

    def part(self, value, element, number: int, split: bool = False):
        """Of every lane, the integer of `element` that lies `number` places above the lowest; in natural order."""
        per_lane, half = (
            (32 if value.type.element == _F32 else value.type.element.width) // element.width,
            self.count // 2,
        )
        pieces = self.builder.bitcast(value, ir.VectorType(element, self.count * per_lane))
        lanes = [i // 2 + i % 2 * half if split and half else i for i in range(self.count)]
        return self.pick(pieces, [lane * per_lane + number for lane in lanes])

    def apart(self, words, high: bool = False):
        """i16 -> i32 in split order: in the low half of each, or in the high half."""
        if self.count == 1:
            wide = self.cast("zext", words, _I32)
            return self.shifted("shl", wide, 16) if high else wide
        pairs = Lanes(self.builder, self.count // 2)
        both = pairs.cast("bitcast", words, _I32)
        if high:
            even, odd = pairs.shifted("shl", both, 16), pairs.and_(both, 0xFFFF0000)
        else:
            even, odd = pairs.and_(both, 0xFFFF), pairs.shifted("lshr", both, 16)
        order = ir.Constant(ir.VectorType(_I32, self.count), list(range(self.count)))
        return self.builder.shuffle_vector(even, odd, order)

    def value_of(self, bits, float16: int, split: bool = False):
        """i16 bits -> float."""
        if float16:
            if split and self.count > 1:
                bits = self.pick(bits, [*range(0, self.count, 2), *range(1, self.count, 2)])
            return self.cast("fpext", self.cast("bitcast", bits, ir.HalfType()), _F32)
        wide = self.apart(bits, high=True) if split else self.shifted("shl", self.cast("zext", bits, _I32), 16)
        return self.cast("bitcast", wide, _F32)

    def bits_of(self, value, float16: int, split: bool = False):
        """float -> i16 bits, to nearest even."""
        if float16:
            return self.part(self.cast("bitcast", self.cast("fptrunc", value, ir.HalfType()), _I16), _I16, 0, split)
        high, low = self.part(value, _I16, 1, split), self.part(value, _I16, 0, split)
        # Up where the rest is over a half, or is a half and the last kept bit is odd: low >= 0x8001 - (high & 1).
        even = self.and_(self.builder.not_(high), 1)
        up = self.builder.icmp_unsigned(">=", low, self.builder.or_(even, self.constant(_I16, 0x8000)))
        return self.builder.select(up, self.plus(high, 1), high)

    def rounded(self, value):
        """float -> i32 whose low 16 bits are the nearest integer, ties to even."""
        return self.cast("bitcast", self.builder.fadd(value, self.constant(_F32, _ROUND)), _I32)

    def smallest(self, left, right):
        return self.builder.select(self.builder.icmp_signed("<", left, right), left, right)

    def largest(self, left, right):
        return self.builder.select(self.builder.icmp_signed(">", left, right), left, right)

    def reduce(self, name, vector):
        """smin or smax over the lanes of i16."""
        function = self.builder.module.declare_intrinsic(
            f"llvm.vector.reduce.{name}.v{self.count}i16", (), ir.FunctionType(_I16, [vector.type])
        )
        return self.builder.call(function, [vector])


def each_vector(context, builder, count, body, lanes: int = _LANES) -> None:
    """Emit body(emit, first lane) over `count` lanes: vectors of `lanes`, then one by one."""
    width = context.get_constant(types.intp, lanes)
    whole = builder.sub(count, builder.srem(count, width))
    zero, one = context.get_constant(types.intp, 0), context.get_constant(types.intp, 1)
    for emit, start, stop, step in (
        (Lanes(builder, lanes), zero, whole, width),
        (Lanes(builder, 1), whole, count, one),
    ):
        with cgutils.for_range_slice(builder, start, stop, step, count.type) as (index, _):
            body(emit, index)


def step(builder, address, index, nbytes: int):
    """Emit address + index * nbytes."""
    return builder.add(address, builder.mul(index, ir.Constant(index.type, nbytes)))


@intrinsic
def copy_bytes(typing_context, source, target, nbytes):
    """memcpy between two addresses."""

    def codegen(context, builder, signature, args):
        src, dst = (builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2])
        cgutils.raw_memcpy(builder, dst, src, args[2], context.get_constant(types.intp, 1), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def stream_lines(typing_context, source, target, nbytes):
    """Copy whole lines, written past the cache: the target must be aligned to a line."""

    def codegen(context, builder, signature, args):
        emit = Lanes(builder, LINE)
        zero, line = ir.Constant(args[2].type, 0), ir.Constant(args[2].type, LINE)
        with cgutils.for_range_slice(builder, zero, args[2], line, args[2].type) as (offset, _):
            emit.store(emit.load(builder.add(args[0], offset), _I8), builder.add(args[1], offset), stream=True)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def fence(typing_context):
    """Streamed stores are weakly ordered: make them visible before another thread is told of them."""

    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen
