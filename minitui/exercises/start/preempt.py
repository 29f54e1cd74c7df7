"""Exercise `preempt`: a reply needs another block, and every
block is in use. Who has to go?

When nothing is left to evict, the scheduler calls `preempt`.
The request that you return loses its row and its blocks, and
goes back to the queue. Later it is admitted again, and its
tokens are computed again, except those that are still in the
prefix cache then.

running   the requests in the batch, in the order of admission.
    id            1 for the request that came first
    prompt        tokens of its prompt
    reply         tokens of its reply so far
    blocks        blocks that it uses; others may share some
    preemptions   how often it was preempted
needs     the id of the request that needs a block
Return    one of `running`; it may be the one that needs the
          block.

The rules: one request has to go; but never the running request
with the lowest id: it must be able to finish, or requests could
push each other out for ever. It is not always `running[0]`.
The score: the tokens that are computed again. The reference
preempts the request that was admitted last.
"""

from minitui.exercises.views import Running


def preempt(running: list[Running], needs: int) -> Running:
    # The request with the most blocks: much room at once. Run
    # it, and read who that is.
    return max(running, key=lambda request: request.blocks)
