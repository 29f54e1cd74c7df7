"""Makes tokenizer.json and tokenizer_config.json from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from engine.gguf.header import Header

CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # types of tokens
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGITS = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}|{OTHERS}"
NUMBERS = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}{{1,3}}|{OTHERS}"
# tokenizer.ggml.pre -> the expression that splits a text into words. None: that of GPT-2, which is built in.
PATTERNS = {"qwen2": DIGITS, "llama-bpe": NUMBERS, "llama3": NUMBERS, "gpt-2": None, "default": None}
NFC = ("qwen2",)
SPACE = "▁"


def tokenizer_files(header: Header) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the contents of tokenizer.json and tokenizer_config.json. Raises CheckpointError."""
    tokens: list[str] = header.get("tokenizer.ggml.tokens", list)
    types: list[int] = header.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    kind = header.get("tokenizer.ggml.model", str)
    if len(types) != len(tokens) or not all(isinstance(token, str) for token in tokens):
        raise header.error("has a damaged list of tokens: download it again")
    if kind == "gpt2":
        made = _byte_level(header, tokens)
    elif kind == "llama":
        made = _sentence_pieces(header, tokens, types)
    else:
        raise header.error(f"has a tokenizer of type {kind!r:.40}: supported are gpt2 and llama")
    made["added_tokens"] = [
        {"id": i, "content": token, "special": types[i] == CONTROL, "normalized": False, "single_word": False,
         "lstrip": False, "rstrip": False}
        for i, token in enumerate(tokens) if types[i] in (CONTROL, USER_DEFINED)
    ]  # fmt: skip
    config = {}
    for name in ("bos", "eos"):
        i = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(i, int) and 0 <= i < len(tokens):
            config[f"{name}_token"] = tokens[i]
            if name == "bos" and header.metadata.get("tokenizer.ggml.add_bos_token") is True:
                made["post_processor"] = _adds_bos(tokens[i], i)
    template = header.metadata.get("tokenizer.chat_template")
    return made, config | ({"chat_template": template} if isinstance(template, str) else {})


def _byte_level(header: Header, tokens: list[str]) -> dict[str, Any]:
    pre = header.get("tokenizer.ggml.pre", str, "default")
    if pre not in PATTERNS:
        raise header.error(f"splits words as {pre!r:.40} does: supported are {', '.join(PATTERNS)}")
    pattern, alone = PATTERNS[pre], {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    splitter: dict[str, Any] = {**alone, "use_regex": True}
    if pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        splitter = {"type": "Sequence", "pretokenizers": [split, {**alone, "use_regex": False}]}
    merges = [merge.split(" ", 1) for merge in header.get("tokenizer.ggml.merges", list)]
    return {
        "version": "1.0", "normalizer": {"type": "NFC"} if pre in NFC else None, "pre_tokenizer": splitter,
        "post_processor": None, "decoder": {**alone, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges,
            "ignore_merges": pre in ("llama-bpe", "llama3"),
        },
    }  # fmt: skip


def _sentence_pieces(header: Header, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """SentencePiece's BPE merges the pair whose result has the highest score; scores give the order of the merges."""
    scores: list[float] = header.get("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise header.error("has not one score for each token: download it again")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[float, int, list[str]]] = []
    for token, i in vocab.items():
        if types[i] in (CONTROL, BYTE):
            continue
        for cut in range(1, len(token)):
            if token[:cut] in vocab and token[cut:] in vocab:
                merges.append((-scores[i], vocab[token[:cut]], [token[:cut], token[cut:]]))
    merges.sort(key=lambda merge: merge[:2])
    prefix = header.metadata.get("tokenizer.ggml.add_space_prefix") is not False
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id")
    return {
        "version": "1.0", "normalizer": {"type": "Sequence", "normalizers": [*steps, spaces]}, "pre_tokenizer": None,
        "post_processor": None, "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "vocab": vocab, "merges": [pair for *_, pair in merges], "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
        },
    }  # fmt: skip


def _adds_bos(token: str, token_id: int) -> dict[str, Any]:
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing", "single": [bos, first], "pair": [bos, first, bos, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }  # fmt: skip
