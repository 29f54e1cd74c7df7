"""What the files beside tokenizer.json say: special tokens, recommended sampling settings, the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.errors import CheckpointError, InvalidRequest
from engine.fields import Fields, shown
from engine.files import read_json_if_there, read_text
from engine.params import RECOMMENDED, SamplingParams
from engine.text.added_tokens import SPECIAL_NAMES, text_of
from engine.text.chat_template import LONGEST_SOURCE


class TokenizerConfig:
    """Reads the files of a checkpoint directory. Its methods raise CheckpointError if a file is broken."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fields = self._fields("tokenizer_config.json").raw
        if "added_tokens_decoder" not in self.fields:  # older versions name special tokens in another file
            self.fields |= self._fields("special_tokens_map.json").raw

    def special_names(self) -> dict[str, str]:
        """Returns the texts of the special tokens by their names, such as "eos_token"."""
        return {name: self._special(name) for name in SPECIAL_NAMES if self.fields.get(name)}

    def _fields(self, name: str) -> Fields:
        path = self.directory / name
        return Fields(path, read_json_if_there(path))

    def _special(self, name: str) -> str:
        """Returns the text of a special token, which tokenizer_config.json has as a string or as {"content": text}."""
        token = self.fields[name]
        content = text_of(token)
        if content is None:
            raise CheckpointError(
                f"the tokenizer of {self.directory} has {name} = {shown(token)}: it must be a string, or an object "
                "with content"
            )
        return content

    def generation(self, vocab_size: int) -> dict[str, Any]:
        """Returns the sampling settings that generation_config.json recommends."""
        fields = self._fields("generation_config.json")
        found = {key: fields.raw[key] for key in RECOMMENDED if fields.raw.get(key) is not None}
        if not fields.flag("do_sample", True):
            found["temperature"] = 0.0
        try:
            SamplingParams(**found).validate(vocab_size)
        except InvalidRequest as error:
            raise CheckpointError(f"{fields.path} recommends invalid settings: {error}; correct or delete it") from None
        return found

    def chat_template(self) -> str | None:
        """Returns the source of the chat template; None: there is none."""
        path = self.directory / "chat_template.jinja"
        if path.exists():
            return read_text(path, LONGEST_SOURCE)
        template = self.fields.get("chat_template") or self._fields("chat_template.json").raw.get("chat_template")
        if isinstance(template, list):  # several templates with names
            template = {str(item.get("name")): item.get("template") for item in template if isinstance(item, dict)}
        if isinstance(template, dict):
            template = template.get("default") or next(iter(template.values()), None)
        if template is not None and (not isinstance(template, str) or len(template) > LONGEST_SOURCE):
            found = f"{len(template):,} characters" if isinstance(template, str) else type(template).__name__
            raise CheckpointError(
                f"the chat template of {self.directory} is {found}; it must be a string of at most {LONGEST_SOURCE:,} "
                "characters"
            )
        return template
