"""Reads the rotary positions of a config.json, in the layouts of transformers 4 and 5."""

from __future__ import annotations

from typing import Any

from engine.fields import Fields, shown
from engine.model.config import LONGROPE, PROPORTIONAL, ROPE_KINDS, RopeConfig
from engine.model.families import Architecture
from engine.model.hf.layers import FULL, SLIDING

MOST_POSITIONS = 1 << 24  # limits the size of the RoPE table; the longest published context is 10 million
LARGEST_FACTOR = 1e6  # of RoPE scaling
LEAST_TURNS, MOST_TURNS = 1e-6, 1e6  # the limits of a frequency band (yarn, llama3) must be in this range

ROPE_COMMON = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "finetuned",
}
ROPE_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    LONGROPE: {"factor", "attention_factor", "short_factor", "long_factor"},
    PROPORTIONAL: {"factor"},
}


class RopeReader:
    """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (older versions)."""

    def __init__(self, fields: Fields, arch: Architecture, head_dim: int) -> None:
        self._fields, self._arch, self._head_dim = fields, arch, head_dim
        self._kinds: tuple[str, ...] = ("default", LONGROPE) if arch.longrope else ROPE_KINDS
        if arch.uneven:
            self._kinds += (PROPORTIONAL,)

    def one(self) -> RopeConfig:
        """Returns the rotary positions of a model whose layers have the same."""
        table = self._table()
        nested = [key for key, value in table.items() if isinstance(value, dict)]
        if nested:
            raise self._fields.error(
                f"has separate rope parameters for {shown(', '.join(nested))}: they must be the same for all layers, "
                "in one object"
            )
        return self._read(table, 10_000.0)

    def two(self) -> tuple[RopeConfig, RopeConfig]:
        """Returns the rotary positions of layers without a window, and of layers with a window."""
        table = self._table()
        if not any(isinstance(value, dict) for value in table.values()):
            table = {FULL: table}
        for key, value in table.items():
            if key not in (FULL, SLIDING) or not isinstance(value, dict | None):
                raise self._fields.error(f"has rope parameters for {shown(key)}: they must be for {FULL} or {SLIDING}")
        if self._arch.uneven:
            table = {**self._arch.defaults["rope_parameters"], **table}
        # Gemma 3 names the base of layers with a window; OLMo 3 has one base for all layers.
        local = self._fields.number("rope_theta", 10_000.0, 1.0, True)
        if "rope_local_base_freq" in self._arch.reads:
            local = self._fields.number("rope_local_base_freq", 10_000.0, 1.0, True)
        whole = self._read(table.get(FULL) or {}, 10_000.0)
        return whole, self._read(table.get(SLIDING) or {"rope_theta": local}, local)

    def _table(self) -> dict[str, Any]:
        tables = []
        for key in ("rope_parameters", "rope_scaling"):
            value = self._fields.raw.get(key)
            if value is not None and not isinstance(value, dict):
                raise self._fields.error(f"has rope parameters {shown(value)}: they must be an object")
            if value:
                tables.append(value)
        if len(tables) == 2 and any(tables[0][key] != tables[1][key] for key in tables[0].keys() & tables[1].keys()):
            raise self._fields.error("has rope_parameters and rope_scaling, which differ: remove the wrong one")
        return {key: value for table in tables for key, value in table.items()}

    def _read(self, raw: dict[str, Any], theta: float) -> RopeConfig:
        """Reads one object. `type` is an older name of `rope_type`. `theta`: the default of rope_theta."""
        fields, rope = self._fields, Fields(self._fields.path, raw, " in its rope parameters")
        named = [raw[key] for key in ("rope_type", "type") if raw.get(key) is not None]
        kind = named[0] if named else "default"
        if any(other != kind for other in named):
            raise self._fields.error(f"has two rope types, {' and '.join(map(shown, named))}: remove the wrong one")
        if self._arch.longrope and kind in ("su", "yarn"):
            kind = LONGROPE  # older names
        if kind not in self._kinds:
            raise self._fields.error(
                f"asks for rope type {shown(kind)}: supported are {', '.join(self._kinds)}; name one of them"
            )
        known = ROPE_COMMON | ROPE_KEYS[kind]
        if "mrope_section" in self._arch.reads:  # a token of text has the same place in time, height and width
            known |= {"mrope_section", "mrope_interleaved"}
        if "llama_4_scaling_beta" in self._arch.reads:
            known |= {"llama_4_scaling_beta", "max_position_embeddings"}
        for key in raw.keys() - known:
            if raw[key] is not None and not (key.endswith("factor") and raw[key] == 1):
                raise self._fields.error(
                    f"has {shown(key)[1:-1]} = {shown(raw[key])} in its rope parameters, which is not "
                    f"supported with rope type {kind!r}: use another model, or remove the field if it has no effect"
                )
        theta = rope.number("rope_theta", fields.number("rope_theta", theta, 1.0, True), 1.0, True)
        if kind == PROPORTIONAL:
            factor = rope.number("factor", 1.0, 1.0, most=LARGEST_FACTOR)
            share = rope.number("partial_rotary_factor", 1.0, open_low=True, most=1.0)
            return RopeConfig(kind=kind, theta=theta, factor=factor, share=share)
        rotated = self._rotary_dim(rope)
        if kind == "default":
            return RopeConfig(theta=theta, rotary_dim=rotated, interleaved=self._arch.interleaved)
        context, original = fields.count("max_position_embeddings", most=MOST_POSITIONS), self._original_context(rope)
        if kind == "dynamic" and (original != context or self._head_dim == 2):
            raise self._fields.error(
                f"has rope type 'dynamic' with {context:,} positions, {original:,} before stretching, and "
                f"head_dim {self._head_dim}: the two numbers of positions must be equal, and head_dim above 2"
            )
        low = high = 1.0
        if kind == "llama3":  # the bands of llama3 have no defaults
            low, high = (self._turns(rope, key) for key in ("low_freq_factor", "high_freq_factor"))
            if high <= low:
                raise rope.refuse("high_freq_factor", f"above low_freq_factor, {low:g}")
        ratio = max(1.0, context / original) if kind in ("yarn", LONGROPE) else None
        factor = rope.number("factor", ratio, 1.0, most=LARGEST_FACTOR)
        short: tuple[float, ...] = ()
        long: tuple[float, ...] = ()
        if kind == LONGROPE:
            count = (rotated or self._head_dim) // 2
            short, long = (self._factors(rope, key, count) for key in ("short_factor", "long_factor"))
        return RopeConfig(
            kind=kind, theta=theta, factor=factor, original_max_position=original,
            attention_factor=rope.optional_number("attention_factor", True, LARGEST_FACTOR),
            mscale=rope.optional_number("mscale"), mscale_all_dim=rope.optional_number("mscale_all_dim"),
            beta_fast=self._turns(rope, "beta_fast", 32.0), beta_slow=self._turns(rope, "beta_slow", 1.0),
            truncate=rope.flag("truncate", True), low_freq_factor=low, high_freq_factor=high, short_factors=short,
            long_factors=long, rotary_dim=rotated, interleaved=self._arch.interleaved,
            query_beta=rope.number("llama_4_scaling_beta", 0.0) if "llama_4_scaling_beta" in known else 0.0,
        )

    def _rotary_dim(self, rope: Fields) -> int:
        """Returns how many numbers of a head are rotated; 0 for the whole head."""
        key, outer = "partial_rotary_factor", self._fields.raw.get("partial_rotary_factor")
        if self._arch.partial_rotary is None:
            if rope.raw.get(key, outer or 1.0) not in (None, 1):
                raise self._fields.error("has a partial_rotary_factor: only whole heads can be rotated")
            return 0
        share = rope.number(key, self._fields.number(key, self._arch.partial_rotary))
        rotated = int(self._head_dim * share)
        if not 0 < rotated <= self._head_dim or rotated % 2:
            raise self._fields.error(
                f"rotates {rotated} of the {self._head_dim} numbers of a head: correct partial_rotary_factor, so that "
                "this is an even number from 2 on"
            )
        return 0 if rotated == self._head_dim else rotated

    def _factors(self, rope: Fields, key: str, count: int) -> tuple[float, ...]:
        """Returns the factors of longrope, one for each of the `count` frequencies."""
        values: Any = rope.raw.get(key)
        numbers = isinstance(values, list) and all(type(each) in (int, float) for each in values)
        if not numbers or len(values) != count or not all(0 < each <= LARGEST_FACTOR for each in values):
            raise rope.refuse(key, f"a list of {count} numbers, above 0 and at most {LARGEST_FACTOR:g}")
        return tuple(map(float, values))

    def _turns(self, rope: Fields, key: str, default: float | None = None) -> float:
        """Returns the limit of a band: how many turns a dimension makes within the original context. If there is a
        default, 0 means the default."""
        if default is not None and not rope.number(key, default, most=MOST_TURNS):
            return default
        return rope.number(key, default, LEAST_TURNS, most=MOST_TURNS)

    def _original_context(self, rope: Fields) -> int:
        key = "original_max_position_embeddings"
        outer = self._fields.count(key, self._fields.count("max_position_embeddings"), most=MOST_POSITIONS)
        original = rope.count(key, outer, most=MOST_POSITIONS)
        if self._fields.raw.get(key) is not None and original != outer:
            raise self._fields.error(
                f"has {key} {outer:,}, and {original:,} in its rope parameters: correct the wrong one"
            )
        return original
