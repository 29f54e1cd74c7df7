"""Everything the application can do, once: its key outside the prompt, its slash command, and one sentence about it.

Bindings, slash commands, the palette and the help are made from this table; [keys] in settings.toml renames by `id`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """`key` in Textual's names, several with commas; `slash` without the slash; `takes` is its argument, for the help.

    `footer` is the word in the bottom line, for those that stand there. `needs` is what an application must have to
    offer it.
    """

    id: str
    title: str
    help: str
    key: str = ""
    slash: str = ""
    takes: str = ""
    group: str = "Application"
    footer: str = ""
    needs: str = ""


ACTIONS = (
    # chats
    Action("write", "Write", key="i,enter", group="Chats", footer="write",
        help="Go to the prompt."),
    Action("keys", "Leave the prompt", key="ctrl+g", slash="keys", group="Chats",
        help="Letters are keys again, and an answer goes on (esc would cancel it). This key acts in the prompt."),
    Action("new", "New chat", key="o", slash="new", takes="[title]", group="Chats", footer="new",
        help="Open an empty chat; its system prompt is the default one."),
    Action("fork", "Fork this chat", key="f", slash="fork", group="Chats", footer="fork",
        help="Open a chat that begins with everything said here. Ask in both (A): they hold the same KV blocks, "
             "and each has its own from where they differ."),
    Action("replay", "Replay the system prompt", key="r", slash="replay", group="Chats", footer="replay",
        help="Ask the same first question in a new chat with the same system prompt, and show how much of the "
             "prompt came from the cache."),
    Action("all", "Send to all", key="A", slash="all", takes="text", group="Chats",
        help="Send one prompt to every chat at once."),
    Action("cancel", "Cancel the answer", slash="cancel", group="Chats",
        help="End the answer being written; what is there stays."),
    Action("retry", "Ask again", key="R", slash="retry", group="Chats",
        help="Ask the last question again."),
    Action("edit", "Edit and ask again", key="E", slash="edit", takes="[text]", group="Chats",
        help="Change the last question of this chat and ask it in its place; its answer is replaced."),
    Action("next", "Next chat", key="right_square_bracket,l", slash="next", group="Chats", footer="chats",
        help="Show the next chat."),
    Action("previous", "Previous chat", key="left_square_bracket,h", slash="prev", group="Chats",
        help="Show the previous chat."),
    Action("go", "Go to a chat", slash="go", takes="N", group="Chats",
        help="Show chat N (also /1, /2, …)."),
    Action("rename", "Rename this chat", key="e", slash="rename", takes="[title]", group="Chats",
        help="Give this chat a title."),
    Action("close", "Close this chat", key="x", slash="close", group="Chats",
        help="Close it; it stays in the chat file."),
    Action("system", "System prompt", key="s", slash="system", takes="[text]", group="Chats",
        help="Read or change the system prompt of this chat. The next turn then differs from its first tokens "
             "on, and nothing cached fits."),
    Action("ask", "Questions it knows", key="a", slash="ask", takes="[word]", group="Chats",
        help="List the questions that the bundled model answers right."),
    Action("set", "Sampling", slash="set", takes="name value", group="Chats",
        help="temperature, top_p, top_k, max_tokens, seed or ignore_eos of this chat."),
    Action("think", "Show thinking", key="t", slash="think", group="Chats",
        help="Unfold or fold what a thinking model thought before it answered."),
    Action("copy", "Copy the answer", key="y", slash="copy", group="Chats",
        help="Copy the last answer to the clipboard; /copy code its last code block, /copy chat everything."),
    Action("pick", "Copy…", key="Y", slash="pick", group="Chats",
        help="Choose a message or a code block of this chat and copy it."),
    Action("export", "Export the chat", slash="export", takes="[file]", group="Chats",
        help="Write this chat to a file, as JSON if its name ends in .json, else as Markdown."),
    Action("attach", "Attach a text file", slash="attach", takes="file", group="Chats",
        help="Put the text of a file into the prompt, to ask about it."),
    Action("search", "Search the chats", key="F", slash="search", takes="[words]", group="Chats",
        help="Find a chat by words in it, of all that were kept, and open it. One that another minitui has open opens "
        "as a fork."),
    # several servers
    Action("replicas", "Replicas", key="4", slash="replicas", group="Replicas", footer="replicas", needs="replicas",
        help="The servers behind the chats: who is up, how busy, how much is found in their caches."),
    Action("pin", "Pin to a replica", key="P", slash="pin", takes="[N|URL]", group="Replicas", needs="replicas",
        help="Let one replica answer this chat, and no other."),
    Action("unpin", "Unpin", key="U", slash="unpin", group="Replicas", needs="replicas",
        help="Let any replica answer this chat: the one that has its beginning in its cache comes first."),
    # the engine
    Action("freeze", "Freeze the view", key="space", slash="freeze", group="Engine", footer="freeze",
        help="Stop the picture; the engine runs on, and the header says how far behind the picture is."),
    Action("gate", "Pause the engine", key="p", slash="pause", group="Engine", footer="pause",
        help="Stop the engine between two steps, or let it run again."),
    Action("step", "One step", key="n", slash="step", takes="[count]", group="Engine", footer="step",
        help="Let the engine take one step and stop (N: ten)."),
    Action("step10", "Ten steps", key="N", group="Engine",
        help="Let the engine take ten steps and stop."),
    Action("until", "Run until…", key="u", slash="until", takes="[event]", group="Engine", footer="until",
        help="Run until an admission, a hit, an eviction, a preemption, …, then stop."),
    Action("slower", "Slower", key="less_than_sign", group="Engine", footer="slow motion",
        help="Slow motion: stretch every step in proportion to its real duration. Figures stay the real ones."),
    Action("faster", "Faster", key="greater_than_sign", group="Engine",
        help="Less slow motion, down to real time."),
    Action("slow", "Slow motion", slash="slow", takes="factor", group="Engine",
        help="Stretch every step by a factor from 1 (real time) to 200."),
    Action("back", "Back in time", key="comma", group="Engine",
        help="Show the engine one step earlier (inspect)."),
    Action("forward", "Forward in time", key="full_stop", group="Engine",
        help="Show the engine one step later, up to now (inspect)."),
    Action("now", "Back to now", key="end", slash="now", group="Engine",
        help="From the past back to the present. So does whatever makes the engine go on, and a new question."),
    Action("clear", "Clear the cache", slash="clear-cache", group="Engine",
        help="Empty the radix tree: the next prompt is computed from its first token."),
    Action("reset", "Start over", key="X", slash="reset", group="Engine",
        help="Cancel the answers, empty the cache, run in real time and begin the history anew; chats stay. A demo "
             "begins again from nothing."),
    Action("restart", "Restart the engine", slash="restart", group="Engine",
        help="Start the engine process again after it has ended."),
    # the application
    Action("chat", "Chat", key="1", slash="chat",
        help="The chats."),
    Action("inspect", "Inspect", key="2", slash="inspect", footer="inspect",
        help="The engine: step, blocks, tree, batches, timings, events."),
    Action("lecture", "Lecture", key="3", slash="lecture",
        help="One sentence for each step: what it did and why."),
    Action("theme", "Theme", key="T", slash="theme", takes="[name]",
        help="Dark, light or projector."),
    Action("help", "Help", key="question_mark", slash="help", footer="help",
        help="What everything is, and every key."),
    Action("palette", "Commands", key="colon", slash="commands", footer="commands",
        help="Search every command."),
    Action("slash", "Slash command", key="slash",
        help="Begin a slash command in the prompt."),
    Action("quit", "Quit", key="q", slash="quit",
        help="Leave; open answers are kept as far as they are."),
)  # fmt: skip

BY_ID = {action.id: action for action in ACTIONS}
BY_SLASH = {action.slash: action for action in ACTIONS if action.slash}

KEY_NAMES = {
    "question_mark": "?", "colon": ":", "comma": ",", "full_stop": ".", "less_than_sign": "<", "greater_than_sign": ">",
    "left_square_bracket": "[", "right_square_bracket": "]", "slash": "/",
}  # fmt: skip


def key_label(key: str) -> str:
    """A binding's first key as it stands on a keyboard."""
    first = key.split(",")[0]
    return KEY_NAMES.get(first, first)


def offered(features: Container[str] = ()) -> list[Action]:
    """What an application with these features can do, in the table's order."""
    return [action for action in ACTIONS if not action.needs or action.needs in features]


def complete_slash(text: str, features: Container[str] = ()) -> list[Action]:
    """The slash commands that `text` ("/fo") may become, in the table's order."""
    if not text.startswith("/") or " " in text or "\n" in text:
        return []
    return [action for action in offered(features) if action.slash.startswith(text[1:]) and action.slash]
