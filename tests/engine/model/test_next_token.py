"""The head of Qwen3-Next and Qwen3.5 that predicts the token after the next, against their own layers in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.attention.base import ForwardMeta, StateMeta
from engine.attention.choose import choose_attention
from engine.attention.kv_pool import KVPool
from engine.errors import CheckpointError
from engine.model import ops
from engine.model.group import ALONE
from engine.model.hf.config import read_model_config
from engine.worker.weights.quantised import kept_matrices
from tests.support.families import InDouble, checkpoint
from tests.support.models import make_runner, prompt, rewrite
from tests.support.packing import quantise

KINDS = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"]
CPU = torch.device("cpu")
LENGTH = 11
TOLERANCE = 1e-6  # their rotary frequencies are float32


class Head(torch.nn.Module):
    """The head as vLLM's qwen3_next_mtp.py defines it, of the family's own modules in transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config, decoder = model.config, model.model
        full = next(layer for layer in decoder.layers if hasattr(layer, "self_attn"))
        index, norm, hidden = full.self_attn.layer_idx, type(decoder.norm), config.hidden_size
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = torch.nn.ModuleList([type(full)(config, index)])
        self.norm, self.pre_fc_norm_hidden, self.pre_fc_norm_embedding = (norm(hidden) for _ in range(3))
        self.double()
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.2)

    def forward(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """The logits for the tokens after the next, from ids [n + 1]."""
        decoder, n = model.model, len(ids) - 1
        hidden = decoder(ids[None, :-1]).last_hidden_state
        embedded = self.pre_fc_norm_embedding(decoder.embed_tokens(ids[None, 1:]))
        mask = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        x = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(hidden)), -1))
        x = self.layers[0](
            x, position_embeddings=decoder.rotary_emb(x, torch.arange(n)[None]), attention_mask=mask, position_ids=None
        )
        return F.linear(self.norm(x), model.lm_head.weight)[0]


def our_logits(model: Any, ids: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """The same from the loaded decoder, whose prompt and whose head's prompt are computed in chunks."""
    n, found = len(ids) - 1, []
    for decoder in (model, model.next_token):
        attention = choose_attention("torch", decoder.config, 4, torch.float64, CPU, 8)
        pool, begin, parts = KVPool(decoder.config, 16, 4, torch.float64, CPU), 0, []
        for count in chunks:
            end, states = begin + count, None
            if decoder is model:
                row = [(0, count, int(begin > 0), 1)]
                states = StateMeta(torch.tensor(row, dtype=torch.int32), torch.tensor([0, 1]), row, int(count == 1))
            meta = ForwardMeta(
                positions=torch.arange(begin, end), slot_mapping=torch.arange(begin, end) + 4,
                cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
                seq_lens=torch.tensor([end], dtype=torch.int32),
                block_table=torch.arange(1, 16, dtype=torch.int32)[None], max_q_len=count, max_seq_len=end,
                num_decodes=int(count == 1), logit_rows=None, states=states,
            )
            attention.plan(meta)
            if decoder is model:
                parts.append(decoder.forward(ids[begin:end], meta, attention, pool))
            else:
                parts.append(decoder.after(found[0][begin:end], ids[begin + 1 : end + 1], meta, attention, pool))
            begin = end
        assert begin == n
        found.append(torch.cat(parts))
    return model.next_token.logits(found[1])


def with_head(kind: str, seed: int, directory: Path, **fields: Any) -> tuple[Any, Head]:
    model = checkpoint(kind, seed, directory, **fields)
    head = Head(model)
    head.forward = InDouble.of(head.forward)  # type: ignore[method-assign]
    rewrite(directory, lambda tensors: tensors.update({f"mtp.{k}": v.clone() for k, v in head.state_dict().items()}))
    return model, head


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_familys_modules_whole_and_in_chunks(kind: str, seed: int, tmp_path: Path) -> None:
    model, head = with_head(kind, seed, tmp_path)
    ours = make_runner(tmp_path, "float64").loaded
    ids = torch.tensor(prompt(seed, LENGTH + 1))
    wanted = head(model, ids)
    for chunks in ([LENGTH], [4, 1, 6]):
        found = our_logits(ours.model, ids, chunks)
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE * float(wanted.abs().max()))
    size = ours.model.next_token.nbytes
    assert f"{size / 1e9:,.2f} GB of the weights are layers that predict" in "\n".join(ours.notes)
    assert size >= sum(8 * parameter.numel() for parameter in head.parameters()), "norms of heads have a row for each"
    assert ours.memory.weights == ours.model.nbytes >= ours.model.nbytes_per_token + size


@torch.inference_mode()
def test_a_head_of_8_bits_is_what_its_numbers_stand_for_and_can_stay_as_it_is(tmp_path: Path) -> None:
    model, head = with_head("qwen3_5_text", 1, tmp_path)
    model.mtp = head
    quantise(model, tmp_path, tmp_path / "fp8", "fp8 blocks")
    ids = torch.tensor(prompt(1, LENGTH + 1))
    wanted = head(model, ids)
    ours = our_logits(make_runner(tmp_path / "fp8", "float64").loaded.model, ids, [LENGTH])
    torch.testing.assert_close(ours, wanted, rtol=0, atol=TOLERANCE * float(wanted.abs().max()))
    config = read_model_config(tmp_path / "fp8")
    names = kept_matrices(replace(config, next_layers=1), config, ops, ALONE, tmp_path / "fp8")
    assert sum(name.startswith("mtp.layers.0.") for name in names) == 8  # q, its gate, k, v, output; gate, up, down


def test_a_head_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    with_head("qwen3_next", 0, tmp_path)
    size = read_model_config(tmp_path).hidden_size
    rewrite(tmp_path, lambda tensors: tensors.update({"mtp.fc.weight": tensors.pop("mtp.norm.weight").repeat(2)}))
    with pytest.raises(CheckpointError, match=rf"lacks mtp\.norm\.weight; it .*mtp\.fc\.weight is \[{2 * size}\]"):
        make_runner(tmp_path)


def test_a_checkpoint_without_the_head_and_random_weights_have_none(tmp_path: Path) -> None:
    checkpoint("qwen3_5_text", 0, tmp_path)
    for dummy in (False, True):
        loaded = make_runner(tmp_path, dummy_weights=dummy).loaded
        assert loaded.model.next_token is None and not any("mtp" in note for note in loaded.notes)
