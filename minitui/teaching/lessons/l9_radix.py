"""L9: the tree of cached prefixes."""

from __future__ import annotations

from engine.trace.views import SHARED
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.lessons.side_by_side import side_by_side
from minitui.teaching.lessons.tree_walk import LONG, SAME, touch_and_evict, walk
from minitui.teaching.scenarios import QUESTIONS
from minitui.teaching.stage import Stage
from minitui.text import match_reasons

BUDGET = 1024  # tokens: more than the six prompts of `shared_system_prompt` have
BLOCKS = 56  # of the pool: enough for these six requests, even if they share nothing


async def shared_system_prompt(stage: Stage) -> Seen:
    """Sends six prompts with one system prompt at once."""
    sessions = await stage.write_all(QUESTIONS, [8] * len(QUESTIONS))
    await stage.step(2, seconds=1.0)
    await stage.answers(sessions)
    await stage.gate()
    figures = stage.figures()
    counts = {"all prompts": figures.prompt_tokens, "computed": figures.computed, "shared": figures.cached}
    rows = [(name, float(n), f"{n:,} tokens") for name, n in counts.items()]
    return Seen(
        "All six arrived at the same moment, and none was cached. The system prompt was computed only once:\n\n"
        f"{stage.bars(rows)}\n\nWhen the engine planned the first prompt, it added the prompt's blocks to the tree and "
        "marked them as pending. So the other requests of the same step found them. Blocks of a reply are added when "
        "their step is committed: only then does the engine know their tokens.",
        2 if figures.share_cached > 0.5 else 0,
    )


async def close(stage: Stage) -> None:
    """Starts three chats with one system prompt and stops the engine."""
    for question in QUESTIONS[:3]:
        await stage.write(question, 30, 2)


def _trunk(stage: Stage) -> str:
    state = stage.state()
    trunk = max((n for n in state.nodes.values() if n.id), key=lambda n: n.users)
    return f"{len(trunk.blocks)} blocks, {len(trunk.ids)} tokens, held by {trunk.users} requests"


def _hit(stage: Stage) -> str:
    lane = stage.view.lanes.lanes[max(stage.view.lanes.lanes)]
    return f"{lane.cached_tokens} of {lane.prompt_tokens}"


LESSON = Lesson(
    9,
    "Radix cache",
    "How does a prompt find what earlier prompts have computed?",
    (
        Page(
            "What can be shared",
            """
            The keys and values of a token depend on the token itself and on all tokens before it, and on nothing after
            it. So two prompts with the same beginning have, for that beginning, the same keys and values, apart from
            rounding. Computing them once is enough.

            Two prompts that begin differently cannot share a passage in the middle, even if it is the same word for
            word: its keys and values depend on the text before it.

            Sharing saves prefill: the first token comes sooner, and the device has more time for other requests.
            Sharing saves memory: requests that run at the same time hold a common beginning only once. A decode step
            of one request is not faster. The reply is the same as without the cache, apart from rounding (see L5
            Sampler).
            """,
        ),
        Page(
            "A tree of blocks",
            """
            The engine keeps a tree of the prefixes in the pool. A node is a sequence of whole blocks with their token
            ids. Its children are found by the ids of their first block. The lookup of a prompt walks down the tree,
            with one dictionary access for each node. If a prompt matches only the first blocks of a node, the node is
            split after these blocks. The common part becomes the parent of the rest. A node with a single child becomes
            one node with it when the same requests use both.

            Only whole blocks are shared, and a shared block is never written again. The block that a request is
            filling belongs to it alone. The last token of a prompt is never taken from the tree, because its logits
            are needed: even a prompt that is completely cached computes at least one token.

            The tree is SGLang's idea (RadixAttention). There, a block may also have one token; then a match can end at
            any token. vLLM finds each block by a hash of its tokens and of the hash of the block before.
            """,
            code="engine.core.radix:RadixTree.match",
        ),
        Page(
            "The same beginning, another question",
            f"""
            Two chats have the same system prompt, and their questions begin alike, too. The first chat's prompt has
            been computed and is in the tree. The second prompt has {LONG} tokens, and its first {SAME} are those of the
            first prompt. A block has 16 tokens. The picture follows the lookup of the second prompt, block by block.
            """,
            panel="blocks",
            code="engine.core.radix:RadixTree.match",
            run=walk,
            predict=Prediction(
                "How many tokens of the second prompt are computed?",
                (f"{LONG}", f"{LONG - SAME}", f"{LONG - SAME // 16 * 16}", "1"),
                (
                    "the engine would look up prompts as a whole. But it compares them block by block.",
                    "part of a block could be shared. But a block is shared whole or not at all: its last keys belong "
                    "to other tokens here, so the second chat would need a copy of the block.",
                    "",
                    "the two prompts would have to be the same.",
                ),
            ),
        ),
        Page(
            "All at the same time",
            f"""
            Six chats with one system prompt arrive together, in an empty engine. All six prompts fit into one step,
            even if each is computed whole: the budget is {BUDGET:,} tokens, and the pool has enough blocks. When this
            step is planned, no prompt has been computed.

            Two things decide: what the engine knows when it plans (L1 Architecture), and in which order a layer stores
            keys and reads them (L4 Paged attention).
            """,
            panel="tree",
            code="engine.core.cache:KVCache.publish_planned",
            run=shared_system_prompt,
            predict=Prediction(
                "How often is the system prompt computed here?",
                ("six times: it is not cached yet", "twice: the others wait for the next step", "once"),
                (
                    "a block could be shared only after its step has ended. But it can be shared as soon as its "
                    "tokens are known.",
                    "blocks could be used only in a later step. But attention reads after all keys of the step are "
                    "stored, so no request has to wait.",
                    "",
                ),
            ),
        ),
        Page(
            "Without and with the cache",
            """
            The same six chats in two engines: one without the prefix cache, one with it. The panel shows both runs on
            one clock, the first above the second. Compare the length of the prefill at the beginning.
            """,
            panel="runs",
            run=side_by_side("cache"),
        ),
        Page(
            "What is evicted, and when",
            """
            When a request ends, its blocks stay in the tree until room is needed. Then leaves (nodes without children)
            that no request holds are evicted, the least recently used first. Only as many blocks of a leaf are evicted
            as are needed. A block that a request holds is never evicted.

            Chats A and B have different prompts. They are used in the order A, B, A. Then C comes with a long text. It
            needs all free blocks, all of B's blocks, and a few more.
            """,
            panel="blocks",
            code="engine.core.radix:RadixTree.evict",
            run=touch_and_evict,
            predict=Prediction(
                "Which blocks are evicted besides those of B?",
                ("A's first blocks", "A's last blocks", "none: C has to wait"),
                (
                    "the other blocks of A would be of no use: a lookup begins at the first token, and it would find "
                    "nothing.",
                    "",
                    "a request would have to hold A's blocks. But A's reply has ended, so its blocks are only cached.",
                ),
            ),
        ),
        Page(
            "Why a hit ends",
            f"""\
The line under every answer says how much of the prompt came from the cache, and why the rest did not:

{match_reasons()}

To use the cache well, begin a prompt with the text that never changes, and end it with the text that changes. If one
token at the beginning of a system prompt changes, nothing after it comes from the cache. Such a token is often part of
a date or a name.
""",
            panel="events",
        ),
    ),
    close,
    (
        Check(
            "How long is the prefix that all three chats share, and how many requests hold it?",
            "tree",
            "the radix tree: the node at the top of the branch, its tokens and users.",
            _trunk,
        ),
        Check(
            "How many blocks are shared?",
            "occupancy",
            "the line of the KV pool: two or more requests hold a shared block.",
            lambda stage: f"{stage.state().counts[SHARED]}",
        ),
        Check(
            "How many prompt tokens did the third chat take from the tree?",
            "events",
            "the events: the last hit, with its tokens and the reason why it ended.",
            _hit,
        ),
    ),
    {"kv_blocks": BLOCKS, "max_num_batched_tokens": BUDGET},
)
