"""Notes what vLLM's scheduler and block pool do inside of its calls. Runs inside vLLM's engine process.

minitui/vllm/translate.py describes the events. Nothing is raised inside of vLLM's calls: the error of a hook is raised
when the events are taken.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from minitui.vllm.facts import OF_POOL

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

now = time.perf_counter  # the same clock in all processes of a machine


class Hooks:
    """Collects the events of one scheduler. `seconds`: spent here."""

    def __init__(self, scheduler: Scheduler, manager: Any, pool: Any) -> None:
        self.seconds = 0.0
        self.events: list[tuple[Any, ...]] = []  # since they were taken
        self._cached: list[Any] = []  # after these events: request, its first new cached block, the end of its last one
        self._broken: Exception | None = None
        self._scheduler, self._manager, self._pool = scheduler, manager, pool

    def attach(self) -> None:
        """Put the hooks into the pool."""
        self._hook_caching()
        self._hook("evict_blocks", self.evicted)
        if self._scheduler.connector is not None:  # it takes blocks for requests that are not scheduled yet
            self._hook("get_new_blocks", self.taken)

    def detach(self) -> None:
        """Remove the hooks from the pool."""
        for name in OF_POOL:
            self._pool.__dict__.pop(name, None)

    def observe(self, note: Any, request: Request) -> None:
        """Call `note` with a request."""
        try:
            note(request)
        except Exception as error:
            self._broken = error

    def _hook(self, name: str, note: Any) -> None:
        """Call `note` after each call of a method of the pool, with its result and its arguments."""
        original = getattr(self._pool, name)

        def hooked(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            began = now()
            try:
                note(result, *arguments, **options)
            except Exception as error:
                self._broken = error
            self.seconds += now() - began
            return result

        setattr(self._pool, name, hooked)

    def _hook_caching(self) -> None:
        """Note full blocks that are cached now: the call of the pool that is by far the most frequent."""
        original = self._pool.cache_full_blocks

        def cache_full_blocks(
            request: Request, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *arguments: Any, **options: Any
        ) -> Any:
            result = original(request, blocks, num_cached_blocks, num_full_blocks, *arguments, **options)
            if num_cached_blocks < num_full_blocks:
                began = now()
                self._cached += (request, num_cached_blocks, num_full_blocks)
                self.seconds += now() - began
            return result

        self._pool.cache_full_blocks = cache_full_blocks

    def note(self, *event: Any) -> None:
        """Append an event, after the blocks that were cached before it."""
        if self._cached:
            self._note_cached()
        self.events.append(event)

    def _note_cached(self) -> None:
        """Append one event for all blocks that were cached since the last event: a step caches blocks of many rows."""
        cached, self._cached = self._cached, []
        self.events.append(("c", [request.request_id for request in cached[::3]], cached[1::3], cached[2::3]))

    def taken(self, blocks: Any, *_: Any, **__: Any) -> None:
        """Note blocks that the pool gave away."""
        self.note("g", [block.block_id for block in blocks])

    def evicted(self, _: Any, block_ids: set[int], *__: Any, **___: Any) -> None:
        """Note blocks whose content a connector evicted."""
        self.note("e", sorted(block_ids))

    def preempted(self, request: Request) -> None:
        """Note a preemption, before vLLM takes the request's blocks away: it may have got some in this step."""
        id = request.request_id
        self.note("p", id, [block.block_id for block in self._manager.req_to_blocks.get(id, ())])

    def freed(self, request: Request) -> None:
        """Note the end of a request."""
        self.note("f", request.request_id, request.status.name, request.num_output_tokens)

    def left(self, request: Request) -> None:
        """Note that a request has ended, but a connector still reads its blocks: `freed` follows later."""
        if request.request_id in self._scheduler.requests:
            self.note("l", request.request_id)

    def take(self) -> list[tuple[Any, ...]]:
        """Returns the events since the last call. Raises the error of a hook, if one has failed."""
        if self._broken is not None:
            raise self._broken
        if self._cached:
            self._note_cached()
        events, self.events = self.events, []
        return events
