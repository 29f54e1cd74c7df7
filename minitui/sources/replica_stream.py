"""An answer from one of several servers.

If a replica is lost before the first piece of an answer, the request moves to the replica that routing.py chooses next.
If the replica is lost later, the answer ends with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

from engine.errors import EngineDead, EngineError
from engine.params import SamplingParams
from engine.text.output import Delta
from minitui.sources.base import Stream
from minitui.sources.http import Overloaded
from minitui.sources.replica import Replica


class Replicas(Protocol):
    """The servers, as a stream needs them (ReplicaSource)."""

    replicas: list[Replica]

    def place(self, group: str, tried: dict[str, str] | None = None) -> Replica:
        """Returns the replica for a chat's next answer. Raises EngineDead if no replica can answer."""

    def ask(self, replica: Replica, ids: list[int], params: SamplingParams, group: str) -> Stream:
        """Ask one replica; returns its stream."""


class ReplicaStream(Stream):
    """An answer from a replica. If the replica is lost before the answer begins, another replica answers."""

    def __init__(self, source: Replicas, ids: list[int], params: SamplingParams, group: str) -> None:
        """Raises EngineDead if no replica can answer."""
        super().__init__()
        self._source, self._request = source, (ids, params, group)
        self._tried: dict[str, str] = {}  # address -> why this replica did not answer
        self._cancelled = False
        self._accepted = False
        self._losses = 0  # replicas that were lost after they had accepted the request
        self._begin()

    def _begin(self) -> None:
        self.replica = self._source.place(self._request[2], self._tried)
        self._inner = self._source.ask(self.replica, *self._request)
        self._accepted = False
        self.replica.streams[self] = self._request[2]

    def _move_on(self, error: EngineError) -> None:
        """Ask the next replica.

        Raises EngineDead if there is none, if the request was cancelled, or if two replicas were lost after they had
        accepted it.
        """
        replica = self.replica
        replica.streams.pop(self, None)
        self._tried[replica.url] = str(error)
        if isinstance(error, EngineDead):
            replica.report_failure(str(error))
            self._losses += self._accepted
        if self._cancelled or self._losses > 1:
            raise EngineDead(f"{replica.title} did not answer: {error}")
        self._begin()

    async def started(self) -> int:
        while True:
            try:
                return await self._accept()
            except (EngineDead, Overloaded) as error:
                self._move_on(error)
            except BaseException:
                self.replica.streams.pop(self, None)
                raise

    async def _accept(self) -> int:
        """Wait until the replica accepts the request. Raises EngineDead if the replica stops answering polls."""
        unreachable = asyncio.create_task(self.replica.until_unreachable())
        starting = asyncio.create_task(self._inner.started())
        try:
            await asyncio.wait({starting, unreachable}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                self._inner.cancel()
                raise EngineDead(self.replica.trouble or "it was down")
            number = starting.result()
            self._accepted = True
            return number
        finally:
            unreachable.cancel()
            starting.cancel()

    async def _iterate(self) -> AsyncIterator[Delta]:
        begun = False
        try:
            while not self.finish_reason:
                try:
                    async for delta in self._inner:
                        begun = begun or bool(delta.text or delta.ids)
                        if delta.finish_reason:
                            self.finish_reason = delta.finish_reason
                            delta.metrics = {**(delta.metrics or {}), "replica": self._describe_replica()}
                        yield delta
                except (EngineDead, Overloaded) as error:
                    if begun:
                        if isinstance(error, EngineDead):
                            self.replica.report_failure(str(error))
                        lost = f"{self.replica.title} was lost during this answer ({error})"
                        raise EngineDead(f"{lost}. /retry asks another replica.") from error
                    self._move_on(error)
                    await self.started()
        finally:
            self.replica.streams.pop(self, None)

    def _describe_replica(self) -> dict[str, Any]:
        """Returns the answering replica, for the metrics; `passed`: the numbers of the replicas that did not answer."""
        answered = self.replica
        passed = [replica.number for replica in self._source.replicas if replica.url in self._tried]
        return {"number": answered.number, "name": answered.name, "url": answered.url, "passed": passed}

    def cancel(self) -> None:
        self._cancelled = True
        self._inner.cancel()
