"""Exercise `admit`: in which order does the queue enter the
batch?

Requests wait until the batch has a free row, and the pool has
blocks for their prompt. If a request waits and a row is free,
the scheduler calls `admit` before the step. It admits from the
beginning of your list as long as the next one fits.

waiting   the requests in the queue, in the order of arrival.
    id          1 for the request that came first
    prompt      tokens of its prompt
    cached      how many of them are in the prefix cache now:
                these need not be computed
    waited      steps since it came
    overtaken   how many requests that came later were admitted
                before it
Return    all of them, each once, in the order in which they
          are to be admitted.

The rules: no request is lost, and none starves: at most 24
requests that came later may be admitted before it. One call can
admit several of them.
The score: the mean time to first token (TTFT). The reference
admits in the order of arrival: try to be faster.
"""

from minitui.exercises.views import Waiting


def admit(waiting: list[Waiting]) -> list[Waiting]:
    # This is unfair to long prompts. Run it, and read what
    # happens to them.
    return sorted(waiting, key=lambda request: request.prompt)
