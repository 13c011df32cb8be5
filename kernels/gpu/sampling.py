"""Sampling without a sort and without waiting for the host.

top-k and top-p need the logit of the last token to keep. It is found exactly, by a search over the bits of float32:
eight rounds, each of which counts, or weighs, the tokens above fifteen thresholds at once, and so settles four bits.
The choice is then one pass that adds Gumbel noise (a hash, see ``kernels.sampling``) to what is kept and takes the
largest. A row is divided among several programs.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import dependent_launch, wait_for_previous
from kernels.sampling import SamplingBatch

_CHUNK = 4096  # tokens of a program
_PIECE = 256  # tokens that it compares with all thresholds at once


@triton.jit
def _ordered_to_float(key):
    """The float32 whose place among all, in order, is ``key``, [0, 2^32) in int64; -inf for what is below all."""
    bits = tl.where(key >= 2147483648, key - 2147483648, -key - 1).to(tl.int32)
    value = bits.to(tl.float32, bitcast=True)
    return tl.where(key < 8388607, float("-inf"), value)


@triton.jit
def _row_max(max_ptr, row, chunks, CHUNKS: tl.constexpr):
    at = tl.arange(0, CHUNKS)
    return tl.max(tl.load(max_ptr + row * chunks + at, mask=at < chunks, other=float("-inf")))


@triton.jit
def _scaled(logits_ptr, row, token, vocab_size, temperature, floor):
    """Logits over the temperature; minus infinity for tokens below ``floor`` or beyond the vocabulary."""
    inside = token < vocab_size
    x = tl.load(logits_ptr + row.to(tl.int64) * vocab_size + token, mask=inside, other=float("-inf")).to(tl.float32)
    x = x / tl.where(temperature == 0, 1.0, temperature)
    return tl.where(x < floor, float("-inf"), x)


@triton.jit
def _max_kernel(
    logits_ptr, temperature_ptr, max_ptr, vocab_size, chunks, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    wait_for_previous(DEPENDENT)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _scaled(logits_ptr, row, token, vocab_size, tl.load(temperature_ptr + row), float("-inf"))
    tl.store(max_ptr + row * chunks + chunk, tl.max(x))


@triton.jit
def _above_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, max_ptr, prefix_ptr, found_ptr, vocab_size, chunks, shift,
    MIN_P: tl.constexpr, MASS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """How many tokens of a chunk (``MASS``: with what weight) are at least each of 16 thresholds."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    wait_for_previous(DEPENDENT)
    temperature = tl.load(temperature_ptr + row)
    largest = _row_max(max_ptr, row, chunks, CHUNKS)
    floor = float("-inf")
    if MIN_P:
        floor = largest + tl.log(tl.maximum(tl.load(min_p_ptr + row), 1e-30))
    digit = tl.arange(0, 16)
    threshold = _ordered_to_float(tl.load(prefix_ptr + row) + (digit.to(tl.int64) << shift))
    found = tl.zeros([16, PIECE], tl.float32)
    for piece in range(0, CHUNK, PIECE):
        token = chunk * CHUNK + piece + tl.arange(0, PIECE)
        x = _scaled(logits_ptr, row, token, vocab_size, temperature, floor)
        weight = tl.where(token < vocab_size, 1.0, 0.0)
        if MASS:
            weight = tl.exp(x - largest)
        found += tl.where(x[None, :] >= threshold[:, None], weight[None, :], 0.0)
    tl.store(found_ptr + (row * chunks + chunk) * 16 + digit, tl.sum(found, axis=1))


@triton.jit
def _narrow_kernel(
    prefix_ptr, found_ptr, target_ptr, chunks, shift, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """Takes the largest threshold above which there is at least the target."""
    row = tl.program_id(0)
    wait_for_previous(DEPENDENT)
    chunk = tl.arange(0, CHUNKS)
    digit = tl.arange(0, 16)
    at = found_ptr + (row * chunks + chunk[:, None]) * 16 + digit[None, :]
    found = tl.sum(tl.load(at, mask=(chunk < chunks)[:, None], other=0.0), axis=0)
    best = tl.max(tl.where(found >= tl.load(target_ptr + row), digit, 0))
    tl.store(prefix_ptr + row, tl.load(prefix_ptr + row) + (best.to(tl.int64) << shift))


@triton.jit
def _beyond_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, max_ptr, prefix_ptr, found_ptr, vocab_size, chunks,
    MIN_P: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Count and weight of a chunk's tokens that are greater than the row's threshold."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    wait_for_previous(DEPENDENT)
    largest = _row_max(max_ptr, row, chunks, CHUNKS)
    floor = float("-inf")
    if MIN_P:
        floor = largest + tl.log(tl.maximum(tl.load(min_p_ptr + row), 1e-30))
    threshold = _ordered_to_float(tl.load(prefix_ptr + row))
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _scaled(logits_ptr, row, token, vocab_size, tl.load(temperature_ptr + row), floor)
    beyond = x > threshold
    tl.store(found_ptr + (row * chunks + chunk) * 16, tl.sum(tl.where(beyond, 1.0, 0.0)))
    tl.store(found_ptr + (row * chunks + chunk) * 16 + 1, tl.sum(tl.where(beyond, tl.exp(x - largest), 0.0)))


@triton.jit
def _target_mass_kernel(
    top_k_ptr, top_p_ptr, max_ptr, prefix_ptr, found_ptr, target_ptr, chunks,
    TOP_K: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The weight that top-p wants of what top-k kept; of tokens that equal the last one, as many as have room."""
    row = tl.program_id(0)
    wait_for_previous(DEPENDENT)
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    at = found_ptr + (row * chunks + chunk) * 16
    count = tl.sum(tl.load(at, mask=there, other=0.0))
    mass = tl.sum(tl.load(at + 1, mask=there, other=0.0))
    if TOP_K:
        top_k = tl.load(top_k_ptr + row).to(tl.float32)
        last = _ordered_to_float(tl.load(prefix_ptr + row))
        equal = tl.exp(last - _row_max(max_ptr, row, chunks, CHUNKS))
        mass += tl.where(top_k > 0, tl.maximum(top_k - count, 0.0) * equal, 0.0)
    tl.store(target_ptr + row, mass * tl.load(top_p_ptr + row))


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _gumbel(token, key_low, key_high):
    bits = _mix32(token.to(tl.uint32) * 0x9E3779B9 + key_low)
    bits = _mix32(bits ^ key_high)
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # -log(1 - u), exact also near zero, where the winner's noise lies.
    near = uniform * (1 + uniform * (0.5 + uniform * (0.3333333333 + uniform * (0.25 + uniform * 0.2))))
    return -tl.log(tl.where(uniform < 0.01, near, -tl.log(1 - uniform)))


@triton.jit
def _best_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, max_ptr, by_count_ptr, by_mass_ptr,
    key_low_ptr, key_high_ptr, best_ptr, best_token_ptr, vocab_size, chunks,
    RANDOM: tl.constexpr, MIN_P: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    wait_for_previous(DEPENDENT)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _scaled(logits_ptr, row, token, vocab_size, 1.0, float("-inf"))
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
        floor = float("-inf")
        if MIN_P:
            floor = _row_max(max_ptr, row, chunks, CHUNKS) + tl.log(tl.maximum(tl.load(min_p_ptr + row), 1e-30))
        scaled = _scaled(logits_ptr, row, token, vocab_size, temperature, floor)
        if TOP_K:
            kept = _ordered_to_float(tl.load(by_count_ptr + row))
            kept = tl.where(tl.load(top_k_ptr + row) > 0, kept, float("-inf"))
            scaled = tl.where(scaled < kept, float("-inf"), scaled)
        if TOP_P:
            kept = _ordered_to_float(tl.load(by_mass_ptr + row))
            kept = tl.where(tl.load(top_p_ptr + row) < 1, kept, float("-inf"))
            scaled = tl.where(scaled < kept, float("-inf"), scaled)
        low = tl.load(key_low_ptr + row).to(tl.uint32)
        high = tl.load(key_high_ptr + row).to(tl.uint32)
        x = tl.where(temperature == 0, x, scaled + _gumbel(token, low, high))
    best, at = tl.max(x, axis=0, return_indices=True)
    tl.store(best_ptr + row * chunks + chunk, best)
    tl.store(best_token_ptr + row * chunks + chunk, chunk * CHUNK + at)


@triton.jit
def _choose_kernel(
    best_ptr, best_token_ptr, out_ptr, vocab_size, chunks, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    wait_for_previous(DEPENDENT)
    chunk = tl.arange(0, CHUNKS)
    best = tl.load(best_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    _, at = tl.max(best, axis=0, return_indices=True)
    # Of logits that are not numbers none is the largest; the choice must be a token all the same.
    token = tl.load(best_token_ptr + row * chunks + tl.minimum(at, chunks - 1))
    tl.store(out_ptr + row, tl.minimum(token, vocab_size - 1).to(tl.int64))


class _Search:
    """The launches over one step's logits, which share buffers."""

    def __init__(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        self.logits, self.batch = logits, batch
        self.rows, self.vocab_size = logits.shape
        self.chunks = triton.cdiv(self.vocab_size, _CHUNK)
        self.dependent = dependent_launch(logits.device)
        self.options = {
            "CHUNKS": triton.next_power_of_2(self.chunks), "DEPENDENT": self.dependent, "launch_pdl": self.dependent
        }  # fmt: skip
        self.max = self._new(torch.float32, self.chunks)
        self.found = self._new(torch.float32, self.chunks * 16)
        self.target = self._new(torch.float32, 1)
        # A parameter that no row uses is never read; any tensor stands in for its pointer.
        self.min_p = self.target if batch.min_p is None else batch.min_p

    def _new(self, dtype: torch.dtype, width: int) -> torch.Tensor:
        return torch.empty((self.rows, width), dtype=dtype, device=self.logits.device)

    def find_max(self) -> None:
        _max_kernel[(self.rows, self.chunks)](
            self.logits, self.batch.temperature, self.max, self.vocab_size, self.chunks,
            CHUNK=_CHUNK, DEPENDENT=self.dependent, launch_pdl=self.dependent,
        )  # fmt: skip

    def last_kept(self, mass: bool) -> torch.Tensor:
        """[rows] int64: for each row, the largest logit, as its place among floats, above which is the target."""
        prefix = torch.zeros(self.rows, dtype=torch.int64, device=self.logits.device)
        for shift in range(28, -1, -4):
            _above_kernel[(self.rows, self.chunks)](
                self.logits, self.batch.temperature, self.min_p, self.max, prefix, self.found,
                self.vocab_size, self.chunks, shift,
                MIN_P=self.batch.min_p is not None, MASS=mass, CHUNK=_CHUNK, PIECE=_PIECE, **self.options,
            )  # fmt: skip
            _narrow_kernel[(self.rows,)](prefix, self.found, self.target, self.chunks, shift, **self.options)
        return prefix

    def aim_at_mass(self, by_count: torch.Tensor) -> None:
        """Sets the target to top-p's share of the weight that is left."""
        batch = self.batch
        _beyond_kernel[(self.rows, self.chunks)](
            self.logits, batch.temperature, self.min_p, self.max, by_count, self.found, self.vocab_size, self.chunks,
            MIN_P=batch.min_p is not None, CHUNK=_CHUNK, **self.options,
        )  # fmt: skip
        _target_mass_kernel[(self.rows,)](
            self.target if batch.top_k is None else batch.top_k, batch.top_p, self.max, by_count, self.found,
            self.target, self.chunks, TOP_K=batch.top_k is not None, **self.options,
        )  # fmt: skip

    def choose(self, by_count: torch.Tensor, by_mass: torch.Tensor) -> torch.Tensor:
        batch, unused = self.batch, self.target
        best, best_token = self._new(torch.float32, self.chunks), self._new(torch.int32, self.chunks)
        out = torch.empty(self.rows, dtype=torch.int64, device=self.logits.device)
        random = batch.temperature is not None
        _best_kernel[(self.rows, self.chunks)](
            self.logits, batch.temperature if random else unused, self.min_p,
            unused if batch.top_k is None else batch.top_k, unused if batch.top_p is None else batch.top_p,
            self.max, by_count, by_mass,
            batch.key_low if random else unused, batch.key_high if random else unused, best, best_token,
            self.vocab_size, self.chunks,
            RANDOM=random, MIN_P=batch.min_p is not None, TOP_K=batch.top_k is not None, TOP_P=batch.top_p is not None,
            CHUNK=_CHUNK, **self.options,
        )  # fmt: skip
        _choose_kernel[(self.rows,)](best, best_token, out, self.vocab_size, self.chunks, **self.options)
        return out


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """See ``kernels.sampling.sample``."""
    search = _Search(logits.contiguous(), batch)
    nothing = torch.zeros(search.rows, dtype=torch.int64, device=logits.device)  # keeps all
    if batch.temperature is None:
        return search.choose(nothing, nothing)
    by_count = by_mass = nothing
    if batch.min_p is not None or batch.top_k is not None or batch.top_p is not None:
        search.find_max()
    if batch.top_k is not None:
        # A row without top-k keeps all: there is no threshold above which are more tokens than there are.
        wanted = torch.where(batch.top_k > 0, batch.top_k.float(), float("inf"))
        search.target.copy_(wanted[:, None])
        by_count = search.last_kept(mass=False)
    if batch.top_p is not None:
        search.aim_at_mass(by_count)
        by_mass = search.last_kept(mass=True)
    return search.choose(by_count, by_mass)
