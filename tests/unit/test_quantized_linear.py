"""FP8 and 4-bit products against plain arithmetic; packing there and back; layers divided among ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import fp8_linear
from kernels.awq_linear import dequantize_weight, pack_weight, packed_width, unpack_weight, w4a16_linear
from kernels.float8 import E4M3_MAX
from kernels.fp8_quantize import quantize_per_token
from tests.doubles.quantized_model import AWQ_PLACES, four_bits, fp8_product, pack_rows, round_to_e4m3
from worker.models.layers import Linear
from worker.models.packing import AWQ_ORDER, CONSECUTIVE, unpack
from worker.models.sharding import part
from worker.parallel.shards import Parallel
from worker.quantization import W4A16, Fp8, Modules

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**32)


def random_codes(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)


@given(rows=sizes, columns=st.integers(1, 300), seed=seeds)
@settings(max_examples=50, deadline=None)
def test_our_layout_gives_back_what_was_packed(rows, columns, seed):
    codes = random_codes(rows, columns, seed)
    packed = pack_weight(codes)
    assert (packed.dtype, packed.shape) == (torch.int32, (rows, packed_width(columns)))
    assert torch.equal(unpack_weight(packed, columns), codes)


def test_our_layout_is_the_documented_one():
    codes = random_codes(3, 300, 0)
    packed = pack_weight(codes)
    for at in range(384):
        tile, place, word = at // 128, at % 128 // 16, at % 16
        found = packed[:, tile * 16 + word] >> 4 * place & 15
        assert torch.equal(found.to(torch.uint8), codes[:, at] if at < 300 else torch.zeros(3, dtype=torch.uint8))


@pytest.mark.parametrize(("order", "places"), [(AWQ_ORDER, AWQ_PLACES), (CONSECUTIVE, tuple(range(8)))])
@given(rows=sizes, words=st.integers(1, 6), seed=seeds)
@settings(max_examples=30, deadline=None)
def test_the_tools_layouts_are_unpacked(order, places, rows, words, seed):
    codes = random_codes(rows, 8 * words, seed)
    assert torch.equal(unpack(pack_rows(codes, places), order), codes)


def test_the_order_of_awq_word_for_word():
    """0x76543210 holds, from the lowest four bits on, columns 0, 2, 4, 6, 1, 3, 5, 7."""
    assert unpack(torch.tensor([[0x76543210]], dtype=torch.int32), AWQ_ORDER).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]


@given(rows=sizes, columns=sizes, seed=seeds, exponent=st.integers(-30, 30))
@settings(max_examples=50, deadline=None)
def test_tokens_are_rounded_to_the_nearest_of_their_scale(rows, columns, seed, exponent):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    values, scale = quantize_per_token(x)
    assert (values.dtype, values.shape) == (torch.float8_e4m3fn, x.shape)
    assert (scale.dtype, scale.shape) == (torch.float32, (rows, 1))
    assert torch.equal(values.float(), round_to_e4m3(x / scale))
    assert torch.equal(values.float().abs().amax(-1), torch.full((rows,), E4M3_MAX))
    error = (values.float() * scale - x).abs()
    assert (error <= torch.maximum(x.abs() / 16, scale / 1024) * 1.0001).all()


def test_zeros_and_the_smallest_numbers_stay_finite():
    x = torch.tensor([[0.0, 0.0], [1e-45, 0.0], [3e38, -1e-38]])
    values, scale = quantize_per_token(x)
    assert values.float().isfinite().all()
    assert (scale > 0).all()
    assert values[0].float().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("scales", [1, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_product(scales, dtype):
    torch.manual_seed(0)
    x, bias = torch.randn(5, 48, dtype=dtype), torch.randn(24, dtype=dtype)
    weight, scale = torch.randn(24, 48).to(torch.float8_e4m3fn), torch.rand(scales) + 0.1
    wanted = fp8_product(x.double(), weight.double() * scale.double()[:, None]) + bias.double()
    quantized = quantize_per_token(x)
    found = fp8_linear.fp8_product(*quantized, weight, scale, dtype, bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)
    plain = fp8_linear.fp8_product(*quantized, weight, scale, dtype)
    torch.testing.assert_close(plain, found - bias, rtol=0.01, atol=0.05)
    gate, up = plain.chunk(2, dim=1)
    gated = fp8_linear.fp8_gated_product(*quantized, weight, scale, dtype, None, "silu")
    torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up, rtol=0.02, atol=0.02)
    # Quantized in one with the gate is as quantized after it.
    values, row_scale = fp8_linear.fp8_gated_product(*quantized, weight, scale, dtype, None, "silu", quantize=True)
    wanted_values, wanted_scale = quantize_per_token(gated)
    assert values.dtype == torch.float8_e4m3fn
    assert torch.equal(values.float(), wanted_values.float())
    assert torch.equal(row_scale, wanted_scale)


@pytest.mark.parametrize(("group", "symmetric"), [(16, True), (32, False), (128, False), (160, True)])
def test_four_bit_product(group, symmetric):
    torch.manual_seed(0)
    x, bias = torch.randn(5, 160 if group != 128 else 256), torch.randn(24)
    codes, scales, zeros = four_bits(torch.randn(24, x.shape[1]), group, symmetric)
    dense = (codes - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)
    packed = pack_weight(codes.to(torch.uint8))
    zero = None if symmetric else zeros.T.to(torch.uint8)
    assert torch.equal(dequantize_weight(packed, scales.T, zero, group, x.shape[1]), dense)
    torch.testing.assert_close(w4a16_linear(x, packed, scales.T, zero, group, bias), x @ dense.T + bias)


def shard(
    tensors: dict[str, torch.Tensor], quantization: W4A16 | Fp8, rank: int, ranks: int, by_inputs: bool
) -> Linear:
    """Two fused parts of 48 and 16 outputs, of 96 inputs, as a rank loads them."""
    parallel = Parallel(rank, ranks)
    widths = {"a": 48, "b": 16}
    parts = [
        part(name, (width, range(width) if by_inputs else parallel.share(width))) for name, width in widths.items()
    ]
    inputs = parallel.share(96) if by_inputs else None
    layer = Linear(96, parts, inputs=inputs, quantization=quantization)
    targets = layer.targets()
    assert targets.keys() == tensors.keys()
    for name, target in targets.items():
        target.fill(tensors[name])
    return layer


@pytest.mark.parametrize("by_inputs", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["awq", "packed", "tensor", "channel", "none"])
def test_shards_compute_the_whole_product(kind, ranks, by_inputs):
    """Inputs are divided at 32, 48 and 64: within groups of 32, and within the one group of a channel."""
    torch.manual_seed(0)
    tensors, dense = {}, []
    for name, width in (("a", 48), ("b", 16)):
        weight = torch.randn(width, 96)
        if kind in ("awq", "packed"):
            group = 32 if kind == "awq" else 96
            codes, scales, zeros = four_bits(weight, group, symmetric=False)
            dense.append((codes - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1))
        if kind == "awq":
            tensors[f"{name}.qweight"] = pack_rows(codes.T, AWQ_PLACES)
            tensors[f"{name}.qzeros"] = pack_rows(zeros.T, AWQ_PLACES)
            tensors[f"{name}.scales"] = scales.T
        elif kind == "packed":
            tensors[f"{name}.weight_packed"] = pack_rows(codes)
            tensors[f"{name}.weight_scale"] = scales
            tensors[f"{name}.weight_zero_point"] = pack_rows(zeros.T).T
            tensors[f"{name}.weight_shape"] = torch.tensor([width, 96])
        else:
            largest = weight.abs().max().view(1) if kind == "tensor" else weight.abs().amax(1, keepdim=True)
            values = round_to_e4m3(weight / (largest / 448))
            dense.append(values * (largest / 448))
            tensors[f"{name}.weight"] = weight if kind == "none" else values.to(torch.float8_e4m3fn)
            if kind != "none":
                tensors[f"{name}.weight_scale"] = largest / 448
    quantization = {"awq": W4A16("awq", 32, True), "packed": W4A16("compressed-tensors", None, True)}.get(
        kind, Fp8(kind)
    )
    x = torch.randn(7, 96)
    layers = [shard(tensors, quantization, rank, ranks, by_inputs) for rank in range(ranks)]
    if by_inputs:
        found = sum(layer.weights(x[:, layer.cut.inputs.start : layer.cut.inputs.stop], None) for layer in layers)
    else:
        found = torch.cat(
            [torch.cat([layer(x).split(list(held(layer)), 1)[i] for layer in layers], 1) for i in (0, 1)], 1
        )
    if isinstance(quantization, W4A16):
        wanted = x @ torch.cat(dense).T
    else:
        wanted = fp8_product(x.double(), torch.cat(dense).double(), ranks if by_inputs else 1).float()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


def held(layer: Linear) -> list[int]:
    """Outputs of each part."""
    return [sum(len(rows) for rows in fused.held) for fused in layer.cut.parts]


@pytest.mark.parametrize(
    ("pattern", "name", "named"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("up_proj", "model.layers.1.mlp.up_proj", True),
        ("mlp.up", "model.layers.1.mlp.up_proj", False),
        ("re:.*up_proj", "model.layers.1.mlp.up_proj", True),
        ("re:up_proj", "model.layers.1.mlp.up_proj", False),
        ("Linear", "model.layers.1.mlp.up_proj", True),
    ],
)
def test_layers_are_named(pattern, name, named):
    assert Modules(ignored=(pattern,)).include(name) is not named
    assert Modules(targets=(pattern,)).include(name) is named
