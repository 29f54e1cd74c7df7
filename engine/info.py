"""What an engine tells about itself: to its user, to the clients of a server, and in a recording."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Self

from engine.trace.kind import (
    MOST,
    MOST_NUMBER,
    Bound,
    Count,
    Counts,
    Duration,
    bounds_of,
    count,
    counts,
    duration,
    optional,
    positive,
    rows,
)

MOST_TEXT = 4_096  # characters of a name
MOST_NOTES = 100


def is_name(value: Any) -> bool:
    """Returns whether a value is a text that is short enough to be shown."""
    return type(value) is str and len(value) <= MOST_TEXT


def _setting(value: Any) -> bool:
    number = type(value) in (int, float) and abs(value) <= MOST_NUMBER
    return value is None or type(value) is bool or number or is_name(value) or counts.fits(value)


_GRAPHS = {
    "rows": counts, "decodes": counts, "tokens": count, "prompts": count, "launch_ms": duration, "splits": counts,
    "programs": positive,
}
_LATER = {"splits", "programs"}  # older versions lack both


def _graphs(value: Any) -> bool:
    if type(value) is not dict or (value and value.keys() | _LATER != _GRAPHS.keys()):
        return False
    known = all(_GRAPHS[name].fits(each) for name, each in value.items())
    splits = value.get("splits", [])
    return known and (not splits or (min(splits) > 0 and "programs" in value and len(splits) == len(value["rows"])))


Name = Annotated[str, Bound(is_name)]
Maybe = Annotated[bool | None, Bound(lambda value: type(value) is bool)]  # None: unknown
Size = Annotated[int, Bound(lambda value: type(value) is int and 1 <= value <= MOST)]  # 0: unknown
Large = Annotated[int, Bound(lambda value: type(value) is int and 1 <= value <= MOST_NUMBER)]
Notes = Annotated[
    list[str], Bound(lambda value: type(value) is list and len(value) <= MOST_NOTES and all(map(is_name, value)))
]
Settings = Bound(lambda value: type(value) is dict and all(map(is_name, value)) and all(map(_setting, value.values())))


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """Facts about an engine. A fact that is unknown has its default: older versions and other engines lack some.
    Without a model and a device it is false: the engine has not started."""

    model: Name = ""
    model_dir: Name = ""  # a path on the engine's machine
    log_file: Name = ""  # also
    engine: Name = ""  # another engine's name and version; empty: ours
    architecture: Name = ""
    parameters: Large = 0
    active_parameters: Large = 0  # those that compute a token
    device: Name = ""
    dtype: Name = ""
    quantization: Name = ""
    kv_cache_dtype: Name = ""
    num_blocks: Size = 0  # without the null block
    block_size: Size = 0
    max_model_len: Size = 0
    max_num_seqs: Size = 0
    max_num_batched_tokens: Size = 0
    vocab_size: Size = 0
    eos_ids: Counts = field(default_factory=list)
    attention: Name = ""
    overlap: Maybe = None
    kv_bytes_per_token: Count = 0
    prefix_caching: Maybe = None
    chunked_prefill: Maybe = None
    scheduling_policy: Name = ""
    eviction_policy: Name = ""
    dummy_weights: Maybe = None
    random_text: Maybe = None  # a recording of prompts that were drawn at random
    generation: Annotated[dict[str, Any], Settings] = field(default_factory=dict)  # sampling defaults of the checkpoint
    load_seconds: Duration = 0.0
    notes: Notes = field(default_factory=list)
    speculation: Annotated[dict[str, Any] | None, optional(Settings)] = None  # method, tokens; {}: off; None: unknown
    tensor_parallel_size: Size = 0
    # Of a model with several kinds of memory, group 0 first: name, number of layers, bytes of a block, page or slot.
    groups: Annotated[list[tuple[str, int, int]], rows(Bound(is_name), count, count)] = field(default_factory=list)
    checkpoint_interval: Size = 0  # tokens; 0: no recurrent states
    max_gap_ms: Duration = 0.0  # the target for gaps between tokens; 0: none
    # Of CUDA graphs: captured numbers of rows ("rows"), and of rows beside prompts ("decodes"); the most tokens and
    # prompts of a step with prompts; ms to launch a step without a graph; for each of "rows", how many programs share a
    # text ("splits"); how many programs for one head of keys fill the device ("programs"). {}: none, or unknown.
    graphs: Annotated[dict[str, Any], Bound(_graphs)] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.model or self.device)

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Returns the facts of a JSON object from elsewhere; unknown names are left out. Raises ValueError for a fact
        that is not valid; its sentence begins with a verb."""
        if type(data) is not dict:
            raise ValueError("is not a JSON object")
        given = data | {"speculation": data["speculation"] or {}} if "speculation" in data else data
        known = {name: bound for name, bound in bounds_of(cls).items() if given.get(name) is not None}
        for name, bound in known.items():
            if not bound.fits(given[name]):
                raise ValueError(f"has no valid {name!r}")
        return cls(**{name: given[name] for name in known})

    def to_json(self) -> dict[str, Any]:
        """Returns the known facts as a JSON object."""
        known = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}
        return known if self.speculation is None else known | {"speculation": self.speculation or None}

    def public(self) -> dict[str, Any]:
        """Returns the known facts as a JSON object, without paths on the engine's machine."""
        return replace(self, model_dir="", log_file="").to_json()
