"""A step's attention over a random cache: what a GPU is given, what the reference is, and their comparison."""

import torch

from kernels.attention import HostLayout
from kernels.float8 import saturate
from kernels.gpu.attention_layout import DECODE_TILE, PREFILL_TILE, PREFIX_MEMBERS, GpuLayout, PrefixLayout
from kernels.rotary_attention import rotary_attention
from kernels.rotary_kv import HeadNorms
from worker.shared_prefixes import PrefixGroup, PrefixGrouping

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

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


class PagedCase:
    """Sequences with the given (query, context) lengths over a randomly ordered pool; decodes first.

    ``groups`` are of the decoding ones, whose shared keys are cut into ``wanted_parts`` parts. The keys of each tile of
    queries are divided among ``prefill_parts``. With ``captured``, no one knows beforehand how many sequences decode.
    """

    def __init__(
        self, lengths: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype,
        unused: int = 0, float8: bool = False, normed: bool = False,
        groups: list[PrefixGroup] | None = None, wanted_parts: int = 5, prefill_parts: int = 1, captured: bool = False,
    ) -> None:  # fmt: skip
        block_size = 16
        tables = [-(-context // block_size) for _, context in lengths]
        blocks = torch.randperm(sum(tables) + 2).tolist()
        self.head_dim, tokens = head_dim, sum(count for count, _ in lengths)
        self.qkv = random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
        angles = torch.rand(tokens, head_dim // 2) * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        if float8 and DEVICE.type == "cpu":  # the interpreter rounds wrongly: only what float8 holds exactly
            self.qkv, self.cos, self.sin = saturate(self.qkv).to(dtype), angles.cos().round(), angles.sin().round()
            self.cos = torch.where(self.sin == 0, 1.0, 0.0)
        self.norms = None
        if normed:
            weights = random(2, head_dim, dtype=dtype)
            self.norms = HeadNorms(weights[0], weights[1], 1e-5, 1.0)
        self.caches = random(2, len(blocks), block_size, kv_heads, head_dim, dtype=dtype)
        if float8:
            self.caches = saturate(self.caches)
        taken = [[blocks.pop() for _ in range(size)] for size in tables]
        for group in groups or ():
            for member in group.members:
                taken[member][: group.keys // block_size] = taken[group.members[0]][: group.keys // block_size]
        width = max(tables)
        padded = torch.tensor([table + [0] * (width - len(table)) for table in taken])
        counts, contexts = [count for count, _ in lengths], [context for _, context in lengths]
        slots = torch.tensor(
            [
                table[position // block_size] * block_size + position % block_size
                for table, (count, context) in zip(taken, lengths, strict=True)
                for position in range(context - count, context)
            ]
        )
        self.host = HostLayout(slots, padded, tuple(counts), tuple(contexts), block_size, block_size)
        decodes = sum(count == 1 for count in counts)
        rows = torch.randperm(len(lengths) + 3)[: len(lengths)]
        by_row = torch.zeros(len(lengths) + 3, width, dtype=torch.int32)
        by_row[rows] = padded.int()
        # Places without a sequence stand behind the decoding ones, or behind all; they see nothing.
        before = len(lengths) if captured else decodes
        used = torch.tensor([1] * before + [0] * unused + [1] * (len(lengths) - before), dtype=torch.bool)
        all_counts = torch.ones(len(used), dtype=torch.int64)
        all_counts[used] = torch.tensor(counts)
        all_contexts, all_rows = torch.zeros(len(used), dtype=torch.int32), torch.zeros(len(used), dtype=torch.int32)
        all_contexts[used], all_rows[used] = torch.tensor(contexts, dtype=torch.int32), rows.int()
        num_decodes = len(used) if captured else decodes + unused
        decode_contexts = all_contexts[:num_decodes].clone()
        decode_contexts[decodes:] = 0
        tiles = (decode_contexts + DECODE_TILE - 1) // DECODE_TILE
        prefill = [
            (place, start, part, prefill_parts)
            for place in range(decodes if captured else num_decodes, before if captured else len(used))
            for start in range(0, int(all_counts[place]), PREFILL_TILE)
            for part in range(prefill_parts)
        ]
        divided = len(prefill) if prefill_parts > 1 else 0
        prefill += [(-1, -1, -1, -1)] * (unused if captured else 0)
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), all_counts.cumsum(0)))
        ints = [
            *(by_row, all_rows, all_contexts),
            *(torch.cat((torch.zeros(1, dtype=torch.int32), tiles.cumsum(0))), starts),
            torch.tensor(prefill).reshape(-1, 4).T.contiguous(),
        ]
        table, row, context, tile, start, prefill_tiles = (value.int().to(DEVICE) for value in ints)
        self.used = torch.repeat_interleave(used, all_counts)
        prefixes = None if groups is None else _prefix_layout(groups, decode_contexts, wanted_parts)
        self.layout = GpuLayout(
            slot_mapping=self.padded(slots, -1),
            block_tables=table,
            rows=row,
            context_lens=context,
            decode_tiles=tile,
            num_decodes=num_decodes,
            prefill_start=0 if captured else num_decodes,
            query_starts=start,
            prefill_tiles=prefill_tiles,
            divided=divided,
            prefixes=prefixes,
        )

    def padded(self, values: torch.Tensor, filling: int = 0) -> torch.Tensor:
        """A row for each token, and one for each place that is not in use, on the device."""
        padded = torch.full((len(self.used), *values.shape[1:]), filling, dtype=values.dtype)
        padded[self.used] = values
        return padded.to(DEVICE)

    def check(self, window: int | None = None, softcap: float | None = None) -> None:
        rules = self.head_dim**-0.5, window, softcap
        caches = self.caches.clone().to(DEVICE)
        want = rotary_attention(self.qkv, self.cos, self.sin, *self.caches, self.host, *rules, self.norms)
        norms = self.norms and HeadNorms(*to(self.norms.query, self.norms.key), self.norms.eps, self.norms.offset)
        given = [self.padded(values) for values in (self.qkv, self.cos, self.sin)]
        for _ in range(2):  # the counters are left as they were found
            found = rotary_attention(*given, *caches, self.layout, *rules, norms)
            assert_near(found[self.used.to(DEVICE)], want, self.qkv.dtype)
            assert_near(caches.float(), self.caches.float(), self.qkv.dtype)


def _prefix_layout(groups: list[PrefixGroup], contexts: torch.Tensor, wanted_parts: int) -> PrefixLayout:
    """As ``GpuInputBuilder`` makes it."""
    places, grouping = len(contexts), PrefixGrouping(16, wanted_parts, 1)
    columns = torch.from_numpy(grouping.columns(groups, places))
    tiles, parts = grouping.most(places)
    sequences, members, parts_ = columns.split((3 * places, PREFIX_MEMBERS * tiles, 3 * parts))
    own = (contexts.cpu() - sequences[:places] + DECODE_TILE - 1) // DECODE_TILE
    own_tiles = torch.cat((torch.zeros(1, dtype=torch.int32), own.cumsum(0).int()))
    return PrefixLayout(*to(sequences.view(3, -1), members.view(tiles, -1), parts_.view(3, -1), own_tiles))
