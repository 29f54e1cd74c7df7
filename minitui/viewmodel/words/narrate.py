"""Explains a step in plain sentences: what it did and why, from the engine's records.

    "r61 is admitted: the first 544 of its 1,039 tokens are in the tree already (34 blocks); the other 495 tokens are
    prefilled and its first token is sampled. 17 other requests decode one token each."
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from engine.trace.eviction import RECORDED_POLICIES
from engine.trace.records import CLEARED
from minitui.text import count, listed, match_reason
from minitui.viewmodel.explain.causes import explain
from minitui.viewmodel.explain.cut_hits import CUT
from minitui.viewmodel.explain.timing import took_words, why_slow
from minitui.viewmodel.history.events import Event, looked_up
from minitui.viewmodel.history.lane import DECODING, Lane
from minitui.viewmodel.history.steps import StepRow
from minitui.viewmodel.view import View
from minitui.viewmodel.words.texts import page_sentences

NAMED = 3  # a sentence names at most this many requests; the others are only counted
RULE_BROKEN = "a rule was broken: "  # begins the error of the step in which a student's function broke one
FINISHES = {
    "stop": ("finished", "end token or stop string"), "length": ("finished", "length limit"),
    "abort": ("ended", "cancelled"),
}


def narrate(view: View, step: int) -> str:
    """Returns sentences on what this step did and why; empty if the step is not in the history."""
    row = view.history.steps.get(step)
    if row is None:
        return ""
    events = view.history.events.of_step(step)
    admitted = {event.request for event in events if event.kind == "admit"}
    failed = [event.record.error for event in events if event.kind == "fail"]
    waiting = [f"r{event.request} waits for {event.record.reason}." for event in events if event.kind == "wait"]
    pages = [event.record for event in view.history.pages.of_step(step)]
    sentences = [
        *(f"Your function broke a rule here, so the run stops: {error.removeprefix(RULE_BROKEN)}."
          if error.startswith(RULE_BROKEN) else f"The step failed ({error}); its requests finish with this error."
          for error in failed),
        *_preemptions(events), *_admissions(view, row, events), *_evictions(view, events),
        *computed(view, row, admitted),
        *page_sentences(pages, [pool.group for pool in view.history.live.state.groups]), *waiting[-1:],
        *_finishes(events),
    ]
    if sentences and (why := why_long(view, row)):
        sentences.append(f"It took {took_words(row).replace(', ready', ' and was ready')} ({why}).")
    return " ".join(sentences)


def why_long(view: View, row: StepRow) -> str:
    """Returns "expected 6.9 ms, +83.9: garbage collection 80.1" for a slow step, for one that prompts made long, or for
    one whose measured parts took longer than expected, as other such steps vary; else an empty string."""
    model = view.models.of(row.step)
    found = explain(row, model)
    told = found is not None and (found.long or found.varied)
    return why_slow(row, model, always=bool(found and found.varied)) if told else ""


def computed(view: View, row: StepRow, left_out: Collection[int] = ()) -> list[str]:
    """Returns sentences on the step's prefill, decodes and drafts. The prefill of requests in `left_out` is omitted."""
    return [*_chunks(view, row, left_out), *_decodes(view, row), *_drafts(row)]


def notable(view: View, step: int) -> bool:
    """True if the step did more than decode."""
    row = view.history.steps.get(step)
    return row is not None and bool(row.chunks or view.history.events.of_step(step))


def _preemptions(events: list[Event]) -> list[str]:
    sentences = []
    for event in events:
        if event.record.kind == "preempt":
            reason, blocks = event.record.reason, event.record.blocks
            sentences.append(
                f"The pool is full: {reason}. r{event.request}, the newest running request, is preempted: it releases "
                f"its {count(blocks, 'block')} and queues again. Its computed tokens stay in the tree until evicted."
            )
        elif event.record.kind == "requeue":
            sentences.append(f"r{event.request} queues again: {event.record.reason}.")
    return sentences


def _evictions(view: View, events: list[Event]) -> list[str]:
    sentences = []
    evictions = [event for event in events if event.kind == "evict"]
    cleared = sum(event.record.blocks for event in evictions if event.record.reason == CLEARED)
    if cleared:
        sentences.append(f"The cache was cleared: {count(cleared, 'block')} left the tree.")
    total = sum(event.record.blocks for event in evictions) - cleared
    if total:
        blocks: Counter[str] = Counter()
        for event in evictions:
            record = event.record
            blocks[record.reason] += record.blocks * (record.reason != CLEARED)
        reasons = [reason for reason, n in blocks.most_common() if n]  # of most blocks first
        others = [count(len(reasons) - NAMED, "other request")] if len(reasons) > NAMED else []
        words = RECORDED_POLICIES[view.history.live.state.eviction_policy].words
        order = f"is evicted, the {words}" if total == 1 else f"are evicted, {words} first"
        why = listed([*reasons[:NAMED], *others])
        sentences.append(f"{count(total, 'block')} that no request held {order} ({why}).")
    return sentences


def _admissions(view: View, row: StepRow, events: list[Event]) -> list[str]:
    sentences = []
    chunks = {chunk[0]: chunk for chunk in row.chunks}
    matches = {event.request: event for event in events if event.kind in ("hit", "miss")}
    admitted = [event for event in events if event.kind == "admit"]
    for event in admitted[:NAMED]:
        lane = view.history.lanes.lanes.get(event.request)
        again = event.record.reason == "resumed"
        prompt = _prompt(view, lane, matches.get(event.request), chunks.get(event.request), again)
        sentences.append(f"r{event.request} is admitted{' again after its preemption' if again else ''}{prompt}.")
    more = len(admitted) - NAMED
    if more > 0:
        sentences.append(f"{more} more {'is' if more == 1 else 'are'} admitted.")
    return sentences


def _prompt(
    view: View, lane: Lane | None, match: Event | None, chunk: tuple[int, int, int, bool] | None, again: bool
) -> str:
    """Returns the end of an admission's sentence: how many tokens come from the tree, and how many are prefilled."""
    if chunk is None:
        return " and waits for token budget"
    _request, start, n, done = chunk
    total = lane.request.prompt_tokens if lane is not None else start + n
    if match is None:
        text = f": {count(total, 'prompt token')}"
    else:
        total = looked_up(match)
        text = _match_text(match, total, view.moment.shown.state.block_size)
    later = total - start - n
    if later > 0:
        return f"{text}; {count(n, 'token')} {'is' if n == 1 else 'are'} prefilled now, {later:,} later"
    if not done:
        return text
    which = f"the other {n:,} tokens are" if start else f"all {n:,} tokens are"
    if n == 1:
        which = "the last token is" if start else "its only token is"
    return f"{text}; {which} prefilled and its {'next' if again else 'first'} token is sampled"


def _match_text(match: Event, total: int, block_size: int) -> str:
    """Returns the part of the sentence on what the request's prefix match found in the tree."""
    reason = match_reason(match.record.stop, match.record.at, match.record.tokens, match.record.detail)
    if match.kind == "hit":
        taken = match.record.tokens
        where = f"being computed by r{match.writer} already" if match.writer >= 0 else "in the tree already"
        cut = f"; {reason}" if match.record.stop in CUT else ""
        return f": the first {taken:,} of its {total:,} tokens are {where} ({count(taken // block_size, 'block')}){cut}"
    return f": none of its tokens are in the tree ({reason})"


def _chunks(view: View, row: StepRow, left_out: Collection[int]) -> list[str]:
    sentences = []
    chunks = [chunk for chunk in row.chunks if chunk[0] not in left_out]
    for request, start, n, done in chunks[:NAMED]:
        lane = view.history.lanes.lanes.get(request)
        whole = lane.prefill_of(row.step, start + n, done) if lane is not None else None
        total = f" of {whole:,}" if whole is not None else ""
        token = "next" if lane is not None and lane.preempted_in(-1, row.step) else "first"
        tokens = f"token {start:,}" if n == 1 else f"tokens {start:,} to {start + n - 1:,}"
        sentences.append(f"r{request} prefills {tokens}{total}{f' and samples its {token} token' if done else ''}.")
    more = len(chunks) - NAMED
    if more > 0:
        sentences.append(f"{count(more, 'more request')} {'prefills' if more == 1 else 'prefill'}.")
    return sentences


def _decodes(view: View, row: StepRow) -> list[str]:
    n = row.decodes
    if not n:
        return []
    lanes = [lane.id for lane in view.history.lanes.around(row.step) if lane.code_at(row.step, DECODING)]
    if len(lanes) != n or n > NAMED:
        names = count(n, "other request" if row.chunks else "request")
    else:
        names = listed([f"r{id}" for id in sorted(lanes)])
    return [f"{names} {'decodes one token' if n == 1 else 'decode one token each'}{_new_blocks(view, row, lanes)}."]


def _drafts(row: StepRow) -> list[str]:
    """Returns a sentence on the draft tokens: how many were verified and accepted."""
    if not row.drafts:
        return []
    if len(row.drafts) > 1:
        subject = "They" if len(row.drafts) == row.decodes else f"{len(row.drafts)} of them"
        text = f"{subject} also verify {row.drafted:,} draft tokens"
        if not row.end_seq:
            return [f"{text}."]
        advance = count(len(row.drafts) + row.accepted, "token")
        return [f"{text}: {row.accepted:,} are accepted, so together they advance by {advance}."]
    request, drafted, accepted = row.drafts[0]
    drafts = count(drafted, "draft token")
    text = f"r{request} also verifies {drafts}, copied from earlier in its text (prompt lookup)"
    if accepted < 0:
        return [f"{text}."]
    if accepted == 0:
        return [f"{text}: none is accepted."]
    which = "all are" if accepted == drafted else f"the first {accepted} are" if accepted > 1 else "the first is"
    if drafted == 1:
        which = "it is"
    return [f"{text}: {which} accepted, so it advances by {count(1 + accepted, 'token')}."]


def _new_blocks(view: View, row: StepRow, decoding: list[int]) -> str:
    """Returns the end of the sentence on decodes: which requests, or how many, start a new block. Empty unless the
    picture shows this step."""
    if view.moment.horizon != row.step or not view.moment.exact:
        return ""
    state = view.moment.shown.state
    begun = []
    drafting = {draft[0] for draft in row.drafts}  # these requests may have advanced by more than one token
    for id in decoding:
        request = state.requests.get(id)
        if request is not None and request.joined_at >= 0 and id not in drafting:
            tokens = state.computed(request)
            if tokens % state.block_size == 1 and tokens // state.block_size < len(request.table):
                begun.append((id, request.table[tokens // state.block_size]))
    if not begun or len(begun) > NAMED:
        return f"; {len(begun)} of them start a new block" if begun else ""
    if len(decoding) == 1:
        return f", the first token of block {begun[0][1]}"
    return "; " + listed([f"r{id} starts block {block}" for id, block in begun])


def _finishes(events: list[Event]) -> list[str]:
    finished = [event for event in events if event.kind == "finish"]
    alike: dict[tuple[str, int], list[str]] = {}  # (reason, tokens) -> requests
    for event in finished[:NAMED]:
        alike.setdefault((event.record.reason, event.record.output_tokens), []).append(f"r{event.request}")
    sentences = []
    for (reason, tokens), names in alike.items():
        how, why = FINISHES.get(reason, ("finished", reason))
        sentences.append(f"{listed(names)} {how} after {count(tokens, 'token')} ({why}).")
    more = len(finished) - NAMED
    if more > 0:
        sentences.append(f"{more} more finished.")
    return sentences
