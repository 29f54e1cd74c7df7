"""Stage 6, commit: appends the ids that a step drew to its requests, and ends finished replies.

Steps are committed in the order of their planning. A request may have finished, failed, been aborted or been requeued
since the step was planned: then its entry is void and is skipped.
"""

from __future__ import annotations

from engine.core.request import Request, RequestState
from engine.core.scheduler import Scheduler
from engine.core.step import Emitted, Scheduled, StepResult, TokenLogprobs
from engine.core.token_rules import dead_end

NOT_FINITE = "the model's logits were not finite numbers"


class Committer:
    """Commits the steps that a scheduler planned. The scheduler owns the requests, the cache their blocks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.cache = scheduler.cache
        self.log = scheduler.log

    def commit(self, scheduled: Scheduled, result: StepResult) -> list[Emitted]:
        """Append the ids that a step drew, end finished replies, and publish the blocks that are now written."""
        plan = scheduled.plan
        self.scheduler.settle(plan.step)
        emitted: list[Emitted] = []
        size, running = self.cache.block_size, RequestState.RUNNING
        bad, extras = set(result.bad), bool(result.logprobs or result.prompt_logprobs)
        ends, samples = (plan.starts + plan.q_lens).tolist(), plan.samples.tolist()
        checked = self._accept_drafts(scheduled, result) if plan.num_drafted else {}
        entries = zip(scheduled.requests, scheduled.epochs, ends, samples, result.ids, strict=True)
        for i, (request, epoch, end, sampled, drawn) in enumerate(entries):
            if request.epoch != epoch:
                continue  # void: the request ended or was requeued while this step was in flight
            token: int | None = None
            reason = masked = ""
            if i in checked:
                *accepted, drawn = checked[i]
                emitted += self._append_accepted(request, accepted, result, i)
                if self.cache.states is not None and request.state is running:
                    request.state_at = request.draft_places[len(accepted)]
                end = len(request.ids)
                if drawn < 0:
                    bad.add(i)
            ids, grammar = request.ids, request.grammar
            failed = grammar.failed if sampled and grammar is not None else ""
            if sampled and i not in bad and not failed:
                token = drawn
                ids.append(token)
                if token in request.stop_ids or (grammar is not None and grammar.advance(token)):
                    reason = "stop"
                elif len(ids) >= request.max_total:
                    reason = "length"
            elif sampled:
                masked = failed or dead_end(request)
                reason = f"error: {masked or NOT_FINITE}"
            if end // size > (request.shared_blocks or len(request.contents)) and request.state is running:
                self.cache.publish_committed(request, end)
            if reason:
                leaf = request.node
                self.scheduler.finish(request, reason)
                if i in bad and leaf is not None and not masked:
                    self.cache.forget(leaf)  # the KV of this leaf may contain NaN
            if token is not None or reason or extras:
                item = Emitted(request, token, reason, result.arrived_us)
                if extras:
                    item.logprobs = result.logprobs[i][-1] if i in result.logprobs else None
                    item.prompt_logprobs = _new_prompt_logprobs(request, int(plan.starts[i]), result, i)
                emitted.append(item)
        return emitted

    def _accept_drafts(self, scheduled: Scheduled, result: StepResult) -> dict[int, list[int]]:
        """Returns the tokens of each entry with drafts: its accepted drafts, then the token that was drawn after them.
        The first draft that differs from the token drawn at its position, or that is a stop token, is rejected. All
        drafts after it are rejected too."""
        lookup = self.scheduler.lookup
        assert lookup is not None
        checked: dict[int, list[int]] = {}
        counts: list[tuple[int, int, int]] = []
        for entry, draft in scheduled.plan.drafts():
            request, draws = scheduled.requests[entry], result.checked[entry]
            if request.epoch != scheduled.epochs[entry]:
                continue
            wrong = (i for i, token in enumerate(draft) if token != draws[i] or token in request.stop_ids)
            accepted = next(wrong, len(draft))
            checked[entry] = draws[: accepted + 1]
            if entry in result.logprobs:
                del result.logprobs[entry][accepted + 1 :]
            request.drafted = 0
            lookup.learn(request, len(draft), accepted)
            if request.state is RequestState.RUNNING:
                counts.append((request.id, len(draft), accepted))
        if counts:
            self.log.append("accept", scheduled.plan.step, counts)
        return checked

    @staticmethod
    def _append_accepted(request: Request, accepted: list[int], result: StepResult, entry: int) -> list[Emitted]:
        """Append accepted drafts, whose KV is computed already; return one output for each."""
        request.ids += accepted
        if request.state is RequestState.RUNNING:
            request.planned += len(accepted)
        logprobs, at = result.logprobs.get(entry), result.arrived_us
        return [
            Emitted(request, token, arrived_us=at, logprobs=logprobs[i] if logprobs else None)
            for i, token in enumerate(accepted)
        ]

    def fail(self, scheduled: Scheduled, error: str) -> list[Emitted]:
        """End the requests of a failed step, withdraw its blocks, and requeue the requests that use these blocks."""
        plan = scheduled.plan
        self.log.append("fail", plan.step, error)
        emitted = []
        blocks = self.cache.tree.invalidated_by(plan.step)
        for request, epoch in zip(scheduled.requests, scheduled.epochs, strict=True):
            if request.epoch == epoch:
                emitted.append(Emitted(request, None, f"error: {error}"))
                self.scheduler.finish(request, f"error: {error}")
        running = self.scheduler.running
        for request in [r for r in reversed(running) if not blocks.isdisjoint(r.table)]:
            self.scheduler.requeue(request, plan.step)
        self.cache.tree.withdraw(plan.step, blocks)
        for request in running:
            self.cache.resend_table(request)  # the table changes of the failed plan may not have reached the device
        return emitted


def _new_prompt_logprobs(request: Request, start: int, result: StepResult, entry: int) -> list[TokenLogprobs] | None:
    """Returns the prompt logprobs of the chunk at `start`, without those that were returned before. After a preemption,
    the same prompt positions are computed again."""
    found = result.prompt_logprobs.get(entry)
    if found is None:
        return None
    new = found[max(0, request.prompt_logprobs_given - start) :]
    request.prompt_logprobs_given += len(new)
    return new
