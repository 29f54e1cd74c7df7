"""Trains the bundled model from scratch: python -m minitui.dev.tutor.train --out DIR (a few minutes on a GPU).

With --start-from it trains a checkpoint further; `--set seconds=60` limits the time. The mean of several such runs
(--mean) is better than each of them (Wortsman et al. 2022, "Model soups").

The network is transformers' Qwen3, so every program that loads Qwen3 can load this model.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3Model

from minitui.dev.tutor.dataset import CHECK_FILES, HeldOut, load_checks, load_items, load_words
from minitui.dev.tutor.rows import Conversations, pack, tokenizer_texts, train_tokenizer
from minitui.dev.tutor.wordings import Damage


@dataclass(frozen=True)
class Shape:
    """Sizes of the network. The layers are few and wide, because on a CPU each layer has a fixed cost."""

    vocab_size: int = 2560
    hidden_size: int = 384
    intermediate_size: int = 1024
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096


class Network(nn.Module):
    """Qwen3, with dropout on the outputs of attention and MLP. The embedding is also the output matrix."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = Qwen3Model(Qwen3Config(**asdict(shape)))
        for name, last in self.named_modules():
            if isinstance(last, nn.Linear) and name.endswith(("o_proj", "down_proj")):  # adds to the residual stream
                nn.init.normal_(last.weight, std=0.02 / (2 * shape.num_hidden_layers) ** 0.5)
                last.register_forward_hook(lambda linear, _, out: F.dropout(out, dropout, linear.training))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns the last hidden states [B, T, C]. ids: [B, T]; mask: [B, 1, T, T], true for keys a query may see."""
        places = mask[:, 0].sum(-1) - 1  # [B, T], from 0 in each conversation
        hidden: Tensor = self.model(ids, mask, places, use_cache=False).last_hidden_state
        return hidden


CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
# With a teacher, the loss of an answer without a newer wording: this share of the cross-entropy, and the divergence.
TAUGHT_SHARE, TEACHER_WEIGHT = 0.3, 2.0
AHEAD = 64  # batches that are made before they are needed


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run."""

    steps: int = 7000
    rows: int = 48  # in a batch
    length: int = 1024  # tokens of a row
    long_steps: int = 250  # further steps after `steps`, with rows of long_length tokens, for long chats
    long_rows: int = 12
    long_length: int = 4096
    peak_rate: float = 2e-3  # the highest learning rate
    weight_decay: float = 0.1
    dropout: float = 0.1
    token_dropout: float = 0.1  # the largest probability that an input token is replaced by a random token
    shared: float = 0.0  # share of the rows that have single questions behind one system prompt
    seconds: float = math.inf  # training ends after this time, too; then the rate falls with the time
    seed: int = 1


# Each worker process sets this before it makes rows.
_conversations: Conversations


def _start_worker(tokenizer_json: str, damage: Damage, older: Path | None) -> None:
    global _conversations
    held_out = HeldOut([check for name in CHECK_FILES for check in load_checks(name)])
    old_items = None if older is None else load_items(older)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    _conversations = Conversations(load_items(), load_words(), held_out, damage, tokenizer, old_items)


def _pack_rows(job: tuple[int, int, int, bool, float]) -> tuple[Any, Any, Any]:
    return pack(_conversations, *job)


def loss_of(
    network: Network, ids: Tensor, loss_mask: Tensor, segments: Tensor, noisy_ids: Tensor,
    teacher: Network | None = None,
) -> Tensor:
    """Returns the mean cross-entropy of the assistant's tokens. Tensors: [B, T]; the networks read `noisy_ids`.

    All tokens of a row read those of segment 0 before them. With a teacher, tokens of a negative loss mask have mostly
    the divergence from its probabilities as their loss.
    """
    length = ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    seen = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == 0)
    mask = seen[:, None] & causal
    targets, wanted = ids[:, 1:].flatten(), loss_mask[:, 1:].flatten()
    # On a CPU, the logits of the other tokens would take half of the time.
    kept = wanted.nonzero().flatten() if ids.device.type == "cpu" else slice(None)
    targets, wanted = targets[kept], wanted[kept]

    def logits_of(one: Network) -> Tensor:
        return (one(noisy_ids, mask)[:, :-1].flatten(0, 1)[kept] @ one.model.embed_tokens.weight.T).float()

    logits = logits_of(network)
    losses = F.cross_entropy(logits, targets, reduction="none")
    if teacher is not None:
        with torch.no_grad():
            taught = logits_of(teacher).log_softmax(-1)
        divergence = F.kl_div(logits.log_softmax(-1), taught, reduction="none", log_target=True).sum(-1)
        losses = torch.where(wanted < 0, TAUGHT_SHARE * losses + TEACHER_WEIGHT * divergence, losses)
    return (losses * wanted.abs()).sum() / wanted.abs().sum()


def with_noise(ids: Tensor, loss_mask: Tensor, share: float, vocabulary: int) -> Tensor:
    """Returns the ids with random tokens in place of some tokens that the assistant did not write.

    Each row has its own probability of a replacement, from 0 to `share`.
    """
    chance = torch.rand(ids.shape[0], 1, device=ids.device) * share
    replaced = (torch.rand_like(ids, dtype=torch.float) < chance) & (loss_mask == 0) & (ids > 2)
    return torch.where(replaced, torch.randint_like(ids, 3, vocabulary), ids)


def train(network: Network, shape: Shape, recipe: Recipe, pool: Pool, teacher: Network | None = None) -> None:
    """Trains the network in place. The pool's processes make the rows while the GPU computes."""
    device = next(network.parameters()).device
    groups = [
        {"params": [one for one in network.parameters() if (one.dim() == 2) == matrices], "weight_decay": decay}
        for matrices, decay in ((True, recipe.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.98), fused=device.type == "cuda")
    steps = recipe.steps + recipe.long_steps
    compute: Callable[..., Tensor] = torch.compile(loss_of) if device.type == "cuda" else loss_of
    network.train()
    began = time.time()
    for step, rows in enumerate(_batches(pool, recipe)):
        left = 1 - max(step / steps, (time.time() - began) / recipe.seconds)
        if left <= 0:
            break
        ids, loss_mask, segments = (torch.from_numpy(array).to(device).long() for array in rows)
        warm = min(1.0, (step + 1) / min(100, max(1, steps // 10)))
        for group in optimizer.param_groups:
            group["lr"] = recipe.peak_rate * warm * min(1.0, left / 0.5)
        noisy_ids = with_noise(ids, loss_mask, recipe.token_dropout, shape.vocab_size)
        with torch.autocast(device.type, torch.bfloat16):
            loss = compute(network, ids, loss_mask, segments, noisy_ids, teacher)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % min(100, steps // 15 or 1) == 0 or step == steps - 1:  # also keeps the host near the device
            print(f"step {step} loss {loss.item():.4f} after {time.time() - began:.0f} s", flush=True)
    network.eval()


def _batches(pool: Pool, recipe: Recipe) -> Iterator[tuple[Any, Any, Any]]:
    short = [(recipe.rows, recipe.length, False, recipe.shared)] * recipe.steps
    long = [(recipe.long_rows, recipe.long_length, True, 0.0)] * recipe.long_steps
    jobs = [(recipe.seed * 1_000_003 + step, *kind) for step, kind in enumerate(short + long)]
    for first in range(0, len(jobs), AHEAD):  # all at once would keep a CPU busy with rows that nobody waits for
        yield from pool.imap(_pack_rows, jobs[first : first + AHEAD])


def main(
    out: Annotated[Path, typer.Option(help="Directory for the checkpoint.")],
    start_from: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Continue from this checkpoint, with its tokenizer. Default: random weights."),
    ] = None,
    others: Annotated[
        list[Path] | None,
        typer.Option("--mean", metavar="DIR", help="Save the mean of the new weights and of those of DIR."),
    ] = None,
    older: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="An older corpus: two of five questions are wordings that it does not have."),
    ] = None,
    teacher: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --older: a checkpoint that answers what has no new wording."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change a field of Recipe, Shape or Damage: steps=500."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that pack rows.")] = max(1, multiprocessing.cpu_count() - 1),
) -> None:
    """Train and save the model."""
    settings: list[Any] = [Shape(), Recipe(), Damage()]
    for change in changes or ():
        name, _, value = change.partition("=")
        at = next((at for at, some in enumerate(settings) if hasattr(some, name)), None)
        if at is None:
            raise typer.BadParameter(f"--set {change}: no field named {name!r} in Recipe, Shape or Damage")
        settings[at] = replace(settings[at], **{name: type(getattr(settings[at], name))(value)})
    shape, recipe, damage = settings
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(recipe.seed)
    items = load_items()
    network = Network(shape, recipe.dropout)
    guide = None
    if teacher is not None:
        if older is None:
            raise typer.BadParameter("--teacher needs --older DIR: the teacher answers what is not new since then")
        guide = Network(shape).requires_grad_(False).eval()
        guide.load_state_dict(load_file(teacher / "model.safetensors"))
    if start_from is None:
        tokenizer = train_tokenizer(tokenizer_texts(items, load_words()), shape.vocab_size)
    else:
        tokenizer = Tokenizer.from_file(str(start_from / "tokenizer.json"))
        network.load_state_dict(load_file(start_from / "model.safetensors"))
    size = sum(weight.numel() for weight in network.parameters())
    print(f"{size / 1e6:.2f} million parameters, {len(items)} answers, {recipe} {damage}", flush=True)
    # Forked before anything runs on the GPU: the processes need no import, and make rows while the network is compiled.
    with multiprocessing.get_context("fork").Pool(workers, _start_worker, (tokenizer.to_str(), damage, older)) as pool:
        train(network.to(device), shape, recipe, pool, guide and guide.to(device))
    for count, other in enumerate(others or (), 2):
        weights = load_file(other / "model.safetensors", device=device)
        for name, weight in network.named_parameters():
            weight.data.lerp_(weights[name].to(weight.dtype), 1 / count)
    save(network, tokenizer, shape, out)
    print(f"to evaluate the model: python -m minitui.dev.tutor.evaluate --model {out} --write")


def save(network: Network, tokenizer: Tokenizer, shape: Shape, out: Path) -> None:
    """Writes the checkpoint, with bf16 weights, in the format that transformers and the engine read."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in network.named_parameters()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **asdict(shape),
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": True,
        "use_cache": True, "use_sliding_window": False, "dtype": "bfloat16", "initializer_range": 0.02,
        "bos_token_id": None, "eos_token_id": ends[0],
    }
    generation = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1], "max_new_tokens": 512}
    added = {
        str(tokenizer.token_to_id(token)): {"content": token, "special": True, "lstrip": False, "rstrip": False,
                                            "normalized": False, "single_word": False}
        for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "model_max_length": shape.max_position_embeddings, "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": added, "chat_template": CHAT_TEMPLATE,
    }
    files = {"config": config, "generation_config": generation, "tokenizer_config": tokenizer_config}
    for name, content in files.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
