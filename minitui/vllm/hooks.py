"""Notes what vLLM's scheduler and block pool do inside of its calls. Runs inside vLLM's engine process.
minitui/vllm/translate.py describes the events. Nothing is raised inside of vLLM's calls: the error of a hook is raised
when the events are taken."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minitui.vllm.facts import OF_GROUPS, OF_POOL

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

now = time.perf_counter  # the same clock in all processes of a machine


class Hooks:
    """Collects the events of one scheduler. `seconds`: spent here."""

    def __init__(self, scheduler: Scheduler, manager: Any, pool: Any, others: Sequence[Any] = ()) -> None:
        """`manager`: of the group with full attention; `others`: of the other KV cache groups."""
        self.seconds = 0.0
        self.events: list[tuple[Any, ...]] = []  # since they were taken
        self._cached: list[Any] = []  # after these events: request, its first new cached block, the end of its last one
        self._broken: Exception | None = None
        self._scheduler, self._manager, self._pool, self._others = scheduler, manager, pool, others
        self._place = {manager.kv_cache_group_id: i for i, manager in enumerate(others)}
        self._removing: str | None = None  # the request whose blocks behind the window, or old states, are released

    def attach(self) -> None:
        """Put the hooks into the pool."""
        self._hook_caching()
        self._hook("evict_blocks", self.evicted)
        if self._others:
            self._hook_others()
        if self._scheduler.connector is not None:  # it takes blocks for requests that are not scheduled yet
            self._hook("get_new_blocks", self.taken)

    def detach(self) -> None:
        """Remove the hooks from the pool."""
        for name in OF_POOL + OF_GROUPS:
            self._pool.__dict__.pop(name, None)
        self._scheduler.kv_cache_manager.coordinator.__dict__.pop("remove_skipped_blocks", None)

    def observe(self, note: Any, request: Request) -> None:
        """Call `note` with a request."""
        try:
            note(request)
        except Exception as error:
            self._broken = error

    def _hook(self, name: str, note: Any) -> None:
        """Call `note` after each call of a method of the pool, with its result and its arguments."""
        setattr(self._pool, name, self._noting(getattr(self._pool, name), note))

    def _noting(self, original: Any, note: Any) -> Any:
        def hooked(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            began = now()
            try:
                note(result, *arguments, **options)
            except Exception as error:
                self._broken = error
            self.seconds += now() - began
            return result

        return hooked

    def _hook_caching(self) -> None:
        """Note full blocks that are cached now: the call of the pool that is by far the most frequent."""
        original, others = self._pool.cache_full_blocks, self._others

        def cache_full_blocks(
            request: Request, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *arguments: Any, **options: Any
        ) -> Any:
            result = original(request, blocks, num_cached_blocks, num_full_blocks, *arguments, **options)
            if num_cached_blocks < num_full_blocks:
                began = now()
                if not others or not self._cached_other(
                    request, blocks, num_cached_blocks, num_full_blocks, *arguments, **options
                ):
                    self._cached += (request, num_cached_blocks, num_full_blocks)
                self.seconds += now() - began
            return result

        self._pool.cache_full_blocks = cache_full_blocks

    def _hook_others(self) -> None:
        """Note what becomes of blocks of the other groups. Few calls are of interest, so each is short."""
        coordinator = self._scheduler.kv_cache_manager.coordinator
        remove = coordinator.remove_skipped_blocks

        def remove_skipped_blocks(request_id: str, *arguments: Any, **options: Any) -> Any:
            self._removing = request_id
            try:
                return remove(request_id, *arguments, **options)
            finally:
                self._removing = None

        coordinator.remove_skipped_blocks = remove_skipped_blocks
        self._hook("cache_partial_block", self._partly_cached)
        self._hook("_maybe_evict_cached_block", self._uncached)
        self._hook_freeing()
        if hasattr(self._pool, "move_block_hashes"):  # not in 0.25.1
            self._hook("move_block_hashes", self._moved)

    def _hook_freeing(self) -> None:
        original = self._pool.free_blocks

        def free_blocks(blocks: Any) -> Any:
            if self._removing is not None:
                blocks = list(blocks)
                self.note("d", self._removing, [block.block_id for block in blocks if not block.is_null])
            return original(blocks)

        self._pool.free_blocks = free_blocks

    def _cached_other(
        self, request: Request, blocks: Any, start: int, end: int, block_size: int, kv_cache_group_id: int, *_: Any,
        **__: Any,
    ) -> bool:
        """Note cached blocks of a group beside full attention; returns whether they are."""
        place = self._place.get(kv_cache_group_id)
        if place is None:
            return False
        new = [i for i in range(start, end) if blocks[i].block_hash is not None]
        if new:
            ends, ids = [(i + 1) * block_size for i in new], [blocks[i].block_id for i in new]
            self.note("s", request.request_id, place, ends, ids)
        return True

    def _partly_cached(
        self, result: Any, request: Request, block: Any, num_tokens: int, kv_cache_group_id: int, *_: Any, **__: Any
    ) -> None:
        if result is not None and kv_cache_group_id in self._place:
            alone = block.block_id not in self._pool.cached_block_hashes_by_block
            place = self._place[kv_cache_group_id]
            self.note("t", request.request_id, place, num_tokens, block.block_id, alone)

    def _uncached(self, evicted: bool, block: Any) -> None:
        """Note that a block which is in use is not cached any more; one that is taken from the pool never is."""
        if evicted and block.ref_cnt:
            self.note("e", [block.block_id])

    def _moved(self, _: Any, src_block: Any, dst_block: Any) -> None:
        self.note("m", src_block.block_id, dst_block.block_id)

    def tables(self, id: str) -> list[list[int]]:
        """Returns a request's tables in the other groups."""
        return [[block.block_id for block in manager.req_to_blocks.get(id, ())] for manager in self._others]

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
        table = [block.block_id for block in self._manager.req_to_blocks.get(id, ())]
        self.note("p", id, table, self.tables(id))

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
