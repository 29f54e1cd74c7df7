"""`minitui verify`: compares this engine with transformers, token for token, on a given checkpoint.

It compares log-probabilities under teacher forcing, and greedy replies. Then it compares the engine with itself: a warm
cache with a cold cache, and prefill in chunks with prefill in one step. transformers runs first and is freed before the
engine loads, so that memory holds only one copy of the weights.
"""

from __future__ import annotations

import gc
import math
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.errors import EngineError, not_installed
from minitui import tutor
from minitui.cli.options import Device, DType
from minitui.visible import json_text

NEW_TOKENS = 20
TOP = 20  # number of top tokens whose log-probabilities are compared at each position
# For each type, the largest difference between log-probabilities that rounding can explain, and the largest that is
# never taken for an error. Between them, RATIO times the difference is allowed that transformers has from itself, when
# it computes a reply token by token and all at once. In float64 only the rotary angles are rounded to float32, by both.
TOLERANCE = {"float64": (1e-7, 1e-7), "float32": (1e-2, 1e-5), "bfloat16": (0.5, 0.05), "float16": (0.1, 0.005)}
RATIO = 10
BYTES_EACH = 12  # memory for a parameter of transformers in float64, while it is loaded
PROMPTS = (
    "The capital of France is", "What is a KV cache?", "def fibonacci(n):\n", "1, 2, 3, 5, 8, 13,",
    "A request arrives, waits in the queue until the scheduler admits it, and is then prefilled in chunks. " * 12,
)
# Qwen3-8B continues the first prompt with endless copies of " Paris. The capital of France is".
KNOWN = {"Qwen3-8B": ([12095, 13, 576, 6722, 315, 9625, 374] * 3)[:NEW_TOKENS]}


@dataclass(slots=True)
class Check:
    """One line of the table."""

    name: str
    passed: bool
    detail: str


@dataclass(slots=True)
class Reference:
    """The results of transformers: each prompt's greedy reply, and the log-probabilities of prompt and reply."""

    prompts: list[list[int]]
    replies: list[list[int]]
    logprobs: list[Any]  # float32, or float64 for a float64 model [prompt + reply, vocabulary], on the host
    noise: float = 0.0  # the largest difference of a log-probability, token by token and all at once

    def tolerance(self, dtype: str) -> float:
        """Returns the difference of a log-probability that rounding explains."""
        most, least = TOLERANCE[dtype]
        return min(most, max(least, RATIO * self.noise))


def verify(
    model: Annotated[
        str | None, typer.Argument(help="A checkpoint, as for --model of minitui chat. Default: the bundled model.")
    ] = None,
    dtype: DType = "auto",
    device: Device = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare a checkpoint with transformers, token for token.

    Requires the extra "verify". The exit code is 1 if a result differs. On a CPU both compute in float64 if memory
    allows, which shows the smallest error; other types hide errors that are smaller than their rounding.

    \b
      minitui verify Qwen/Qwen3-0.6B
      minitui verify ./Qwen3-8B --device cuda --dtype bfloat16
    """
    raise typer.Exit(run_verify(model or str(tutor.model_dir()), dtype, device, json))


def run_verify(model: str, dtype: str = "auto", device: str = "auto", as_json: bool = False) -> int:
    """Compares and prints the results; returns 0 if all agree, else 1. Raises EngineError if the model cannot run."""
    from engine.config import EngineConfig
    from engine.hub.resolve import resolve_model
    from engine.model.hf.config import read_model_config
    from engine.worker.limits import resolve
    from engine.worker.weights.quantised import free_memory

    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        raise EngineError(not_installed("minitui verify", error, "verify")) from None
    directory = resolve_model(model)
    config = read_model_config(directory)
    limits = resolve(EngineConfig(model=model, dtype=dtype, device=device), config)
    if dtype == "auto" and limits.device.type == "cpu" and config.num_parameters * BYTES_EACH < free_memory():
        limits = replace(limits, dtype=torch.float64)
    name = str(limits.dtype).removeprefix("torch.")
    _print(f"{directory.name}: {name} on {limits.device}", as_json)
    started = time.perf_counter()
    try:
        reference = run_reference(directory, limits.dtype, limits.device)
    except EngineError:
        raise
    except Exception as error:  # for a model that it cannot load or run, transformers raises exceptions of many types
        raise EngineError(f"transformers cannot run {directory.name}: {type(error).__name__}: {error}") from error
    _print(f"transformers answered after {time.perf_counter() - started:.1f} s", as_json)
    checks = compare(directory, reference, name, str(limits.device))
    _report(directory.name, checks, as_json)
    return 0 if all(check.passed for check in checks) else 1


def run_reference(directory: Path, dtype: Any, device: Any) -> Reference:
    """Returns greedy replies and all log-probabilities from transformers, computed one prompt at a time."""
    import torch
    from transformers.utils import logging

    from engine.model.hf.config import read_model_config
    from engine.text.tokenizer import Tokenizer

    warnings.simplefilter("ignore", FutureWarning)  # from transformers: which names its next versions have
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = Tokenizer(directory)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    experts = "eager"  # the faster kernels that are the default for mixtures of experts do not support float64
    config = read_model_config(directory)
    attention = "eager" if config.softcap else None  # the faster attention of transformers leaves soft caps out
    model = _loaded(directory, config, dtype=dtype, experts_implementation=experts, attn_implementation=attention)
    model = model.to(device).eval()
    positions = min(config.max_position, config.default_context)
    longest = positions - NEW_TOKENS - 1  # the most tokens of a prompt; teacher forcing samples one more token
    if longest < 1:
        raise EngineError(f"{directory.name} has {positions} positions; verify needs at least {NEW_TOKENS + 2}")
    prompts = [ids[:longest] for ids in prompts]
    replies, logprobs, noise = [], [], 0.0
    with torch.inference_mode(), _unrounded(model) if dtype == torch.float64 else nullcontext():
        for ids in prompts:
            batch = torch.tensor([ids], device=device)
            # `generate` would use sampling defaults of the checkpoint; the reference must be the argmax.
            cache, tokens, reply, rows = None, batch, [], []
            for _ in range(NEW_TOKENS):
                out = model(tokens, past_key_values=cache, use_cache=True)
                cache, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
                reply.append(int(tokens))
                rows.append(out.logits[0, -1].to(exact).log_softmax(-1).cpu())
            whole = torch.tensor([ids + reply], device=device)
            logprobs.append(model(whole).logits[0].to(exact).log_softmax(-1).cpu())
            replies.append(reply)
            best = logprobs[-1][len(ids) - 1 : -1].topk(min(TOP, config.vocab_size))
            noise = max(noise, float((torch.stack(rows).gather(1, best.indices) - best.values).abs().max()))
    del model, cache
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Reference(prompts, replies, logprobs, noise)


@contextmanager
def _unrounded(model: Any) -> Iterator[None]:
    """Within this context, a float64 model of transformers computes norms and softmax in float64, not in float32.
    Rotary angles stay in float32, as they are in the engine."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Unrounded(TorchFunctionMode):
        on = True

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if self.on and args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
                if func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in args[1:]):
                    return args[0]
                if kwargs.get("dtype") == torch.float32:
                    kwargs["dtype"] = torch.float64
            return func(*args, **kwargs)

    def switch(on: bool) -> Any:
        return lambda *_: setattr(mode, "on", on)

    with Unrounded() as mode:
        for module in model.modules():
            # Rotary embeddings. Those with several kinds of layers have a scaling for each kind.
            if any(name.endswith("attention_scaling") for name in vars(module)):
                module.register_forward_pre_hook(switch(False))
                module.register_forward_hook(switch(True))
        yield


def _loaded(directory: Path, config: Any, **options: Any) -> Any:
    """Returns the model of transformers. It gets the expanded matrices of a quantised checkpoint. transformers would
    need further packages, and a GPU, to compute with the quantised matrices."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig

    from engine.model.checkpoint import checkpoint_slots
    from engine.model.decoder import Decoder
    from engine.model.weights import expanded_tensors

    plain = AutoConfig.from_pretrained(directory)
    families: tuple[Any, ...] = MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = next((family[type(plain)] for family in families if type(plain) in family), None)
    if kind is None:
        raise EngineError(f"transformers has no model for {directory.name}, whose model_type is {plain.model_type}")
    if config.packing is None:
        return kind.from_pretrained(directory, **options)
    del plain.quantization_config
    decoder = Decoder(config, torch.float32, torch.device("meta"), 1)
    slots = list(checkpoint_slots(decoder.slots(), config, torch.float32))
    state = expanded_tensors(slots, directory, config.packing)
    if plain.get_text_config() is not plain:  # the text part of a model for images, whose other weights have no effect
        for slot in slots:
            if slot.parts and slot.name not in state:  # transformers stacks only the experts of models without images
                experts = torch.stack([state.pop(part.name) for part in slot.parts])
                state[slot.name] = torch.cat(experts.split(config.experts.count), 1)  # all gates come before all ups
        state = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in state.items()}
    return kind.from_pretrained(None, config=plain, state_dict=state, **options)


def compare(directory: Path, reference: Reference, dtype: str, device: str) -> list[Check]:
    """Runs the same prompts on the engine and compares the results; returns the rows of the table."""
    from engine.llm import LLM
    from engine.params import SamplingParams

    llm = LLM(str(directory), dtype=dtype, device=device)
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def replies() -> list[list[int]]:
        return [out.outputs[0].token_ids for out in llm.generate(reference.prompts, greedy, use_tqdm=False)]

    worst, tolerance = _worst_logprob(llm, reference), reference.tolerance(dtype)
    checks = [
        Check(
            "log-probabilities (teacher forcing)", worst <= tolerance,
            f"largest difference {worst:.2g} over {sum(map(len, reference.logprobs))} positions, "
            f"top {TOP} (allowed {tolerance:.2g})",
        )
    ]
    llm.engine.clear_cache()
    cold = replies()
    # Two tokens tie if rounding explains the margin between them. If the check above failed, no tokens tie.
    slack = min(10 * worst, 2 * tolerance) if worst <= tolerance else 0.0
    checks.append(_same_tokens("greedy tokens: transformers, engine", reference, reference.replies, cold, slack))
    warm = replies()
    checks.append(_same_tokens("greedy tokens: cold cache, warm cache", reference, cold, warm, slack))
    llm.engine.clear_cache()
    scheduler = llm.engine.scheduler
    scheduler.config = replace(scheduler.config, max_num_batched_tokens=32)
    checks.append(_same_tokens("greedy tokens: whole prefill, chunks of 32", reference, cold, replies(), slack))
    llm.engine.check()
    for known, tokens in KNOWN.items():
        if directory.name == known or f"models--Qwen--{known}" in str(directory):
            checks.append(Check(f"the known {len(tokens)} tokens of {known}", cold[0] == tokens, str(cold[0])))
    return checks


def _worst_logprob(llm: Any, reference: Reference) -> float:
    """Returns the largest difference of a log-probability, over the given and the top tokens of all positions."""
    from engine.params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=TOP, ignore_eos=True)
    worst = 0.0
    for prompt, reply, expected in zip(reference.prompts, reference.replies, reference.logprobs, strict=True):
        output = llm.generate([prompt + reply], params, use_tqdm=False)[0]
        entries = output.prompt_logprobs or []
        for position, entry in enumerate(entries[1:]):  # the first token has none
            for token, found in entry.items():
                difference = abs(float(expected[position, token]) - found.logprob)
                worst = max(worst, difference if math.isfinite(difference) else math.inf)
        if len(entries) != len(prompt + reply):  # the engine ends a request whose logits are NaN
            worst = math.inf
    return worst


def _same_tokens(
    name: str, reference: Reference, expected: list[list[int]], got: list[list[int]], slack: float
) -> Check:
    """Checks that replies are equal up to the first tie. Two tokens tie if their margin is at most `slack`."""
    ties, wrong = 0, []
    for i, (want, have) in enumerate(zip(expected, got, strict=True)):
        if want == have:
            continue
        at = next((n for n, (a, b) in enumerate(zip(want, have, strict=False)) if a != b), None)
        if at is None or len(want) != len(have):
            wrong.append(f"prompt {i}: {len(have)} tokens instead of {len(want)}")
            continue
        if want[:at] != reference.replies[i][:at]:
            wrong.append(f"prompt {i} differs at token {at}, but transformers differs earlier: the margin is unknown")
            continue
        logprobs = reference.logprobs[i][len(reference.prompts[i]) + at - 1]
        margin = float(abs(logprobs[want[at]] - logprobs[have[at]]))
        if margin <= slack:  # False for NaN
            ties += 1
        else:
            wrong.append(f"prompt {i} differs at token {at}, margin {margin:.2g}")
    same = len(expected) - ties - len(wrong)
    detail = f"{same} of {len(expected)} replies of {NEW_TOKENS} tokens are equal"
    if ties:
        detail += f", {ties} differ at a tie (margin under {slack:.2g})"
    return Check(name, not wrong, "; ".join([detail, *wrong]))


def _print(text: str, as_json: bool) -> None:
    print(text, file=sys.stderr if as_json else sys.stdout, flush=True)


def _report(model: str, checks: list[Check], as_json: bool) -> None:
    passed = all(check.passed for check in checks)
    if as_json:
        print(json_text({"model": model, "passed": passed, "checks": [asdict(check) for check in checks]}))
        return
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{'same' if check.passed else 'DIFFERENT':<9}  {check.name:<{width}}  {check.detail}")
