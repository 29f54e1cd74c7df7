"""Markdown as lines of text: nothing lost, nothing too wide, and streaming ends where rendering at once does."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from minitui.tui.markdown import TONES, Line, Streamed, plain, render, shortened, wrap

DOCUMENT = """# Paging

A **block table** maps `p` to places, and this is a *long* line that wraps somewhere.

- one
- two with `code` and more words than fit into the width of the column
  - nested
1. first
2. second

```python
block = table[p // 16]
```

> a quotation
> of two lines

| a | b |
|---|---|
| 1 | two **x** |

<div>raw html</div>

The end.\x20\x20
Hard break, <b>bold?</b> and 日本語テキスト.
"""


def text_of(lines: list[Line]) -> str:
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def test_every_kind_of_block_is_there():
    text = text_of(render(DOCUMENT, 60))
    for piece in (
        "Paging",
        "A block table maps p to places",
        "• one",
        "  ◦ nested",
        "1. first",
        "2. second",
        "  block = table[p // 16]",
        "▎ a quotation of two lines",
        "1  two x",
        "<div>raw html</div>",
        "The end.\nHard break, <b>bold?</b> and 日本語テキスト.",
    ):
        assert piece in text


def test_tones_name_what_a_span_is():
    spans = [span for line in render(DOCUMENT, 60) for span in line]
    assert {tone for _, tone in spans} <= set(TONES)
    for text, tone in (
        ("block table", "strong"),
        ("long", "em"),
        ("Paging", "heading"),
        ("p", "code"),
        ("• ", "bullet"),
    ):
        assert (text, tone) in spans


def test_streaming_a_document_ends_with_the_same_lines_as_rendering_it_at_once():
    for step in (1, 7, 50):
        streamed = Streamed(48)
        for end in range(0, len(DOCUMENT), step):
            streamed.update(DOCUMENT[:end])
        assert streamed.update(DOCUMENT) == streamed.finish(DOCUMENT) == render(DOCUMENT, 48)


LANGUAGE = re.compile("```.*[^`\n]")


@given(st.text(alphabet="ab *`_-#>|[]()<1.\n\té日", max_size=120), st.integers(8, 40))
def test_no_line_is_wider_than_asked_and_no_letter_is_lost(text, width):
    lines = render(text, width)
    assert all(cell_len("".join(t for t, _ in line)) <= width for line in lines)
    letters = [c for c in text if c in "abé日"]
    shown = [c for c in text_of(lines) if c in "abé日"]
    # A link's target is told behind it; a reference definition and the language of a code block show nothing.
    if "[" not in text and not LANGUAGE.search(text):
        assert shown == letters


@given(st.text(alphabet="ab *`-\n#>1.", max_size=100), st.lists(st.integers(0, 100), max_size=6))
def test_however_a_text_arrives_its_words_are_all_shown(text, cuts):
    streamed = Streamed(30)
    for cut in sorted(cuts):
        streamed.update(text[:cut])
    shown = [c for c in text_of(streamed.update(text)) if c in "ab"]
    assert shown == [c for c in text if c in "ab"] or LANGUAGE.search(text)


def test_wrapping_keeps_spans_and_breaks_at_spaces():
    lines = wrap([("one two ", "text"), ("three", "strong"), ("four five", "text")], 12)
    assert lines == [[("one two", "text")], [("three", "strong"), ("four", "text")], [("five", "text")]]
    assert wrap([("abcdefghij", "text")], 4) == [[("abcd", "text")], [("efgh", "text")], [("ij", "text")]]


def test_plain_text_is_shown_as_it_is():
    assert text_of(plain("  two  spaces\n\n**no** markup", 40)) == "  two  spaces\n\n**no** markup"


def test_a_text_beyond_the_parsers_limit_is_shown_as_it_is_written():
    """Its time grows with the square of the open brackets."""
    assert render("[" * 400_000, 100) == [[("[" * 100, "text")]] * 4_000
    assert render("**a**\n" * 10_000, 40) == [[("**a**", "text")]] * 10_000


def test_a_shortened_text_keeps_its_beginning_and_its_end():
    assert shortened("a" * 10, 10) == "a" * 10
    assert shortened("abc" + "x" * 5_000 + "def", 6) == "abc\n\n… 5,000 characters are not shown …\n\ndef"
    assert shortened("x" * 20, 0) == "\n\n… 20 characters are not shown …\n\n"
