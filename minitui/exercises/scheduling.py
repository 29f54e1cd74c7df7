"""The rules of the exercises about the scheduler: `admit`, `evict`, `chunk`, `preempt`. Each function puts a student's
function in the place of one decision of the scheduler, and checks what it returns before the engine sees it. The
functions `…_end` check the whole run against that of the reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from engine.core.node import Node as TreeNode
from engine.core.policy import QueueOrder
from engine.core.request import Request, RequestState
from engine.trace.eviction import STUDENT
from minitui.exercises.student import Broken, Student, shown, whole
from minitui.exercises.trial import Trial
from minitui.exercises.views import Node, Running, Waiting
from minitui.text import count, duration

MOST_OVERTAKEN = 24  # later requests that may be admitted before one
LONGER = 1.5  # the time of the run, and the first tokens (p99), may be as many times the reference's
MORE_COMPUTED = 1.1  # prompt tokens computed, as a multiple of the reference's: more are a fault


def _not_one(value: Any, kind: str, place: str, now: Sequence[Any], given: set[Any]) -> str:
    """Returns words for a value that is none of `now`, the nodes or requests in `place`. `given`: all that there were
    so far."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "id"):
        return f"a {type(value).__name__}: return one {kind}"
    if type(value) is type(now[0]) and value in given:
        here = any(one.id == value.id for one in now)
        was = "as it was before, not as it is now" if here else "which is no longer"
        return f"{'r' if kind == 'request' else 'node '}{value.id}, {was} {place}"
    return f"{shown(value)}, which is none of the {kind}s {place}" + (
        f": return the {kind}, not its id" if whole(value) is not None else "")


class StudentOrder(QueueOrder):
    """Exercise `admit`: the queue in a student's order."""

    def __init__(self, trial: Trial, student: Student) -> None:
        super().__init__(trial.engine.cache, trial.log)
        self._trial, self._student = trial, student
        self._came: dict[int, int] = {}  # request -> the last step planned when it was seen first

    def order(self, head: list[Request]) -> list[Request]:
        """Returns the whole queue as the student orders it; preempted requests stay first."""
        for request in head:
            self._came.setdefault(request.id, self._trial.step)
        queue = [request for request in head if request.state is not RequestState.PREEMPTED]
        views = [self._view(request) for request in queue]
        order = self._checked(views, self._student(list(views))) if views else []
        by_id = {request.id: request for request in queue}
        preempted = [request for request in head if request.state is RequestState.PREEMPTED]
        return [*preempted, *(by_id[view.id] for view in order)]

    def _view(self, request: Request) -> Waiting:
        match = self._trial.engine.cache.look_up(request)
        cached = len(match.blocks) * self._trial.setting.block_size if match is not None else 0
        waited = self._trial.step - self._came[request.id]
        return Waiting(request.id, request.prompt_len, cached, waited, request.overtaken)

    def _checked(self, views: list[Waiting], order: object) -> list[Waiting]:
        student = self._student
        if isinstance(order, Waiting) or not isinstance(order, (list, tuple)):
            raise student.broken(f"`admit` returned {shown(order)}, which is no list of requests")
        seen: set[int] = set()
        for one in order:
            if one not in views:
                raise student.broken(
                    f"`admit` returned a list with {shown(one)}, which is no request of the queue"
                    + (": return the requests, not their ids" if whole(one) is not None else "")
                )
            if one.id in seen:
                raise student.broken(f"r{one.id} is twice in the list that `admit` returned")
            seen.add(one.id)
        lost = [view.id for view in views if view.id not in seen]
        if lost:
            raise student.broken(f"r{lost[0]} waits, and is not in the list that `admit` returned: it would be lost")
        return list(order)

    def count_overtaken(self, waiting: deque[Request], admitted: list[Request]) -> None:
        """Count the later requests that were admitted before each one that waits. Raises Broken if one starves."""
        for request in waiting:
            now = sum(1 for other in admitted if other.id > request.id)
            request.overtaken += now
            if request.overtaken > MOST_OVERTAKEN:
                raise self._student.broken(
                    f"r{request.id} starves: {request.overtaken} requests that came later were admitted before it "
                    f"({now} in this step)"
                )


def admit(trial: Trial, student: Student) -> None:
    """Let the student order the queue."""
    trial.engine.scheduler.order = StudentOrder(trial, student)


def evict(trial: Trial, student: Student) -> None:
    """Let the student choose what is evicted."""
    tree, given = trial.engine.cache.tree, set[Node]()

    def next_leaf() -> TreeNode:
        nodes = [
            Node(
                node.id, node.parent.id, tuple(child.id for child in node.children.values()), trial.users_of(node.id),
                node.last_used, tuple(node.blocks),
            )
            for node in tree.nodes.values() if node.parent is not None
        ]
        given.update(nodes)
        chosen = student(list(nodes))
        if chosen not in nodes:
            raise student.broken(f"`evict` returned {_not_one(chosen, 'node', 'in the tree', nodes, given)}")
        if chosen.users:
            more = f", and node {chosen.children[0]} continues its text" if chosen.children else ""
            raise student.broken(
                f"`evict` returned node {chosen.id}, but r{chosen.users[0]} uses it (block {chosen.blocks[-1]}){more}"
            )
        if chosen.children:
            raise student.broken(
                f"`evict` returned node {chosen.id}, but node {chosen.children[0]} continues its text: without its "
                "beginning, nothing finds that text again"
            )
        return tree.nodes[chosen.id]

    tree.next_leaf = next_leaf
    trial.engine.cache.eviction_policy = STUDENT


def evict_end(trial: Trial, reference: Trial) -> None:
    """Raise Broken if much more had to be computed than with the reference."""
    ours, theirs = trial.figures.computed, reference.figures.computed
    if ours <= MORE_COMPUTED * theirs:
        return
    missed = next((r for r in trial.requests if r.match[0] == "evicted"), None)
    where = f": the first in step {missed.match[1]:,}, and r{missed.id} asked for it again" if missed else ""
    raise Broken(
        f"{ours:,} prompt tokens were computed, {theirs:,} with the reference: at most {MORE_COMPUTED:g} times as many "
        f"are allowed. Texts were evicted that were needed soon{where}", missed.match[1] if missed else None,
    )


def chunk(trial: Trial, student: Student) -> None:
    """Let the student choose the lengths of chunks."""

    def length(request: Request, left: int, budget: int) -> int:
        replies = sum(1 for other in trial.engine.scheduler.running if other.decoding)
        chosen = student(left, budget, replies)
        who, n = f"`chunk` returned {shown(chosen)} for r{request.id}", whole(chosen)
        if n is None:
            raise student.broken(f"{who}, which is no int: return a whole number of tokens")
        if n < 1:
            raise student.broken(f"{who}: without a token of its prompt it never comes to its reply")
        if n > left:
            raise student.broken(f"{who}, whose prompt has only {count(left, 'token')} left")
        if n > budget:
            raise student.broken(f"{who}, but only {count(budget, 'token')} of the step's budget were left")
        return n

    trial.engine.scheduler.chunk = length


def chunk_end(trial: Trial, reference: Trial) -> None:
    """Raise Broken if the prompts take much longer than with the reference."""
    for what, quantity in (("the run takes", "time"), ("the 99th percentile of first tokens is", "first_p99")):
        ours, theirs = (getattr(run.figures, quantity) or 0.0 for run in (trial, reference))
        if ours > LONGER * theirs:
            raise Broken(
                f"the chunks are too short: {what} {duration(ours)}, with the reference {duration(theirs)}; more than "
                f"{LONGER:g} times as much is too long"
            )


def preempt(trial: Trial, student: Student) -> None:
    """Let the student choose who is preempted."""
    scheduler, given = trial.engine.scheduler, set[Running]()

    def victim(running: Sequence[Request], request: Request) -> Request:
        views = [Running(r.id, r.prompt_len, len(r.ids) - r.prompt_len, len(r.table), r.preemptions) for r in running]
        given.update(views)
        chosen = student(list(views), request.id)
        if chosen is None:
            raise student.broken(
                f"`preempt` returned None: r{request.id} needs a block, all {trial.setting.blocks} are in use, and no "
                "request can go on"
            )
        if chosen not in views:
            raise student.broken(f"`preempt` returned {_not_one(chosen, 'request', 'in the batch', views, given)}")
        first = min(view.id for view in views)
        if chosen.id == first and len(views) > 1:
            raise student.broken(
                f"r{first} was preempted, but it came before all others that run (the lowest id): if not even the "
                "first can reach its end, perhaps no request does"
            )
        return next(r for r in running if r.id == chosen.id)

    scheduler.victim = victim
