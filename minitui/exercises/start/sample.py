"""Exercise `sample`: the model has a number (logit) for each
token. Which token is written?

After each step the engine calls `sample` once for each reply.
Softmax makes probabilities of the logits: p[i] is
exp(logits[i] / temperature), divided by the sum of
exp(logits[j] / temperature) over all j. Draw one token with
these probabilities.

logits        a number for each token; some are large (800.0)
temperature   0: always the token with the largest logit. Below
              1: likely tokens become likelier; above 1: less so
seed          a number of this request; another seed gives
              another reply
position      how many tokens the prompt and the reply have so
              far
Return        the number of the token: an index of `logits`.

The rules: the same arguments give the same token, in every run
and in any batch: so all chance comes from `seed` and
`position`. Another seed, or another position, gives an
independent draw.
The score: how far the shares of the drawn tokens are from
softmax; less than 5 % is chance, and counts as 5 %. The
reference draws exactly.
"""

import random


def sample(
    logits: list[float], temperature: float, seed: int, position: int
) -> int:
    # This ignores the temperature and the seed. Run it, and
    # read which rule it breaks first.
    # random.Random("a text that is different for each draw")
    # gives numbers that are the same in every run.
    return random.choices(range(len(logits)))[0]
