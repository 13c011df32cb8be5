"""How the attention kernels compute with a key-value cache in 8-bit floating point.

Two float8_e4m3fn become two float16 in one instruction, exactly, where bfloat16 would take two more for each. So keys
and values are widened to float16, whatever 16-bit type the queries have, and the queries are brought into its range.
"""

import triton
import triton.language as tl

_WIDEN_FOUR: tl.constexpr = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
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
def widen(x, query, COMPILED: tl.constexpr):
    """Keys or values from the cache in the dtype of the matched queries.

    ``COMPILED``: not in the interpreter. Assembly that is called impure stays where it is. A plain conversion would be
    moved behind the exchange between threads that follows, which then reads transposed values byte by byte.
    """
    if COMPILED and x.dtype == tl.float8e4nv and query.dtype == tl.float16:
        wide = tl.inline_asm_elementwise(_WIDEN_FOUR, "=r,=r,r", [x], dtype=tl.float16, is_pure=False, pack=4)
    else:
        wide = x.to(query.dtype)
    return wide
