"""Mutations of the engine, and the tests that must fail with each of them.

    python -m tests.mutations              all of them
    python -m tests.mutations radix mask   those whose name contains one of the words
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT


@dataclass(frozen=True)
class Mutation:
    """A change of one file: `before`, which occurs once, becomes `after`."""

    name: str
    about: str
    file: str
    red: str  # the arguments of pytest for the tests that must fail
    before: str
    after: str

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        found = text.count(self.before)
        assert found == 1, f"{self.file} has {self.before!r} {found} times, not once: write {self.name} anew"
        path.write_text(text.replace(self.before, self.after), encoding="utf-8")

    def survives(self) -> bool:
        """Returns True if every test passes in spite of the mutation."""
        with tempfile.TemporaryDirectory() as name:
            for folder in ("engine", "minitui", "tests"):  # with what was compiled already
                shutil.copytree(ROOT / folder, Path(name, folder))
            shutil.copy(ROOT / "pyproject.toml", name)
            self.apply(Path(name))
            # Only the plugins that the tests use: the others take longer to load than most of these tests to run.
            plugins = ["-o", "addopts=", "-ppytest_asyncio.plugin", "-ppytest_timeout", "-pno:cacheprovider"]
            run = subprocess.run(
                [sys.executable, "-m", "pytest", "-x", "-q", *plugins, *shlex.split(self.red)], cwd=name,
                env={
                    **{key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"},
                    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": name, "PYTHONDONTWRITEBYTECODE": "1",
                },
                capture_output=True, text=True,
            )
        if run.returncode not in (0, 1):
            raise RuntimeError(f"{self.name}: pytest could not run:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
        return run.returncode == 0


MUTATIONS = (
    Mutation(
        "allocator-frees-what-the-tree-holds", "A cached block is handed out while the tree still refers to it.",
        "engine/core/allocator.py", "tests/engine/core/test_kv.py",
        (
            "if in_tree[block]:\n"
            "                    cached += 1\n"
            "                else:\n"
            "                    free.append(block)"
        ),
        "free.append(block)",
    ),
    Mutation(
        "allocator-hands-out-what-it-has", "Fewer blocks than asked for are returned.",
        "engine/core/allocator.py", 'tests/engine/core/test_kv.py -k "all_or_nothing"',
        "if n > len(self._free):", "if not self._free:",
    ),
    Mutation(
        "cache-keeps-its-copy-of-a-known-block", "The duplicate of a block that the tree knows is never freed.",
        "engine/core/cache.py", 'tests/engine/core/test_scheduler_simulation.py -k "fully_cached"',
        "self.allocator.release(dropped)", "pass",
    ),
    Mutation(
        "records-forget-who-left-the-decoding-set", "A request that skips a step seems to decode in it.",
        "engine/core/plan_writer.py", 'tests/engine/core/test_scheduler_simulation.py -k "sits_a_step_out"',
        "self._log.append(\"step\", step, prefills, joined, left, len(token_ids), num_waiting)",
        "self._log.append(\"step\", step, prefills, joined, [], len(token_ids), num_waiting)",
    ),
    Mutation(
        "scheduler-admits-what-does-not-fit", "A prompt is admitted although its blocks are not to be had.",
        "engine/core/scheduler.py", 'tests/engine/core/test_scheduler_simulation.py -k "instead_of_thrashing"',
        "if needed > self.cache.available:", "if False:",
    ),
    Mutation(
        "scheduler-does-not-chunk", "A long prompt takes more than the budget of a step.",
        "engine/core/policy.py", 'tests/engine/core/test_scheduler_simulation.py -k "chunked"',
        "True: lambda request, left, budget: min(left, budget)", "True: lambda request, left, budget: left",
    ),
    Mutation(
        "scheduler-does-not-skip-void-entries", "Tokens of a request that has finished are still committed.",
        "engine/core/scheduler.py",
        'tests/engine/core/test_scheduler_simulation.py -k "any_schedule"',
        (
            "request.finish_reason = reason\n"
            "        request.epoch += 1  # its work in flight is void"
        ),
        "request.finish_reason = reason",
    ),
    Mutation(
        "scheduler-ignores-the-epoch", "Work that became void through a failed step is committed.",
        "engine/core/scheduler.py", 'tests/engine/core/test_scheduler_simulation.py -k "shares_blocks"',
        ("self._leave(request)\n" "        request.epoch += 1  # its work in flight is void"), "self._leave(request)",
    ),
    Mutation(
        "scheduler-lets-a-reply-outgrow-the-pool", "The limit of prompt and reply is one token too high.",
        "engine/core/scheduler.py", 'tests/engine/core/test_scheduler_simulation.py -k "outgrows"',
        "limit = min(self.config.max_model_len, total * size + 1)",
        "limit = min(self.config.max_model_len, total * size + 2)",
    ),
    Mutation(
        "scheduler-preempts-the-eldest", "The eldest request loses its blocks instead of the youngest.",
        "engine/core/policy.py", 'tests/engine/core/test_scheduler_simulation.py -k "full_pool"',
        "return running[-1]", "return running[0]",
    ),
    Mutation(
        "scheduler-publishes-prompts-only-at-commit", "Requests in one step do not see each other's prefix.",
        "engine/core/scheduler.py", 'tests/engine/core/test_scheduler_simulation.py -k "prefill_it_once"',
        "self.cache.publish_planned(request, self.step)  # now,", "pass  #",
    ),
    Mutation(
        "scheduler-publishes-the-last-sampled-token", "A slot whose KV was never written is published.",
        "engine/core/cache.py", 'tests/engine/core/test_scheduler_simulation.py -k "last_sampled or any_schedule"',
        "end = min(written, len(request.ids)) // self.block_size", "end = len(request.ids) // self.block_size",
    ),
    Mutation(
        "scheduler-resumes-before-its-step-has-committed",
        "A preempted request is readmitted while a step of its last residence is in flight.",
        "engine/core/scheduler.py", 'tests/engine/core/test_scheduler_simulation.py -k "any_schedule or failing_step"',
        "if request.last_step > self._committed:", "if False:",
    ),
    Mutation(
        "scheduler-strands-followers-of-a-failed-step", "Those who share blocks of a failed step are not requeued.",
        "engine/core/commit.py", 'tests/engine/core/test_scheduler_simulation.py -k "shares_blocks"',
        "for request in [r for r in reversed(running) if not blocks.isdisjoint(r.table)]:",
        "for request in [r for r in reversed(running) if False]:",
    ),
    Mutation(
        "speculation-accepts-one-draft-too-many",
        "The first draft that is not the target's draw is accepted, and what was drawn behind it.",
        "engine/core/commit.py", "tests/engine/core/test_speculation.py -k change_no_token",
        "accepted = next(wrong, len(draft))", "accepted = min(next(wrong, len(draft)) + 1, len(draft))",
    ),
    Mutation(
        "speculation-publishes-rejected-drafts",
        "What a step computed counts as written, drafts that were rejected included.",
        "engine/core/commit.py", 'tests/engine/core/test_speculation.py -k "rejected_drafts or stop_token"',
        "end = len(request.ids)", "pass",
    ),
    Mutation(
        "tree-evicts-what-is-held", "A leaf that requests hold is evicted.",
        "engine/core/node.py", 'tests/engine/core/test_scheduler_simulation.py -k "any_schedule"',
        "return self.users == 0 and not self.children and self.parent is not None",
        "return not self.children and self.parent is not None",
    ),
    Mutation(
        "tree-forgets-what-was-used-last", "Eviction goes by the time of insertion.",
        "engine/core/radix.py", 'tests/engine/core/test_kv.py -k "in_use_last"',
        ("each.users -= 1\n" "            each.last_used = clock"), "each.users -= 1",
    ),
    Mutation(
        "tree-keys-children-by-their-first-token", "Prompts that share a first token are taken for the same.",
        "engine/core/radix.py", 'tests/engine/core/test_scheduler_simulation.py -k "any_schedule"',
        "child = node.children.get(key)",
        "child = next((c for k, c in node.children.items() if k[0] == key[0]), None)",
    ),
    Mutation(
        "tree-match-covers-the-last-token", "A fully cached prompt leaves no token whose logits could be computed.",
        "engine/core/cache.py", 'tests/engine/core/test_scheduler_simulation.py -k "fully_cached"',
        "limit = (len(request.ids) - 1) // self.block_size", "limit = len(request.ids) // self.block_size",
    ),
    Mutation(
        "tree-merges-nodes-of-different-ages", "A node is merged with a child that was used last at another time.",
        "engine/core/node.py", 'tests/engine/core/test_scheduler_simulation.py -k "merging_nodes or leaves_one_node"',
        "same = self.users == child.users and (self.users or self.last_used == child.last_used)",
        "same = self.users == child.users",
    ),
    Mutation(
        "tree-split-loses-users", "The upper half of a split node is thought unused.",
        "engine/core/radix.py", "tests/engine/core/test_kv.py -k TreeAgainst",
        "upper = Node(self._next_id, parent, node.keys[:n], node.blocks[:n], node.users, node.last_used)",
        "upper = Node(self._next_id, parent, node.keys[:n], node.blocks[:n], 0, node.last_used)",
    ),
    Mutation(
        "tree-withdraws-only-the-failed-blocks", "What was built on a failed step stays in the tree.",
        "engine/core/radix.py", 'tests/engine/core/test_kv.py -k "failed_step"',
        "valid = 0 if below else next(pending, None)", "valid = next(pending, None)",
    ),
)


def main(words: list[str]) -> int:
    chosen = [each for each in MUTATIONS if not words or any(word in each.name for word in words)]
    survivors = 0
    for each in chosen:
        started = time.perf_counter()
        alive = each.survives()
        survivors += alive
        print(f"{'SURVIVED' if alive else 'caught':8} {each.name} ({time.perf_counter() - started:.1f} s)", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutations turn a test red")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
