"""Four float32 side by side, in compiled functions: one load, addition or product serves four query heads.

numba leaves such loops of four to the compiler, which gathers single numbers instead.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

LANES = 4
LANES_IR = ir.VectorType(ir.FloatType(), LANES)
FUSED = ("contract",)


class LanesType(types.Type):  # type: ignore[misc]
    """Four float32."""

    def __init__(self):
        super().__init__(name="Lanes")


LANES_OF = LanesType()


@register_model(LanesType)
class LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    """A vector register."""

    def __init__(self, manager, kind):
        super().__init__(manager, kind, LANES_IR)


def _pointer(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def load_lanes(context, address):
    """The four float32 at an address."""

    def generate(context, builder, signature, arguments):
        return builder.load(_pointer(builder, arguments[0], LANES_IR), align=4)

    return LANES_OF(types.int64), generate


@intrinsic
def store_lanes(context, address, lanes):
    """Write the four to an address."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], _pointer(builder, arguments[0], LANES_IR), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, LANES_OF), generate


@intrinsic
def no_lanes(context):
    """Four zeros."""

    def generate(context, builder, signature, arguments):
        return ir.Constant(LANES_IR, [0.0] * LANES)

    return LANES_OF(), generate


@intrinsic
def plus(context, first, second):
    """Their sums."""

    def generate(context, builder, signature, arguments):
        return builder.fadd(*arguments)

    return LANES_OF(LANES_OF, LANES_OF), generate


@intrinsic
def plus_times(context, lanes, factor, others):
    """lanes + factor * others, with one number as the factor of all four."""

    def generate(context, builder, signature, arguments):
        lanes, factor, others = arguments
        first = ir.Constant(ir.IntType(32), 0)
        one = builder.insert_element(ir.Constant(LANES_IR, ir.Undefined), factor, first)
        every = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))
        return builder.fadd(lanes, builder.fmul(every, others, flags=FUSED), flags=FUSED)

    return LANES_OF(LANES_OF, types.float32, LANES_OF), generate


@intrinsic
def byte_at(context, address):
    """The byte at an address, as int64."""

    def generate(context, builder, signature, arguments):
        return builder.zext(builder.load(_pointer(builder, arguments[0], ir.IntType(8))), ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def fetch(context, address):
    """Start to load what is at an address, which nothing waits for."""

    def generate(context, builder, signature, arguments):
        kind = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", (kind,), ir.FunctionType(ir.VoidType(), [kind, number, number, number])
        )
        pointer = builder.inttoptr(arguments[0], kind)
        builder.call(prefetch, [pointer, *(ir.Constant(number, one) for one in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def add_one(context, address):
    """What was at an address, an int32, before one is added to it; what was written before is seen by those that add
    later."""

    def generate(context, builder, signature, arguments):
        number = ir.IntType(32)
        pointer = builder.inttoptr(arguments[0], number.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(number, 1), "seq_cst")

    return types.int32(types.int64), generate
