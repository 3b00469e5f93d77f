"""A tiny Llama over a page table without SGLang's runner, as the target of a view step: its keys and values can be looked at.

Its forward is transformers' modules around our attention backend and a pool of slots. Beside it runs a twin in double precision
that knows no slots: it keeps keys and values by position, and attends to the positions that a view says it holds.

Legend: B requests, T tokens of a forward, H query heads, K key/value heads, D head size, P positions, S cache slots.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from device_rounds import Server
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from longdraft.kernels.plan import AttentionPlan
from longdraft.serve.attention_backend import LongDraftAttention
from longdraft.serve.tokens import Tokens
from longdraft.serve.view_step import ViewStep

ROWS, COLUMNS = 5, 400
SLOTS = ROWS * COLUMNS + 1
# No two neighbours of a request stand in neighbouring slots, and no slot has the number of a position.
TABLE = 1 + torch.randperm(ROWS * COLUMNS, generator=torch.Generator().manual_seed(3)).int().view(ROWS, COLUMNS)
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def llama_logits(model: Any, id_T: torch.Tensor, position_T: torch.Tensor, attend: Attend) -> torch.Tensor:
    """Logits of new tokens; ``attend(layer, q_THD, k_TKD, v_TKD)`` gives ``[T, H * D]``."""
    x = model.model.embed_tokens(id_T)
    rotation = model.model.rotary_emb(x[None], position_T[None])
    for number, layer in enumerate(model.model.layers):
        own, normed = layer.self_attn, layer.input_layernorm(x)
        q, k, v = (p(normed).unflatten(-1, (-1, own.head_dim)) for p in (own.q_proj, own.k_proj, own.v_proj))
        q, k = (
            y[0].transpose(0, 1) for y in apply_rotary_pos_emb(*(z.transpose(0, 1)[None] for z in (q, k)), *rotation)
        )
        x = x + own.o_proj(attend(number, q, k, v))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    logits_TV: torch.Tensor = model.lm_head(model.model.norm(x))
    return logits_TV


def attention(q_THD: torch.Tensor, k_PKD: torch.Tensor, v_PKD: torch.Tensor, before: int) -> torch.Tensor:
    """Of new tokens to ``before`` earlier ones and, causally, to themselves: ``[T, H * D]``."""
    seen_TP = torch.ones(len(q_THD), len(k_PKD), dtype=torch.bool).tril(before)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_PKD, v_PKD))
    return scaled_dot_product_attention(q, k, v, seen_TP, enable_gqa=True)[0].transpose(0, 1).flatten(1)


class PagePool:
    """A cache in which every unwritten slot is poison."""

    def __init__(self, config: Any) -> None:
        shape = config.num_hidden_layers, SLOTS, config.num_key_value_heads, config.head_dim
        self.k, self.v = (torch.full(shape, float("nan")) for _ in range(2))
        self.layer_num = config.num_hidden_layers

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.k[layer]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.v[layer]

    def set_kv_buffer(self, layer: Any, at: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k[layer.layer_id, at.loc], self.v[layer.layer_id, at.loc] = k, v


class Prefill:
    """SGLang's own backend, of which only a prefill without a cached prefix is asked."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward: Any, save: bool
    ) -> torch.Tensor:
        self.pool.set_kv_buffer(layer, SimpleNamespace(loc=forward.out_cache_loc), k, v)
        widths = forward.extend_seq_lens.tolist()
        parts = zip(*(x.split(widths) for x in (q, k, v)), strict=True)
        return torch.cat([attention(*part, 0) for part in parts])


class RadixAttention:
    """What our backend reads of SGLang's layer of that name."""

    def __init__(self, number: int, config: Any) -> None:
        self.layer_id, self.head_dim, self.v_head_dim = number, config.head_dim, config.head_dim
        self.tp_q_head_num, self.scaling = config.num_attention_heads, config.head_dim**-0.5
        self.tp_k_head_num = self.tp_v_head_num = config.num_key_value_heads


class Twin:
    """The same model in double precision, with keys and values by request row and position."""

    def __init__(self, model: Any) -> None:
        self.model, config = deepcopy(model).double(), model.config
        shape = config.num_hidden_layers, ROWS, COLUMNS
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q = torch.zeros(*shape, heads, config.head_dim, dtype=torch.float64)
        self.k, self.v = (torch.zeros(*shape, kv_heads, config.head_dim, dtype=torch.float64) for _ in range(2))
        self.id_RP = torch.zeros(ROWS, COLUMNS, dtype=torch.int64)

    def forward(
        self, row: int, id_T: torch.Tensor, position_T: torch.Tensor, seen: Sequence[list[int]]
    ) -> torch.Tensor:
        """Logits of a request's new tokens, their keys and values cached; layer l attends to the cached positions ``seen[l]``."""

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.q[layer, row, position_T], self.k[layer, row, position_T], self.v[layer, row, position_T] = q, k, v
            keys, values = (torch.cat([x[layer, row, seen[layer]], new]) for x, new in ((self.k, k), (self.v, v)))
            return attention(q, keys, values, len(seen[layer]))

        self.id_RP[row, position_T] = id_T
        return llama_logits(self.model, id_T, position_T, attend)

    def mass(self, row: int, queries: Sequence[int], layers: Sequence[int], length: int, block: int) -> torch.Tensor:
        """Attention of tokens at these positions to each block of the first ``length``, summed over them, heads and layers."""
        total_P = torch.zeros(-(-length // block) * block, dtype=torch.float64)
        for layer in layers:
            k_PKD = self.k[layer, row, :length]
            groups = self.q.shape[3] // k_PKD.shape[1]
            score = torch.einsum("qhd,phd->qhp", self.q[layer, row, list(queries)], k_PKD.repeat_interleave(groups, 1))
            total_P[:length] += torch.softmax(score * k_PKD.shape[-1] ** -0.5, -1).sum((0, 1))
        return total_P.view(-1, block).sum(1)


class LlamaTarget:
    """SGLang's target worker: verifies over page lists, and holds every verification against the twin (P3).

    Attributes:
        partial: requests verified on a part of their cache.
        wrong: what differed from the twin; a step would take an exception for a failed verification and go on.
        start_R: position of the first token of each row's latest forward.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        self.model, self.twin, self.pool = model, Twin(model), PagePool(config)
        self.layers = [RadixAttention(i, config) for i in range(config.num_hidden_layers)]
        self.backend = LongDraftAttention(Prefill(self.pool), self.pool, "torch", TABLE)  # type: ignore[arg-type]
        self.step: ViewStep | None = None
        self.partial, self.start_R = 0, [0] * ROWS
        self.wrong: list[str] = []
        facts = SimpleNamespace(
            vocab_size=config.vocab_size, num_hidden_layers=config.num_hidden_layers, head_dim=config.head_dim,
            num_attention_heads=config.num_attention_heads, get_num_kv_heads=lambda ranks: config.num_key_value_heads,
        )  # fmt: skip
        named = SimpleNamespace(
            parameters=model.parameters, named_modules=lambda: [(str(x.layer_id), x) for x in self.layers]
        )
        self.model_runner = SimpleNamespace(
            model_config=facts, device="cpu", dtype=torch.float32, kv_cache_dtype=torch.float32, model=named,
            token_to_kv_pool=self.pool, attn_backend=self.backend, req_to_token_pool=SimpleNamespace(req_to_token=TABLE),
        )  # fmt: skip

    def logits(self, forward: Any) -> torch.Tensor:
        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self.backend.forward_extend(q, k, v, self.layers[layer], forward)

        with torch.no_grad():
            return llama_logits(self.model, forward.input_ids, forward.positions, attend)

    def seen(self, row: int, length: int, read_L: list[int]) -> list[list[int]]:
        """Cached positions that a verification of so many tokens has to read in each layer."""
        whole = [list(range(length))] * len(self.layers)
        if set(read_L) == {length}:
            return whole
        assert self.step is not None
        views, self.partial = self.step.views, self.partial + 1
        lists = range(views.lists) if len(read_L) > 1 else [views.lists - 1]
        positions = [
            sorted(
                {
                    *views.column_LRV[at, row, : int(views.count_LR[at, row])].tolist(),
                    *range(int(views.start_R[row]), length),
                }
            )
            for at in lists
        ]
        if [len(own) for own in positions] != read_L:
            held = [len(own) for own in positions]
            self.wrong.append(f"row {row}, {length} cached: {read_L} are read, the view holds {held}")
        return positions if len(positions) > 1 else positions * len(self.layers)

    def forward_batch_generation(self, batch: None, forward_batch: Any, is_verify: bool) -> Any:
        logits_TV, spec = self.logits(forward_batch), forward_batch.spec_info
        lengths = forward_batch.seq_lens.tolist()
        read_LB = forward_batch.seq_lens[None] if spec.view is None else spec.view[1].view(-1, len(lengths))
        width = len(logits_TV) // len(lengths)
        for b, (row, length) in enumerate(zip(forward_batch.req_pool_indices.tolist(), lengths, strict=True)):
            read = read_LB[:, b].tolist()
            ragged = isinstance(spec.plan, AttentionPlan)  # rounds on the host
            rows = spec.plan.rows_of(b) if ragged else slice(b * width, (b + 1) * width)
            new = slice(rows.start, rows.start + int((forward_batch.out_cache_loc[rows] > 0).sum()))
            self.start_R[row] = int(forward_batch.positions[new.start])
            with torch.no_grad():
                ids_T, position_T = forward_batch.input_ids[new], forward_batch.positions[new]
                want = self.twin.forward(row, ids_T, position_T, self.seen(row, length, read))
            if not torch.allclose(logits_TV[new].double(), want, rtol=1e-4, atol=1e-4):
                apart = float((logits_TV[new] - want).abs().max())
                self.wrong.append(f"row {row}, {length} cached, {read} read: logits are {apart:.3g} apart")
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits_TV, hidden_states=None))

    def prefill(self, row_B: Sequence[int], prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Cache prompts, and choose the token behind each."""
        position_T = torch.cat([torch.arange(len(p)) for p in prompts])
        forward = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND, input_ids=torch.tensor([t for p in prompts for t in p]), positions=position_T,
            out_cache_loc=torch.cat([TABLE[row, : len(p)] for row, p in zip(row_B, prompts, strict=True)]).long(),
            extend_seq_lens=torch.tensor([len(p) for p in prompts]),
        )  # fmt: skip
        logits_TV = self.logits(forward)
        for row, prompt in zip(row_B, prompts, strict=True):
            with torch.no_grad():
                self.twin.forward(row, torch.tensor(prompt), torch.arange(len(prompt)), [[]] * len(self.layers))
        return logits_TV[forward.extend_seq_lens.cumsum(0) - 1].argmax(-1)


class PagedServer(Server):
    """The scheduler's loop over a :class:`LlamaTarget`, whose prefills it computes; ``after`` is called behind every step."""

    def __init__(self, step: ViewStep, target: LlamaTarget, behind: bool, after: Callable[[], None]) -> None:
        super().__init__(step, behind)
        self.target, self.after, self.table = target, after, TABLE
        self.guard = self._guarded

    def _guarded(self) -> Any:
        server = self

        class Guard:
            def __enter__(self) -> None: ...

            def __exit__(self, kind: Any, *_: object) -> None:
                if kind is None:
                    server.after()

        return Guard()

    def prefill(self, reqs: list[Any]) -> None:
        prompts = [list(r.origin_input_ids) for r in reqs]
        for req in reqs:
            self.length_R[req.req_pool_idx] = len(Tokens(req))
        first_B = self.target.prefill([r.req_pool_idx for r in reqs], prompts)
        batch = self.batch(reqs)
        batch.seq_lens_cpu = batch.seq_lens.clone()
        self.step.remember(batch, first_B)
        self.step.prefilled(batch)
        self.after()
        for req, token in zip(reqs, first_B.tolist(), strict=True):
            req.gain([token])
