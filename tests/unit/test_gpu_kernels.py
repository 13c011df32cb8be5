"""Triton kernels against their torch references: on a GPU when there is one, else in Triton's interpreter.

The interpreter shows that the arithmetic and the indexing are right, not that the compiled code is.
"""

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton")
# ruff: noqa: E402

from kernels import activation as activations
from kernels import norm, rotary_kv, sampling
from kernels.attention import HostLayout, paged_attention
from kernels.gpu import activation as gpu_activation
from kernels.gpu import norm as gpu_norm
from kernels.gpu import rotary_kv as gpu_rotary_kv
from kernels.gpu import sampling as gpu_sampling
from kernels.gpu.attention_layout import DECODE_TILE, PREFILL_TILE, GpuLayout
from kernels.gpu.decode_attention import decode_attention
from kernels.gpu.linear import Shape, skinny_linear
from kernels.gpu.prefill_attention import prefill_attention

# Of results in half precision, relative to the norm; the interpreter's bf16 products are wrong.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def assert_near(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative error of the whole; NaN never passes."""
    found, wanted = found.double().cpu(), wanted.double().cpu()
    error = (found - wanted).norm() / wanted.norm().clamp(min=1e-12)
    assert error < TOLERANCE[dtype], f"relative error {error}"


def to(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 64, 576, 1536])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(dtype: torch.dtype, size: int, offset: float) -> None:
    x, residual, weight = random(3, size, dtype=dtype), random(3, size, dtype=dtype), random(size, dtype=dtype)
    want = norm.rms_norm(x, weight, 1e-5, offset)
    assert_near(gpu_norm.rms_norm(*to(x, weight), 1e-5, offset), want, dtype)
    want_out, want_sum = norm.add_rms_norm(x, residual, weight, 1e-5, offset)
    out, total = gpu_norm.add_rms_norm(*to(x, residual, weight), 1e-5, offset)
    assert_near(out, want_out, dtype)
    assert torch.equal(total.cpu(), want_sum)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("size", [5, 1024, 1100])
def test_gated_activations(dtype: torch.dtype, kind: str, size: int) -> None:
    x = random(3, 2 * size, dtype=dtype)
    assert_near(getattr(gpu_activation, kind)(*to(x)), getattr(activations, kind)(x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotated"), [(4, 2, 16, 16), (9, 3, 64, 64), (6, 6, 24, 16), (8, 1, 128, 128)]
)
@pytest.mark.parametrize("normed", [None, 0.0, 1.0])
def test_rotary_kv(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rotated: int, normed: float | None
) -> None:
    tokens, slots = 5, torch.tensor([0, 17, 3, 40, 9])
    qkv = random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    angles = torch.rand(tokens, rotated // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    norms = (None, None) if normed is None else (random(head_dim, dtype=dtype), random(head_dim, dtype=dtype))
    caches = torch.zeros(2, 3, 16, kv_heads, head_dim, dtype=dtype)
    want = rotary_kv.rotary_kv(qkv, cos, sin, *caches, slots, *norms, 1e-5, normed or 0.0)
    found_caches = torch.zeros_like(caches).to(DEVICE)
    on_device = [None if weight is None else weight.to(DEVICE) for weight in norms]
    found = gpu_rotary_kv.rotary_kv(
        *to(qkv, cos, sin), *found_caches, slots.to(DEVICE), *on_device, 1e-5, normed or 0.0
    )
    assert_near(found, want, dtype)
    assert_near(found_caches, caches, dtype)


def test_rotary_kv_stores_nothing_at_negative_slots() -> None:
    cache = torch.zeros(2, 1, 16, 1, 16).to(DEVICE)
    angles = torch.zeros(2, 8).to(DEVICE)
    slots = torch.tensor([-1, 3]).to(DEVICE)
    gpu_rotary_kv.rotary_kv(torch.ones(2, 48).to(DEVICE), angles, angles, *cache, slots, None, None, 0.0, 0.0)
    assert cache.view(2, 16, 16).sum(dim=-1).nonzero().tolist() == [[1, 3]]  # the key is rotated by cos = sin = 0


class PagedCase:
    """Sequences with the given (query, context) lengths over a randomly ordered pool; decodes first."""

    def __init__(
        self, lengths: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, unused: int
    ) -> None:
        block_size = 16
        tables = [-(-context // block_size) for _, context in lengths]
        blocks = torch.randperm(sum(tables) + 2).tolist()
        self.query = random(sum(count for count, _ in lengths), heads, head_dim, dtype=dtype)
        self.caches = random(2, len(blocks), block_size, kv_heads, head_dim, dtype=dtype)
        taken = [[blocks.pop() for _ in range(size)] for size in tables]
        width = max(tables)
        padded = torch.tensor([table + [0] * (width - len(table)) for table in taken])
        counts, contexts = [count for count, _ in lengths], [context for _, context in lengths]
        slots = torch.zeros(len(self.query), dtype=torch.int64)
        self.host = HostLayout(slots, padded, tuple(counts), tuple(contexts), block_size, block_size)
        decodes = sum(count == 1 for count in counts)
        rows = torch.randperm(len(lengths) + 3)[: len(lengths)]
        by_row = torch.zeros(len(lengths) + 3, width, dtype=torch.int32)
        by_row[rows] = padded.int()
        # Places without a sequence stand behind the decoding ones, as in a captured graph; they see nothing.
        used = torch.tensor([1] * decodes + [0] * unused + [1] * (len(lengths) - decodes), dtype=torch.bool)
        all_counts = torch.ones(len(used), dtype=torch.int64)
        all_counts[used] = torch.tensor(counts)
        all_contexts, all_rows = torch.zeros(len(used), dtype=torch.int32), torch.zeros(len(used), dtype=torch.int32)
        all_contexts[used], all_rows[used] = torch.tensor(contexts, dtype=torch.int32), rows.int()
        tiles = (all_contexts[: decodes + unused] + DECODE_TILE - 1) // DECODE_TILE
        prefill = [
            (place, start)
            for place in range(decodes + unused, len(used))
            for start in range(0, int(all_counts[place]), PREFILL_TILE)
        ]
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), all_counts.cumsum(0)))
        ints = [
            *(by_row, all_rows, all_contexts),
            *(torch.cat((torch.zeros(1, dtype=torch.int32), tiles.cumsum(0))), starts),
            torch.tensor(prefill).reshape(-1, 2).T.contiguous(),
        ]
        table, row, context, tile, start, prefill_tiles = (value.int().to(DEVICE) for value in ints)
        self.layout = GpuLayout(slots.to(DEVICE), table, row, context, tile, decodes + unused, start, prefill_tiles)
        self.used = torch.repeat_interleave(used, all_counts)
        self.padded_query = torch.zeros(len(self.used), heads, head_dim, dtype=dtype)
        self.padded_query[self.used] = self.query

    def check(self, window: int | None = None, softcap: float | None = None) -> None:
        scale = self.query.shape[-1] ** -0.5
        want = paged_attention(self.query, *self.caches, self.host, scale, window, softcap)
        out = torch.full_like(self.padded_query, torch.nan).to(DEVICE)
        query, caches = to(self.padded_query, self.caches)
        if self.layout.num_decodes:
            decode_attention(query, *caches, self.layout, scale, window, softcap, out)
        if self.layout.prefill_tiles.shape[1]:
            prefill_attention(query, *caches, self.layout, scale, window, softcap, out)
        assert_near(out[self.used.to(DEVICE)], want, self.query.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (37, None), (None, 5.0), (100, 5.0)])
@pytest.mark.parametrize("unused", [0, 2])
def test_decode_attention(dtype: torch.dtype, window: int | None, softcap: float | None, unused: int) -> None:
    lengths = [(1, length) for length in (1, 700, 16, 65, 64, 300, 129)]
    PagedCase(lengths, 8, 2, 16, dtype, unused).check(window, softcap)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 24), (16, 1, 128)])
def test_decode_attention_shapes(heads: int, kv_heads: int, head_dim: int) -> None:
    PagedCase([(1, 90), (1, 200)], heads, kv_heads, head_dim, torch.float16, 0).check()


def test_one_long_sequence_is_divided() -> None:
    PagedCase([(1, 1500)], 4, 2, 32, torch.float32, 0).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (37, None), (None, 5.0), (150, 5.0)])
def test_prefill_attention(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    lengths = [(2, 2), (40, 200), (130, 130), (300, 333), (5, 260)]
    PagedCase(lengths, 4, 2, 16, dtype, 0).check(window, softcap)


def test_mixed_attention() -> None:
    PagedCase([(1, 70), (1, 3), (50, 120)], 9, 3, 64, torch.float16, 1).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("programs", [1, 2, 5])
@pytest.mark.parametrize("bulk", [False, True])
def test_skinny_linear(dtype: torch.dtype, rows: int, activation: str | None, programs: int, bulk: bool) -> None:
    shape = Shape(block_out=64, block_in=64, programs=programs, stages=2, warps=4, prefetch=2, bulk=bulk)
    for out_features, in_features, bias in ((96, 256, True), (70, 200, False), (640, 512, True)):
        x, weight = random(rows, in_features, dtype=dtype), random(out_features, in_features, dtype=dtype)
        weight, offset = weight / in_features**0.5, random(out_features, dtype=dtype) if bias else None
        want = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
        if activation:
            want = activations.GATED[activation](want)
        on_device = None if offset is None else offset.to(DEVICE)
        for _ in range(2):  # the counters are left as they were found
            assert_near(skinny_linear(*to(x, weight), on_device, activation, shape=shape), want, dtype)


def sampling_batch(rows: int, **values: list[float]) -> sampling.SamplingBatch:
    """Parameters by name; keys differ from row to row."""
    keys = [sampling.random_key(17, index) for index in range(rows)]
    made = {
        name: torch.tensor(column, dtype=torch.int64 if name == "top_k" else torch.float32)
        for name, column in values.items()
    }
    low, high = (torch.tensor(column) for column in zip(*keys, strict=True))
    return sampling.SamplingBatch(**made, key_low=low, key_high=high)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"top_k": [1, 0, 5, 40, 2, 700]},
        {"top_p": [0.1, 0.5, 0.9, 1.0, 0.99, 0.7]},
        {"min_p": [0.0, 0.1, 0.5, 0.05, 1.0, 0.01]},
        {"top_k": [3, 0, 50, 0, 7, 1], "top_p": [0.5, 0.9, 0.3, 1.0, 0.999, 0.2]},
        {
            "top_k": [3, 0, 50, 9, 7, 1],
            "top_p": [0.5, 0.9, 0.3, 1.0, 0.9, 0.2],
            "min_p": [0.1, 0.0, 0.2, 0.3, 0.0, 0.0],
        },
    ],
)
@pytest.mark.parametrize(("vocab_size", "ties"), [(11, False), (4200, False), (4200, True)])
def test_sampling(values: dict[str, list[float]], vocab_size: int, ties: bool) -> None:
    rows = 6
    logits = torch.randn(rows, vocab_size) * 3
    if ties:
        logits = logits.round()  # many tokens equal the last one that is kept
    logits[:, 3] = -torch.inf
    batch = sampling_batch(rows, temperature=[1.0, 0.7, 1.5, 2.0, 0.0, 1.0], **values)
    want = sampling.sample(logits, batch)
    on_device = sampling.SamplingBatch(
        **{name: None if value is None else value.to(DEVICE) for name, value in vars(batch).items()}
    )
    assert gpu_sampling.sample(logits.to(DEVICE), on_device).tolist() == want.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_sampling_takes_the_first_of_the_largest(dtype: torch.dtype) -> None:
    logits = torch.zeros(4, 9000, dtype=dtype)
    logits[0, [5, 8000]] = 2
    logits[1, 8999] = 1
    logits[3] = -torch.inf
    logits[3, 4097] = -5
    assert gpu_sampling.sample(logits.to(DEVICE), sampling.SamplingBatch()).tolist() == [5, 8999, 0, 4097]
