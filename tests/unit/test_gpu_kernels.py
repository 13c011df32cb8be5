"""Triton kernels against their torch references: on a GPU when there is one, else in Triton's interpreter.

The interpreter shows that the arithmetic and the indexing are right, not that the compiled code is.
"""

import pytest
import torch

pytest.importorskip("triton")

from kernels import activation as activations
from kernels import awq_linear, fp8_quantize, norm, rotary_kv, sampling
from kernels.experts import experts_mlp
from kernels.float8 import saturate
from kernels.fp8_linear import fp8_product
from kernels.gpu import activation as gpu_activation
from kernels.gpu import awq_linear as gpu_awq_linear
from kernels.gpu import experts as gpu_experts
from kernels.gpu import fp8_quantize as gpu_fp8_quantize
from kernels.gpu import norm as gpu_norm
from kernels.gpu import rotary_kv as gpu_rotary_kv
from kernels.gpu import sampling as gpu_sampling
from kernels.gpu.fp8_linear import scaled_mm
from kernels.gpu.linear import Shape, skinny_linear
from kernels.rotary_kv import HeadNorms
from tests.doubles.paged_case import DEVICE, DTYPES, PagedCase, assert_near, random, to
from worker.shared_prefixes import PrefixGroup


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
    norms = None if normed is None else HeadNorms(*random(2, head_dim, dtype=dtype), 1e-5, normed)
    caches = torch.zeros(2, 3, 16, kv_heads, head_dim, dtype=dtype)
    want = rotary_kv.rotary_kv(qkv, cos, sin, *caches, slots, norms)
    found_caches = torch.zeros_like(caches).to(DEVICE)
    on_device = norms and HeadNorms(*to(norms.query, norms.key), norms.eps, norms.offset)
    found = gpu_rotary_kv.rotary_kv(*to(qkv, cos, sin), *found_caches, slots.to(DEVICE), on_device)
    assert_near(found, want, dtype)
    assert_near(found_caches, caches, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", [True] if DEVICE.type == "cpu" else [True, False])
def test_rotary_kv_saturates_in_float8(dtype: torch.dtype, exact: bool) -> None:
    """Exact: of values that float8 holds, turned by right angles; the interpreter rounds to float8 wrongly."""
    qkv = random(5, 8 * 64) * 200
    qkv = qkv.to(dtype) if not exact else saturate(qkv).to(dtype) * (1 + torch.randint(2, (5, 1)))
    angles = torch.rand(5, 32) * 6
    cos, sin = (angles.cos(), angles.sin()) if not exact else (angles.cos().round(), 1 - angles.cos().round().abs())
    slots = torch.tensor([0, 17, 3, 40, 9])
    caches = torch.zeros(2, 3, 16, 2, 64, dtype=torch.float8_e4m3fn)
    want = rotary_kv.rotary_kv(qkv, cos, sin, *caches, slots)
    found_caches = torch.zeros_like(caches).to(DEVICE)
    on_device = to(qkv, cos, sin)
    found = gpu_rotary_kv.rotary_kv(*on_device, *found_caches, slots.to(DEVICE), None)
    assert_near(found, want, dtype)
    assert found_caches.float().abs().max() == 448
    if exact:
        assert torch.equal(found_caches.float().cpu(), caches.float())
    else:
        assert_near(found_caches.float(), caches.float(), torch.bfloat16)  # some may be rounded the other way


def test_rotary_kv_stores_nothing_at_negative_slots() -> None:
    cache = torch.zeros(2, 1, 16, 1, 16).to(DEVICE)
    angles = torch.zeros(2, 8).to(DEVICE)
    slots = torch.tensor([-1, 3]).to(DEVICE)
    gpu_rotary_kv.rotary_kv(torch.ones(2, 48).to(DEVICE), angles, angles, *cache, slots, None)
    assert cache.view(2, 16, 16).sum(dim=-1).nonzero().tolist() == [[1, 3]]  # the key is rotated by cos = sin = 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (37, None), (None, 5.0), (100, 5.0)])
@pytest.mark.parametrize("unused", [0, 2])
def test_decode_attention(dtype: torch.dtype, window: int | None, softcap: float | None, unused: int) -> None:
    lengths = [(1, length) for length in (1, 700, 16, 65, 64, 300, 129)]
    PagedCase(lengths, 8, 2, 16, dtype, unused).check(window, softcap)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 24), (16, 1, 128)])
def test_decode_attention_shapes(heads: int, kv_heads: int, head_dim: int) -> None:
    PagedCase([(1, 90), (1, 200)], heads, kv_heads, head_dim, torch.float16).check()


def test_decode_attention_normalises_heads() -> None:
    PagedCase([(1, 90), (1, 1), (3, 17)], 8, 2, 64, torch.float16, 1, normed=True).check()


def test_one_long_sequence_is_divided() -> None:
    PagedCase([(1, 1500), (1, 40)], 4, 2, 32, torch.float32).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (37, None), (None, 5.0), (150, 5.0)])
def test_prefill_attention(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    lengths = [(2, 2), (40, 200), (130, 130), (300, 333), (5, 260)]
    PagedCase(lengths, 4, 2, 16, dtype).check(window, softcap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (37, 5.0), (150, None)])
def test_keys_before_a_few_queries_are_divided(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    """Some parts see no key at all: their tile has fewer tiles of keys, or none in its window."""
    PagedCase([(2, 2), (40, 700), (130, 333)], 4, 2, 16, dtype, prefill_parts=3).check(window, softcap)


def test_mixed_attention() -> None:
    PagedCase([(1, 70), (1, 3), (50, 120)], 9, 3, 64, torch.float16, 1).check()


def test_mixed_attention_that_knows_no_number_of_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":  # would take the reference, which knows no places that are not in use
        monkeypatch.setattr("kernels.rotary_attention.rotary_kv", gpu_rotary_kv.rotary_kv)
    lengths = [(1, 70), (1, 3), (50, 120), (2, 300)]
    for parts in (1, 2):
        PagedCase(lengths, 4, 2, 16, torch.float16, 3, prefill_parts=parts, captured=True).check()
    groups = [PrefixGroup((0, 1), 64)]
    PagedCase([(1, 70), (1, 90), (50, 120)], 4, 2, 16, torch.float16, 3, groups=groups, captured=True).check()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16][:3])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (37, 5.0)])
@pytest.mark.parametrize("head_dim", [24, 64])
def test_attention_over_a_float8_cache(
    dtype: torch.dtype, window: int | None, softcap: float | None, head_dim: int
) -> None:
    lengths = [(1, 90), (1, 333), (1, 1), (2, 2), (50, 120), (130, 260)]
    PagedCase(lengths, 4, 2, head_dim, dtype, 1, float8=True).check(window, softcap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("split", [1, 3])
def test_skinny_linear(dtype: torch.dtype, rows: int, activation: str | None, split: int) -> None:
    shape = Shape(block_out=64, block_in=64, split=split, stages=2, warps=4, prefetch=2)
    for out_features, in_features, bias in ((96, 256, True), (70, 200, False)):
        x, weight = random(rows, in_features, dtype=dtype), random(out_features, in_features, dtype=dtype)
        weight, offset = weight / in_features**0.5, random(out_features, dtype=dtype) if bias else None
        want = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
        if activation:
            want = activations.GATED[activation](want)
        on_device = None if offset is None else offset.to(DEVICE)
        for _ in range(2):  # the counters are left as they were found
            assert_near(skinny_linear(*to(x, weight), on_device, activation, shape=shape), want, dtype)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs CUDA graphs")
def test_parts_that_a_graph_writes_are_kept_when_larger_ones_are_made() -> None:
    shape = Shape(block_out=64, block_in=64, split=4, stages=2, warps=4, prefetch=0)
    x, weight = to(random(4, 1024, dtype=torch.float16), random(128, 1024, dtype=torch.float16))
    want = skinny_linear(x, weight, shape=shape)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = skinny_linear(x, weight, shape=shape)
    larger = to(random(60, 1024, dtype=torch.float16), random(4096, 1024, dtype=torch.float16))
    skinny_linear(*larger, shape=shape)
    taken = [torch.ones(size, dtype=torch.int32, device=DEVICE) for size in (1 << 10, 1 << 14, 1 << 16, 1 << 18) * 8]
    graph.replay()
    assert torch.equal(found, want)
    assert all(bool((tensor == 1).all()) for tensor in taken)


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


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
def test_a_token_is_chosen_even_when_logits_are_not_numbers() -> None:
    logits = torch.full((3, 4100), torch.nan)
    logits[1] = torch.randn(4100)
    random_batch = sampling_batch(3, temperature=[1.0, 1.0, 0.0], top_k=[5, 5, 0], top_p=[0.9, 1.0, 1.0])
    on_device = {name: None if value is None else value.to(DEVICE) for name, value in vars(random_batch).items()}
    for batch in (sampling.SamplingBatch(), sampling.SamplingBatch(**on_device)):
        ids = gpu_sampling.sample(logits.to(DEVICE), batch)
        assert bool(((ids >= 0) & (ids < 4100)).all()), ids


# Where float8 rounds: the interpreter does so wrongly, and gets only what float8 holds exactly.
EXACT = [True] if DEVICE.type == "cpu" else [True, False]


def float8_rows(rows: int, size: int) -> torch.Tensor:
    """What float8 holds times a power of two for each row, whose largest is 448 times that."""
    x = saturate(random(rows, size) * 100).float()
    x[:, size // 3] = 448
    return x * 2.0 ** torch.randint(-6, 3, (rows, 1))


def assert_quantized(found: fp8_quantize.Quantized, wanted: fp8_quantize.Quantized, exact: bool) -> None:
    values, scale = (part.cpu().float() for part in found)
    assert_near(scale, wanted[1], torch.float16)
    if exact:
        assert torch.equal(values, wanted[0].float())
    else:
        assert_near(values * scale, wanted[0].float() * wanted[1], torch.bfloat16)  # some are rounded the other way


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", EXACT)
@pytest.mark.parametrize("size", [7, 576, 1536])
def test_quantize_per_token(dtype: torch.dtype, exact: bool, size: int) -> None:
    x = (float8_rows(4, size) if exact else random(4, size)).to(dtype)
    x[2] = 0
    found = gpu_fp8_quantize.quantize_per_token(*to(x))
    assert_quantized(found, fp8_quantize.quantize_per_token(x), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", EXACT)
@pytest.mark.parametrize("size", [7, 1100])
def test_quantized_gates(dtype: torch.dtype, exact: bool, size: int) -> None:
    """Exact: a gate of 128 is its own sigmoid-weighted self."""
    gate_up = random(4, 2 * size)
    if exact:
        gate_up = torch.cat((torch.full((4, size), 128.0), float8_rows(4, size) / 128), dim=1)
    gate_up = gate_up.to(dtype)
    found = gpu_fp8_quantize.silu_mul_quantize(*to(gate_up))
    assert_quantized(found, fp8_quantize.silu_mul_quantize(gate_up), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", EXACT)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_quantized_norms(dtype: torch.dtype, exact: bool, offset: float) -> None:
    """Exact: rows of 1 and -1 are normal already."""
    size, eps = 576, 0.0 if exact else 1e-5
    x, residual, weight = random(3, size), random(3, size), random(size)
    if exact:
        x, residual = torch.randint(2, (3, size)) * 2.0 - 1, residual.round()
        weight = saturate(weight * 20).float().round().clamp(max=112)
        weight[7] = 112  # a quarter of 448
        weight -= offset
    x, residual, weight = (part.to(dtype) for part in (x, residual, weight))
    found = gpu_fp8_quantize.rms_norm_quantize(*to(x, weight), eps, offset)
    assert_quantized(found, fp8_quantize.rms_norm_quantize(x, weight, eps, offset), exact)
    added = x - residual if exact else x
    quantized, total = gpu_fp8_quantize.add_rms_norm_quantize(*to(added, residual, weight), eps, offset)
    wanted, wanted_total = fp8_quantize.add_rms_norm_quantize(added, residual, weight, eps, offset)
    assert_quantized(quantized, wanted, exact)
    assert torch.equal(total.cpu(), wanted_total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 200])
def test_fp8_product(dtype: torch.dtype, bias: bool, rows: int) -> None:
    values, scale = fp8_quantize.quantize_per_token(random(rows, 256))
    weight, weight_scale = fp8_quantize.quantize_per_token(random(96, 256))
    offset = random(96, dtype=dtype) if bias else None
    wanted = fp8_product(values, scale, weight, weight_scale[:, 0], torch.float32, offset)
    on_device = to(values, scale, weight, weight_scale[:, 0])
    found = scaled_mm(*on_device, dtype, None if offset is None else offset.to(DEVICE))
    assert found.dtype == dtype
    assert_near(found, wanted, torch.bfloat16)
    assert_near(fp8_product(*on_device, dtype, None if offset is None else offset.to(DEVICE)), wanted, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group_size", "in_features"), [(128, 1024), (128, 200), (256, 512), (512, 512), (64, 200), (48, 160), (16, 130)]
)
@pytest.mark.parametrize("zero_points", [False, True])
def test_four_bit_linear(dtype: torch.dtype, group_size: int, in_features: int, zero_points: bool) -> None:
    out_features, groups = 70, -(-in_features // group_size)
    weight = awq_linear.pack_weight(torch.randint(16, (out_features, in_features), dtype=torch.uint8))
    scales = (torch.rand(groups, out_features) + 0.1).to(dtype)
    zeros = torch.randint(16, (groups, out_features), dtype=torch.uint8) if zero_points else None
    dense = awq_linear.dequantize_weight(weight, scales, zeros, group_size, in_features)
    on_device = weight.to(DEVICE), scales.to(DEVICE), None if zeros is None else zeros.to(DEVICE), group_size
    found = gpu_awq_linear.dequantize_weight(*on_device, in_features, dtype)
    assert torch.equal(found.cpu(), dense.to(dtype))
    for rows, split, bias in ((1, 1, None), (5, 3, random(out_features)), (33, 2, None), (70, 2, None)):
        x, offset = random(rows, in_features, dtype=dtype), None if bias is None else bias.to(dtype)
        want = torch.nn.functional.linear(x.double(), dense.double(), None if offset is None else offset.double())
        shape = gpu_awq_linear.Shape(block_out=64, split=split, stages=3, warps=2)
        bias_there = None if offset is None else offset.to(DEVICE)
        assert_near(gpu_awq_linear.w4a16_linear(x.to(DEVICE), *on_device, bias_there, shape), want, dtype)


def test_parts_of_a_four_bit_linear_are_summed_again_and_again() -> None:
    """The counters of ended parts are zero again after each product."""
    weight = awq_linear.pack_weight(torch.randint(16, (130, 512), dtype=torch.uint8)).to(DEVICE)
    scales, x = torch.ones(4, 130).half().to(DEVICE), random(3, 512, dtype=torch.float16).to(DEVICE)
    shape = gpu_awq_linear.Shape(block_out=64, split=4, stages=2, warps=2)
    first, second = (gpu_awq_linear.w4a16_linear(x, weight, scales, None, 128, None, shape) for _ in range(2))
    assert first.abs().sum() > 0
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 96), (72, 23)])
@pytest.mark.parametrize(("tokens", "count", "chosen"), [(1, 8, 2), (5, 6, 3), (70, 4, 2), (40, 40, 1), (90, 3, 1)])
def test_experts(dtype: torch.dtype, hidden: int, intermediate: int, tokens: int, count: int, chosen: int) -> None:
    x = random(tokens, hidden, dtype=dtype)
    gate_up = random(count, 2 * intermediate, hidden, dtype=dtype) * hidden**-0.5
    down = random(count, hidden, intermediate, dtype=dtype)
    scores, experts = torch.rand(tokens, count).topk(chosen)
    experts[: tokens // 2] = torch.arange(chosen)  # so that some have many tokens, and the last ones few or none
    want = experts_mlp(x.double(), gate_up.double(), down.double(), experts, scores.double())
    on_device = to(x, gate_up, down, experts, scores.to(dtype))
    for shape in (None, gpu_experts.Shape(block_rows=16, block_out=64, block_in=32, stages=2, warps=4)):
        assert_near(gpu_experts.experts_mlp(*on_device, shape), want, dtype)
