"""How the attention kernels compute with a key-value cache in 8-bit floating point.

Two float8_e4m3fn become two float16 in one instruction, exactly, where bfloat16 would take two more for each. So keys
and values are widened to float16, whatever 16-bit type the queries have, and the queries are brought into its range.
"""

import triton
import triton.language as tl

_SPLIT_FOUR: tl.constexpr = tl.constexpr("""{
    .reg .b16 first, second;
    .reg .b32 wide_first, wide_second;
    mov.b32 {first, second}, $2;
    cvt.rn.f16x2.e4m3x2 wide_first, first;
    cvt.rn.f16x2.e4m3x2 wide_second, second;
    prmt.b32 $0, wide_first, wide_second, 0x5410;
    prmt.b32 $1, wide_first, wide_second, 0x7632;
}""")


@triton.jit
def match_cache(query, key_ptr):
    """Queries as the products with this cache's keys take them.

    Args:
        query: [queries, head_dim].
        key_ptr: the cache.

    Returns:
        (query, factor): the query in the products' dtype, and what the scores are to be multiplied with, [queries]
        float32.
    """
    factor = tl.full([query.shape[0]], 1.0, tl.float32)
    if key_ptr.dtype.element_ty == tl.float8e4nv and query.dtype != tl.float32:
        wide = query.to(tl.float32)
        # From bfloat16 this keeps all bits but those of what is 2^-14 times smaller than the row's largest.
        factor = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-30)
        query = (wide / factor[:, None]).to(tl.float16)
    return query, factor


@triton.jit
def split_pairs(pairs, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """Keys or values, read from the cache two neighbours at a time, widened: (first ones, second ones).

    Pairs go from shared memory to where the matrix units want them as 16-bit numbers do, transposed or not, and are
    taken apart there: single bytes could not be, and widened ones would have to be stored once more.

    Args:
        pairs: int16.
        dtype: of the result.
        COMPILED: not in the interpreter, which knows no assembly.
    """
    if COMPILED and dtype == tl.float16:
        first, second = tl.inline_asm_elementwise(
            _SPLIT_FOUR, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        first = (pairs & 0xFF).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(dtype)
        second = ((pairs >> 8) & 0xFF).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(dtype)
    return first, second
