"""Faults that students make: the body of a function for each, and a part of the sentence that tells it. And solutions
that keep all rules."""

PLANTED: dict[str, dict[str, tuple[str, str]]] = {
    "admit": {
        "starves": ("return sorted(waiting, key=lambda r: r.prompt)",
                    r"r\d+ starves: 25 requests that came later were .* before it \(\d+ in this step\)$"),
        "loses": ("return waiting[:5]", r"^at step \d+, r\d+ waits, and is not in the list .* lost$"),
        "doubles": ("return [*waiting, waiting[0]]", r"r1 is twice in the list"),
        "one": ("return waiting[0]", r"returned Waiting\(id=1,.*, which is no list of requests"),
        "ids": ("return [r.id for r in waiting]", r"a list with 1, which is no request .*: return the requests, not"),
        "changed": ("waiting[0].prompt = 1", r"AttributeError in line 5: `prompt` of a Waiting cannot be changed"),
        "key": ("return sorted(waiting, key=lambda r: r['prompt'])",
                r"TypeError in line 5: write `request\.prompt`, not request\['prompt'\]$"),
    },
    "evict": {
        "oldest": ("return min(nodes, key=lambda n: n.last_used)",
                   r"^at step \d+, `evict` returned node \d+, but r\d+ uses it \(block \d+\), and node"),
        "in use": ("return min((n for n in nodes if not n.children), key=lambda n: n.last_used)",
                   r"^at step \d+, `evict` returned node \d+, but r\d+ uses it \(block \d+\)$"),
        "middle": ("return min((n for n in nodes if not n.users), key=lambda n: -len(n.children))",
                   r"`evict` returned node \d+, but node \d+ continues its text: without"),
        "most recent": ("return max((n for n in nodes if not n.users and not n.children), key=lambda n: n.last_used)",
                        r"^[\d,]+ prompt tokens .* at most 1\.1 times .* allowed\. Texts .*: the first in step \d+"),
        "id": ("return nodes[0].id", r"returned \d+, which is none of the nodes in the tree: return the node, not"),
        "gone": ("free = [n for n in nodes if not n.users and not n.children]\n"
                 "    kept.append(min(free, key=lambda n: n.last_used))\n"
                 "    return kept[-1] if kept[0].id in [n.id for n in nodes] else kept[0]",
                 r"`evict` returned node \d+, which is no longer in the tree$"),
        "list": ("return nodes", r"`evict` returned a list: return one node$"),
        "nothing": ("for n in nodes:\n        if n.users and not n.users:\n            return n",
                    r"`evict` returned None, which is none of the nodes"),
    },
    "chunk": {
        "budget": ("return left", r"but only \d+ tokens of the step's budget were left"),
        "zero": ("return min(left, budget) if replies < 8 else 0", r"returned 0 for r\d+: without a token"),
        "left": ("return min(64, budget)", r"returned 64 for r\d+, whose prompt has only \d+ tokens? left"),
        "float": ("return min(left, budget / 2)", r"returned \d+\.\d for r\d+, which is no int"),
        "flag": ("return True", r"returned True for r\d+, which is no int"),
        "tiny": ("return 1", r"the chunks are too short: .*; more than 1.5 times as much is too long"),
    },
    "preempt": {
        "oldest": ("return running[0]", r"r\d+ was preempted, but it came before all others .* \(the lowest id\)"),
        "never": ("pass", r"`preempt` returned None: r\d+ needs a block, all 44 are in use"),
        "stale": ("kept.extend(running)\n    return kept[-1] if len(kept) == len(running) else kept[1]",
                  r"returned r\d+, as it was before, not as it is now in the batch$"),
        "invented": ("return running[-1]._replace(id=99)",
                     r"returned Running\(id=99.*, which is none of the requests in the batch$"),
        "raises": ("return [r for r in running if r.blocks > 1000][0]",
                   r"^at step \d+, `preempt` raised IndexError in line 5: list index out of range$"),
    },
    "sample": {
        "global": ("sample.calls = getattr(sample, 'calls', 0) + 1\n    return sample.calls % len(logits)",
                   r"the same logits, seed \d+ and position \d+ gave token \d+, and then token \d+"),
        "hash": ("return hash(f'{seed} {position}') % 12",
                 r"`sample` raised ValueError in line 5: hash of a str is different in each run of Python"),
        "greedy at 0": ("temperature = temperature or 1.0\n    return draw(logits, temperature, seed, position)",
                        r"at temperature 0, token \d+ was drawn for r\d+, but token \d+ has the largest logit"),
        "temperature": ("return draw(logits, temperature and 1.0, seed, position)",
                        r"at temperature 2, .*: the tokens are drawn as at temperature 1, so the temperature has no"),
        "not normalised": ("if not temperature: return logits.index(max(logits))\n    u = number(seed, position)\n"
                           "    for i, l in enumerate(logits):\n        u -= math.exp(min(l / temperature, 700)) / 20\n"
                           "        if u < 0: return i\n    return len(logits) - 1",
                           r"with 5 added to every logit, \d+ of \d+ draws changed"),
        "seed": ("return draw(logits, temperature, 7, position)", r": the seed has no effect$"),
        "position": ("return draw(logits, temperature, seed, 7)",
                     r": the position has no effect$"),
        "sum": ("return draw(logits, temperature, 7, seed + position)",
                r"^seed 1 at position 1 and seed 2 at position 0 draw the same: .*: only their sum has an effect$"),
        "half a seed": ("return draw(logits, temperature, seed // 2, position)",
                        r"^seed 2 at position (\d+) and seed 3 at position \1 .* 3,000 .* about 250 do .1 in 12.$"),
        "half a position": ("return draw(logits, temperature, seed, position // 2)",
                            r"^seed (\d+) at position 0 and seed \1 at position 1 .* by 1\), .* 265 do .1 in 12.$"),
        "product": ("return draw(logits, temperature, seed * position, 0)", r"equal products of seed and position"),
        "sevenfold": ("return draw(logits, temperature, seed * 7 + position, 0)",
                      r"the seed larger by 1, the position smaller by 7"),
        "exchanged": ("return draw(logits, temperature, seed ^ position, 0)", r"seed and position exchanged"),
        "digits": ("return draw(logits, temperature, int(f'{seed}{position}'), 0)",
                   r"^seed 1 at position 110 and seed 11 at position 10 draw the same: .*the same digits"),
        "neither": ("return draw(logits, temperature, 7, 7)",
                    r"^neither seed nor position has an effect: .* 1,600 draws$"),
        "not divided": ("if not temperature: return logits.index(max(logits))\n    u = number(seed, position)\n"
                        "    for i, l in enumerate(logits):\n        u -= math.exp((l - max(logits)) / temperature)\n"
                        "        if u < 0: return i",
                        r"^with 12 equal logits, token 0 was drawn 3,200 times of 3,200; softmax expects 1 in 12: do"),
        "sign": ("if temperature: logits = [-l for l in logits]\n    return draw(logits, temperature, seed, position)",
                 r"^at temperature 1, .*: small logits are drawn most: is the sign wrong\?$"),
        "multiplied": ("return draw(logits, temperature and 1 / temperature, seed, position)",
                       r"^at temperature 2, .*: the logits are multiplied by the temperature: divide by it$"),
        "sorted": ("if temperature: logits = sorted(logits)\n    return draw(logits, temperature, seed, position)",
                   r"^at temperature 1, .*: is it an index of `logits` in their order\?$"),
        "nothing drawn": ("return logits.index(max(logits))", r"^nothing is drawn: .* largest logit came every time"),
        "biased": ("if temperature == 2 and number(seed, position) < 0.65: return 11\n"
                   "    return draw(logits, temperature, seed, position)",
                   r"token 11 was drawn 1,\d{3} times in 1,\d{3} draws; softmax expects \d+: the draws are biased$"),
        "overflow": ("if not temperature: return logits.index(max(logits))\n"
                     "    return int(sum(math.exp(l / temperature) for l in logits)) % 12",
                     r"`sample` raised OverflowError in line 6: math range error"),
        "range": ("return len(logits)", r"returned 12: a token is a whole number from 0 to 11"),
    },
}

GOOD = {
    "admit": "first = [r for r in waiting if r.overtaken >= 16]\n    rest = [r for r in waiting if r.overtaken < 16]\n"
    "    return first + sorted(rest, key=lambda r: r.prompt - r.cached)",
    "evict": "free = [n for n in nodes if not n.users and not n.children]\n"
    "    return min(free, key=lambda n: n.last_used)",
    "chunk": "return min(left, budget, 256 if replies else budget)",
    "preempt": "later = [r for r in running if r.id != min(q.id for q in running)]\n"
    "    return min(later or running, key=lambda r: (r.preemptions > 4, r.prompt + r.reply))",
    "sample": "if temperature == 0: return logits.index(max(logits))\n"
    "    most = max(logits); r = random.Random(seed * 100003 + position)\n"
    "    return r.choices(range(12), [math.exp((l - most) / temperature) for l in logits])[0]",
}

HEADS = {
    "admit": "\n\n\ndef admit(waiting):\n    ",
    "evict": "kept = []\n\n\ndef evict(nodes):\n    ",
    "chunk": "\n\n\ndef chunk(left, budget, replies):\n    ",
    "preempt": "kept = []\n\n\ndef preempt(running, needs):\n    ",
    "sample": "import math, random; from minitui.exercises.sampling import reference as draw\n"
    "def number(seed, position):\n    return random.Random(f'{seed} {position}').random()\n"
    "def sample(logits, temperature, seed, position):\n    ",
}  # each has four lines before the body, or three


def source(exercise: str, body: str) -> str:
    """Returns a file with a function for an exercise."""
    return HEADS[exercise] + body + "\n"
