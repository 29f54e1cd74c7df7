"""Exercise `evict`: the pool is full. Which cached text is
thrown away?

Finished requests leave their blocks in the prefix tree, so that
a later request with the same beginning need not compute it
again. When a request needs more blocks than are free, the
scheduler calls `evict`, again and again, until enough blocks
are free.

nodes     all nodes of the tree. Each has
    id          its number; a node that is split or joined with
                another gets a new one
    parent      the id of the node before it in the text; 0: its
                text begins with this node
    children    the ids of the nodes that continue its text
    users       a tuple: the ids of the requests that use it
                now, empty if there are none
    last_used   a clock that counts up: a larger number was used
                later. Who uses a text uses its beginning, too
    blocks      the numbers of its blocks in the pool
Return    one node. Its blocks are freed, the last ones first,
          and only as many as are needed.

The rules: a text in use stays, and a text stays as long as
another one continues it: nothing could find the rest. At least
one node is always allowed. And at most 1.1 times as many prompt
tokens are computed as with the reference, which evicts the
least recently used text (LRU). LRU needs no test of `children`
(see `last_used`: a text is not older than what continues it);
other orders do.
The score: the prompt tokens that had to be computed.
LRU is hard to beat: most other orders compute more. A hint:
chats begin with a system prompt, and ask again. Other texts
have a beginning of their own, and are asked once. How could
`parent` tell you which texts may be asked again?
"""

from minitui.exercises.views import Node


def evict(nodes: list[Node]) -> Node:
    # This takes the newest node. Run it, and read which rule it
    # breaks.
    return nodes[-1]
