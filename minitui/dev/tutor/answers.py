"""Greedy answers of a network after its training, for the evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from minitui.dev.tutor.network import Network
from minitui.dev.tutor.scoring import Chat


@torch.inference_mode()
def answer_with(network: Network, tokenizer: Tokenizer, chats: Sequence[Chat], most: int = 260) -> list[str]:
    """Returns greedy answers to all chats, computed in one batch; used for the evaluation after training."""
    device = next(network.parameters()).device
    end = tokenizer.token_to_id("<|im_end|>")
    prompts = [tokenizer.encode(render(chat)).ids for chat in chats]
    answers: list[list[int]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    embedding = network.model.embed_tokens.weight
    while live:
        rows = [prompts[index] + answers[index] for index in live]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        mask = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()[None, None]
        with torch.autocast(device.type, torch.bfloat16):
            hidden = network(ids, mask)
            last = hidden[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]
            chosen = (last @ embedding.T).argmax(-1).tolist()
        for index, token in zip(live, chosen, strict=True):
            answers[index].append(token)
        live = [index for index in live if answers[index][-1] != end and len(answers[index]) < most]
    return [tokenizer.decode([token for token in ids if token != end]) for ids in answers]


def render(chat: Chat) -> str:
    """Returns the text that CHAT_TEMPLATE makes from a chat, up to the beginning of the answer."""
    turns = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in chat)
    return turns + "<|im_start|>assistant\n"
