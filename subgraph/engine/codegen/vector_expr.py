"""Expressions of float vectors whose Python operators emit LLVM IR; `vmath` is written in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from subgraph.engine.codegen.irtools import (
    I32,
    call_intrinsic,
    concatenate,
    emit_fma,
    shuffle_vectors,
    suffix,
)

_LEAST_BITS, _REGISTER_BITS = 128, 512  # of AVX-512's registers
_CURRENT_ROUNDING = 4  # the operand of x86's intrinsics for the rounding that is set
_DOWNWARDS = 9  # the operand of vreduceps: floor, and no exception for inexact results


class _Format:
    """Constants of float32 or float64.

    Attributes:
        single: Whether it is float32.
        bits: Bits of a number.
        mantissa: Explicit bits of the mantissa.
        bias: Bias of the exponent.
        ln2_high: ln 2 to few enough bits that its products with small integers are exact.
        ln2_low: ln 2 - ln2_high (Cody and Waite).
        exp_least: Below this e**x rounds to 0.
        exp_most: Above this e**x is infinite.
        expm1_least: Below this e**x - 1 rounds to -1.
        exp_normal: Up to this |x| both e**x and e**-x are normal numbers.
        least_normal: The least positive normal number.
        sqrt_half: Bits of the square root of 1/2.
    """

    def __init__(self, single: bool) -> None:
        self.single = single
        self.bits = 32 if single else 64
        self.mantissa = 23 if single else 52
        self.bias = 127 if single else 1023
        self.ln2_high = 0.693359375 if single else 6.93147180369123816490e-01
        self.ln2_low = -2.12194440054690583e-4 if single else 1.90821492927058770002e-10
        self.exp_least = -104.0 if single else -746.0
        self.exp_most = 89.0 if single else 710.0
        self.expm1_least = -25.0 if single else -50.0
        self.exp_normal = 87.0 if single else 708.0
        self.least_normal = 2.0**-126 if single else 2.0**-1022
        self.sqrt_half = 0x3F3504F3 if single else 0x3FE6A09E667F3BCD


_SINGLE, _DOUBLE = _Format(True), _Format(False)


class Expr:
    """A vector of float32 or float64 during code generation; its operators emit instructions.

    Attributes:
        builder: LLVM's builder.
        value: LLVM vector.
    """

    __slots__ = ("builder", "value")

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder = builder
        self.value = value

    @property
    def format(self) -> _Format:
        """The constants of the elements' format."""
        element = self.value.type.element
        return _SINGLE if isinstance(element, ir.FloatType) else _DOUBLE

    def const(self, number: float) -> Expr:
        """Return a constant of this expression's type, rounded to its format."""
        ty = self.value.type
        rounded = ir.Constant(ty.element, number)
        return Expr(self.builder, ir.Constant(ty, [rounded] * ty.count))

    def _operand(self, other: Expr | float) -> Any:
        return other.value if isinstance(other, Expr) else self.const(other).value

    def _emit(self, instruction: str, *values: Any) -> Expr:
        return Expr(self.builder, getattr(self.builder, instruction)(*values))

    def __add__(self, other: Expr | float) -> Expr:
        return self._emit("fadd", self.value, self._operand(other))

    def __sub__(self, other: Expr | float) -> Expr:
        return self._emit("fsub", self.value, self._operand(other))

    def __rsub__(self, other: float) -> Expr:
        return self._emit("fsub", self._operand(other), self.value)

    def __mul__(self, other: Expr | float) -> Expr:
        return self._emit("fmul", self.value, self._operand(other))

    def __truediv__(self, other: Expr | float) -> Expr:
        return self._emit("fdiv", self.value, self._operand(other))

    def __rtruediv__(self, other: float) -> Expr:
        return self._emit("fdiv", self._operand(other), self.value)

    def __neg__(self) -> Expr:
        return self._emit("fneg", self.value)

    def fma(self, factor: Expr | float, addend: Expr | float) -> Expr:
        """Return ``self * factor + addend``, rounded once where the instruction set has FMA."""
        values = [self.value, self._operand(factor), self._operand(addend)]
        return Expr(self.builder, emit_fma(self.builder, *values))

    def polynomial(self, coefficients: Sequence[float]) -> Expr:
        """Return ``sum(c[k] * self**k)`` by Horner's scheme."""
        result = self.const(coefficients[-1])
        for coefficient in coefficients[-2::-1]:
            result = result.fma(self, coefficient)
        return result

    def polynomial_in_pairs(self, coefficients: Sequence[float]) -> Expr:
        """Return `polynomial` by one step of Estrin's scheme: half as many dependent operations."""
        square = self * self
        pairs = [
            self.const(pair[0]) if len(pair) == 1 else self.const(pair[1]).fma(self, pair[0])
            for pair in (coefficients[i : i + 2] for i in range(0, len(coefficients), 2))
        ]
        result = pairs.pop()
        while pairs:
            result = result.fma(square, pairs.pop())
        return result

    def compare(self, op: str, other: Expr | float) -> Any:
        """Return the mask of a comparison (``"<"``, ...); with NaN only that of ``"!="`` is set."""
        compare = self.builder.fcmp_unordered if op == "!=" else self.builder.fcmp_ordered
        return compare(op, self.value, self._operand(other))

    def where(self, mask: Any, other: Expr | float) -> Expr:
        """Return this where a mask is set, and the other where not."""
        return self._emit("select", mask, self.value, self._operand(other))

    def at_least(self, bound: float) -> Expr:
        """Return the larger of this and a bound; NaN stays NaN."""
        return self.const(bound).where(self.compare("<", bound), self)

    def at_most(self, bound: float) -> Expr:
        """Return the smaller of this and a bound; NaN stays NaN."""
        return self.const(bound).where(self.compare(">", bound), self)

    def abs(self) -> Expr:
        """Return the absolute value."""
        return self.libm("fabs")

    def copysign(self, sign: Expr) -> Expr:
        """Return the absolute value with another expression's sign."""
        return self.libm("copysign", sign.value)

    def libm(self, name: str, *more: Any) -> Expr:
        """Return the result of an LLVM intrinsic: an instruction, or a library call per lane.

        Args:
            name: Name without ``llvm.`` and type, such as ``"sqrt"``.
            *more: LLVM values of further arguments.
        """
        ty = self.value.type
        values = [self.value, *more]
        return Expr(
            self.builder, call_intrinsic(self.builder, f"llvm.{name}.{suffix(ty)}", ty, values)
        )

    # Integer vectors of the same width, as plain LLVM values.

    @property
    def _integers(self) -> Any:
        return ir.VectorType(ir.IntType(self.format.bits), self.value.type.count)

    def bits(self) -> Any:
        """Return the bits as an LLVM integer vector."""
        return self.builder.bitcast(self.value, self._integers)

    def integer(self, number: int) -> Any:
        """Return a constant LLVM integer vector."""
        ty = self._integers
        return ir.Constant(ty, [ir.Constant(ty.element, number)] * ty.count)

    def like(self, value: Any) -> Expr:
        """Return an expression of another LLVM value, with this builder."""
        return Expr(self.builder, value)

    def from_bits(self, bits: Any) -> Expr:
        """Return the floats that an integer vector holds as bits."""
        return self.like(self.builder.bitcast(bits, self.value.type))

    def nearest(self, scale: float) -> tuple[Expr, Any]:
        """Return ``rint(self * scale)`` as floats and as integers, for results below 2**21.

        Adding 1.5 * 2**mantissa rounds to an integer and leaves it in the low bits. The integer of
        NaN is unspecified.
        """
        magic = 1.5 * 2.0**self.format.mantissa
        shifted = self.fma(scale, magic)
        offset = self.const(magic).bits()
        return shifted - magic, self.builder.sub(shifted.bits(), offset)

    def power_of_two(self, exponent: Any) -> Expr:
        """Return 2**exponent of an integer vector; the results must be normal numbers."""
        f = self.format
        biased = self.builder.add(exponent, self.integer(f.bias))
        return self.from_bits(self.builder.shl(biased, self.integer(f.mantissa)))

    def scaled(self, exponent: Expr) -> Expr:
        """Return ``self * 2**floor(exponent)``, where `host.has_vscalef`: vscalefps.

        Subnormal results, infinity and NaN are as IEEE 754 defines them for the product.
        """
        return self._by_register("mask.scalef", exponent)

    def fraction(self) -> Expr:
        """Return ``self - floor(self)``, 0 for infinity, where `host.has_vscalef`: vreduceps."""
        return self._by_register("mask.reduce", constants=[I32(_DOWNWARDS)])

    def rough_reciprocal(self) -> Expr:
        """Return 1 / self, relative error 2**-14, where `host.has_vscalef`: vrcp14ps."""
        return self._by_register("rcp14", rounds=False)

    def _by_register(
        self, name: str, *operands: Expr, constants: Sequence[Any] = (), rounds: bool = True
    ) -> Expr:
        """Return the result of an instruction of AVX-512 that has a mask, without masking.

        A vector of several registers is computed register by register, a shorter one than a
        register as a part of one.

        Args:
            name: The name in LLVM's intrinsics, such as ``"mask.scalef"``.
            *operands: Further vectors of the same type.
            constants: Operands that follow these.
            rounds: Whether the instruction has an operand for its rounding.
        """
        ty, f, b = self.value.type, self.format, self.builder
        size = min(max(ty.count * f.bits, _LEAST_BITS), _REGISTER_BITS)
        lanes = size // f.bits
        kind = f"llvm.x86.avx512.{name}.{'ps' if f.single else 'pd'}.{size}"
        part = ir.VectorType(ty.element, lanes)
        everywhere = [ir.Constant(ir.IntType(max(lanes, 8)), -1)]
        if rounds and size == _REGISTER_BITS:
            everywhere.append(I32(_CURRENT_ROUNDING))
        results: list[Any] = []
        for first in range(0, ty.count, lanes):
            picks = [min(lane, ty.count - 1) for lane in range(first, first + lanes)]
            x, *others = (
                shuffle_vectors(b, operand.value, None, picks) for operand in (self, *operands)
            )
            arguments = [x, *others, *constants, x, *everywhere]
            results.append(call_intrinsic(b, kind, part, arguments))
        return self.like(shuffle_vectors(b, concatenate(b, results), None, range(ty.count)))
