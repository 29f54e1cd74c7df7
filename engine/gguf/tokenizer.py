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
MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
MARKS = rf"{CONTRACTIONS}|{MARKED}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SEED = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BY_CASE = [rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"]
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT_4O = "|".join([*(f"{word}{CONTRACTIONS}?" for word in BY_CASE), r"\p{N}{1,3}", SIGNS])
TEKKEN = "|".join([*BY_CASE, r"\p{N}", SIGNS])
PIECES = ("llama", "gemma4")  # types of tokenizers of SentencePiece
GPT_2, ONE_DIGIT = "GPT-2", "GPT-2, digits one by one"  # ways of GPT-2, which are built in
LLAMA_3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0")  # as Llama 3 does
PATTERNS = {  # tokenizer.ggml.pre -> the expression that splits a text into words
    **dict.fromkeys(LLAMA_3, NUMBERS), "dbrx": NUMBERS, "smaug-bpe": NUMBERS,
    "chatglm-bpe": NUMBERS, "glm4": NUMBERS, "qwen2": DIGITS, "deepseek-r1-qwen": DIGITS, "qwen35": MARKS,
    "stablelm2": DIGITS, "gpt-4o": GPT_4O, "tekken": TEKKEN, "seed-coder": SEED, "gpt-2": GPT_2, "phi-2": GPT_2,
    "olmo": GPT_2, "mpt": GPT_2, "default": GPT_2, "starcoder": ONE_DIGIT, "refact": ONE_DIGIT, "smollm": ONE_DIGIT,
    "codeshell": ONE_DIGIT, "command-r": ONE_DIGIT,
}
WHOLE_WORDS = (*LLAMA_3, "tekken")  # words of the vocabulary are not merged; BOS is the default
NFC = ("qwen2", "deepseek-r1-qwen", "qwen35")
LONGEST_PIECE = 1_024  # characters
MOST_CHARACTERS = 4 << 20  # of all pieces; Gemma's have 2 million
SPACE = "▁"
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|call|>")


def tokenizer_files(header: Header) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the contents of tokenizer.json and tokenizer_config.json. Raises CheckpointError."""
    tokens: list[str] = header.get("tokenizer.ggml.tokens", list)
    types: list[int] = header.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    kind, pre = header.get("tokenizer.ggml.model", str), header.metadata.get("tokenizer.ggml.pre")
    if not tokens or len(types) != len(tokens) or not _all(str, tokens) or not _all(int, types):
        raise header.error("has a damaged list of tokens: download it again")
    if kind == "gpt2":
        made = _byte_level(header, tokens)
    elif kind in PIECES:
        made = _sentence_pieces(header, tokens, types)
    else:
        raise header.error(f"has a tokenizer of type {kind!r:.40}: supported are gpt2, {' and '.join(PIECES)}")
    made["added_tokens"] = [
        {"id": i, "content": token, "special": types[i] == CONTROL, "normalized": False, "single_word": False,
         "lstrip": False, "rstrip": False}
        for i, token in enumerate(tokens) if types[i] in (CONTROL, USER_DEFINED)
    ]
    config = {}
    for name in ("bos", "eos"):
        i = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(i, int) and 0 <= i < len(tokens):
            config[f"{name}_token"] = tokens[i]
            adds = header.metadata.get("tokenizer.ggml.add_bos_token", kind in PIECES or pre in WHOLE_WORDS)
            if name == "bos" and adds is True:
                made["post_processor"] = _adds_bos(tokens[i], i)
    template = header.metadata.get("tokenizer.chat_template")
    return made, config | ({"chat_template": template} if isinstance(template, str) else {})


def end_tokens(header: Header) -> list[int]:
    """Returns the ids of the tokens that end a reply: those of the metadata, and control tokens with a known name."""
    tokens: list[str] = header.get("tokenizer.ggml.tokens", list)
    found = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = TURN_ENDS if "<|return|>" in tokens else (*TURN_ENDS, "<|end|>")  # gpt-oss has several messages in a reply
    found += [i for i, token in enumerate(tokens) if token in ends]
    return list(dict.fromkeys(i for i in found if type(i) is int and 0 <= i < len(tokens)))


def _all(kind: type, values: list[Any]) -> bool:
    return all(type(value) is kind for value in values)


def _byte_level(header: Header, tokens: list[str]) -> dict[str, Any]:
    pre = header.get("tokenizer.ggml.pre", str, "default")
    if pre not in PATTERNS:
        raise header.error(f"splits words as {pre!r:.40} does: supported are {', '.join(PATTERNS)}")
    pattern, alone = PATTERNS[pre], {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split: dict[str, Any] = {"type": "Digits", "individual_digits": True}
    if pattern not in (GPT_2, ONE_DIGIT):
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    last = {**alone, "use_regex": pattern in (GPT_2, ONE_DIGIT)}
    steps = [last] if pattern == GPT_2 else [split, last]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _listed_merges(header, vocab)
    return {
        "version": "1.0", "normalizer": {"type": "NFC"} if pre in NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None, "decoder": {**alone, "add_prefix_space": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": pre in WHOLE_WORDS},
    }


def _listed_merges(header: Header, vocab: dict[str, int]) -> list[list[str]]:
    merges = [str(merge).split(" ", 1) for merge in header.get("tokenizer.ggml.merges", list)]
    if not all(len(pair) == 2 and pair[0] in vocab and pair[1] in vocab and "".join(pair) in vocab for pair in merges):
        raise header.error("has tokenizer.ggml.merges that do not join two tokens to a third: download it again")
    return merges


def _sentence_pieces(header: Header, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """SentencePiece's BPE merges the pair whose result has the highest score: scores give the order of the merges, if
    the file has no list of them."""
    scores: list[float] = header.get("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens) or not _all(float, scores):
        raise header.error("has not one score for each token: download it again")
    if max(map(len, tokens)) > LONGEST_PIECE:
        raise header.error(f"has tokens of more than {LONGEST_PIECE:,} characters: download it again")
    if (characters := sum(map(len, tokens))) > MOST_CHARACTERS:
        raise header.error(
            f"has tokens of {characters:,} characters in all, and the limit is {MOST_CHARACTERS:,}: download it again"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[float, int, list[str]]] = []
    listed = _listed_merges(header, vocab) if "tokenizer.ggml.merges" in header.metadata else None
    for token, i in vocab.items() if listed is None else ():
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
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id")
    return {
        "version": "1.0", "normalizer": {"type": "Sequence", "normalizers": [*steps, spaces]}, "pre_tokenizer": None,
        "post_processor": None, "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "vocab": vocab, "merges": listed or [pair for *_, pair in merges], "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
        },
    }


def _adds_bos(token: str, token_id: int) -> dict[str, Any]:
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing", "single": [bos, first], "pair": [bos, first, bos, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }
