"""L9: the tree of cached prefixes."""

from __future__ import annotations

from engine.trace.views import SHARED
from minitui.teaching.hybrid import FOUND, PROMPT
from minitui.teaching.hybrid import SAME as ALIKE
from minitui.teaching.lessons.kinds_of_memory import PAGE, kinds_of_memory
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.lessons.side_by_side import side_by_side
from minitui.teaching.lessons.tree_walk import CACHED_A, CACHED_B, LONG, NEEDED, ROOM, SAME, touch_and_evict, walk
from minitui.teaching.scenarios import QUESTIONS
from minitui.teaching.stage import Stage
from minitui.text import match_reasons

PROMPTS, SYSTEM = 752, 112  # tokens: of the six prompts of `shared_system_prompt`, and of their common full blocks
BUDGET = 1024  # tokens: more than PROMPTS
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
        "The common beginning was computed once, for all six:\n\n"
        f"{stage.bars(rows)}\n\nWhen the scheduler planned the first prompt, it added the prompt's full blocks to the "
        "tree. So the other five found them in the same step. vLLM can share within a step, too. In SGLang, only later "
        "steps find a prompt's new blocks.",
        {PROMPTS: 0, PROMPTS - SYSTEM: 1, PROMPTS - 5 * SYSTEM: 2, PROMPTS - 6 * SYSTEM: 3}.get(figures.computed),
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
    lane = stage.view.history.lanes.lanes[max(stage.view.history.lanes.lanes)]
    return f"{lane.cached_tokens} of {lane.prompt_tokens}"


LESSON = Lesson(
    9,
    "Radix cache",
    "How does a prompt find what earlier prompts have computed?",
    (
        Page(
            "What can be shared",
            """
            In the models of this engine, the keys and values of a token can depend on this token, its position and all
            tokens before. They do not depend on later tokens. So two prompts with the same beginning have the same keys
            and values for this beginning, apart from rounding. Computing them once is enough.

            Two prompts may begin differently and have the same passage later. The passage's keys and values depend on
            the text before it. So sharing them can change the result.

            Sharing saves prefill: the device computes fewer tokens, so the first token usually comes sooner. Sharing
            saves memory: several requests can hold one copy of a common beginning. Sharing alone does not change the
            work of a decode step: each request still reads the same keys and values. A special kernel can read a shared
            beginning once for several requests (cascade attention). The probabilities of the next
            token are the same as without the cache, apart from rounding (L5 Sampler).
            """,
        ),
        Page(
            "A tree of blocks",
            """
            This engine keeps a tree of the prefixes in the pool. A node is a sequence of full blocks with their token
            ids. The tree begins with an empty node, the root. To look up a prompt, the engine walks down from the root.
            At each node, it looks for the child that begins with the prompt's next block. If only the first blocks of a
            node are equal, the node is split: the equal blocks become the parent, the others its child.

            Only full blocks are shared. The tokens of a block in the tree do not change. A block that is not full
            belongs to one request. The last token of a prompt is always computed, even if its keys and values are
            cached: the first token of the reply is drawn from its logits, and logits are not stored.

            The tree is SGLang's idea (RadixAttention). There, a block often has one token. vLLM has no tree. It finds
            a full block by its hash: a number computed from the hash of the block before, this block's token ids, and
            inputs such as images. So equal beginnings have equal hashes.
            """,
            code="engine.core.radix:RadixTree.match",
        ),
        Page(
            "The same beginning, another question",
            f"""
            Two chats have the same system prompt, and their questions begin alike, too. The prompt of the first chat is
            in the tree. The prompt of the second chat has {LONG} tokens, and its first {SAME} tokens are those of the
            first prompt. A block has 16 tokens. The picture shows the lookup of the second prompt, block by block.
            """,
            panel="blocks",
            code="engine.core.radix:RadixTree.match",
            run=walk,
            predict=Prediction(
                "How many tokens of the second prompt are computed?",
                (f"{LONG}", f"{LONG - SAME}", f"{LONG - SAME // 16 * 16}", "1"),
                (
                    "only equal prompts would be found. But the engine compares prompts block by block.",
                    "the second chat would use a part of a block. But the rest of this block has keys of the first "
                    "chat's tokens, and only full blocks are shared.",
                    "",
                    "the prompts would differ only in the last token, and a match could end at any token. But only "
                    f"full blocks are shared: even of two equal prompts of {LONG} tokens, "
                    f"{LONG - (LONG - 1) // 16 * 16} are computed.",
                ),
            ),
        ),
        Page(
            "All at the same time",
            f"""
            Six prompts arrive together, and the cache is empty. They have {PROMPTS} tokens in all, and the same first
            {SYSTEM} tokens. One step computes all six.

            The scheduler plans one prompt after the other. In the panel, “users” counts requests that hold a node: at
            the end, none. “evict #” is the order of eviction.
            """,
            panel="tree",
            code="engine.core.cache:KVCache.publish_planned",
            run=shared_system_prompt,
            predict=Prediction(
                "How many tokens does this step compute?",
                tuple(f"{PROMPTS - n * SYSTEM}" for n in (0, 1, 5, 6)),
                (
                    "a block could be shared only after its step. But each layer stores all keys and values before "
                    "attention reads them. So requests can share a block in the step that computes it.",
                    "only one of the six would take the common beginning from another prompt. But five can take it.",
                    "",
                    "none of the six would compute the common beginning. But the cache was empty.",
                ),
            ),
        ),
        Page(
            "Without and with the cache",
            """
            The same six chats run in two engines: first without the prefix cache, then with the cache. The panel shows
            both runs, the first above or on the left, as if both had begun at the same time. Compare the length of the
            prefill at the beginning.
            """,
            panel="runs",
            run=side_by_side("cache"),
        ),
        Page(
            "What is evicted, and when",
            f"""
            When a reply is complete, its full blocks stay in the tree until room is needed. A block that a request
            holds is never evicted.

            Chats A and B have different prompts. They are used in the order A, B, A. Then {CACHED_A} blocks of A and
            {CACHED_B} of B are cached, and {ROOM} blocks are free. Now chat C comes with a long text. C needs
            {NEEDED} blocks.
            """,
            panel="blocks",
            code="engine.core.radix:RadixTree.evict",
            run=touch_and_evict,
            predict=Prediction(
                "Which blocks are evicted?",
                (
                    "all of A's", "B's, then the first of A's", "B's, then the last of A's", "none: C waits",
                ),
                (
                    "the chat that came first would lose its blocks first. But A was used after B, and the engine "
                    "evicts first what has not been used for the longest time.",
                    "a lookup would not need A's first block. But it begins there: without it, A's other blocks could "
                    "not be found.",
                    "",
                    "A and B would still hold their blocks. But their replies have ended, so the blocks are only "
                    "cached.",
                ),
            ),
        ),
        Page(
            "Three kinds of memory",
            f"""
            Full attention keeps keys and values of all tokens. A layer with a window drops those of old tokens. A layer
            with a recurrent state keeps one state, which each token changes, and a state cannot be taken back. So the
            engine keeps copies of it, checkpoints: here after {PAGE} tokens, and at the end of a prompt. A hit is the
            longest beginning that every kind of memory can serve.

            Three of four layers of this model have a state. Its weights are random. Three chats have prompts of
            {PROMPT} tokens, and the first {ALIKE} are the same.
            """,
            panel="tree",
            code="engine.core.cache:KVCache._cut",
            run=kinds_of_memory,
            predict=Prediction(
                "How many tokens does the second chat take from the cache?",
                (f"{FOUND}", f"{PAGE}", "0", f"{ALIKE}"),
                (
                    "full attention alone would decide. It has these blocks, but no state after them was kept.",
                    "",
                    f"there would be no checkpoint in the shared text. But there is one after {PAGE} tokens.",
                    "a part of a block could be used. But only full blocks are shared, and a state is kept only at the "
                    "end of a block.",
                ),
            ),
        ),
        Page(
            "Why a hit ends",
            f"""\
In Chat, the line under a reply says how much of the prompt came from the cache, and why the rest did not. Tokens are
counted from 0. In “token n”, n is the first token that was not found:

{match_reasons()}

Only full blocks come from the cache. With blocks of 16 tokens, “differs at token 141” means that 8 blocks were taken:
tokens 0 to 127.

To use the cache well, begin a prompt with the text that never changes. Put the text that changes at the end. If a
date at the beginning of a system prompt changes, new prompts share nothing after the date with old prompts.
""",
            panel="events",
        ),
    ),
    close,
    (
        Check(
            "How long is the prefix that all three chats share, and how many requests hold it?",
            "tree",
            "the radix tree: the node above the others, its tokens and users (requests that hold it).",
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
