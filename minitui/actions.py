"""Everything the application can do, once: its key outside the prompt, its slash command, and one sentence about it.

Bindings, slash commands, the palette and the help are made from this table; settings.toml's [keys] renames keys by `id`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """`key` in Textual's names, several with commas; `slash` without the slash; `takes` is its argument, for the help.

    `footer` is the word in the bottom line, for those that stand there.
    """

    id: str
    title: str
    help: str
    key: str = ""
    slash: str = ""
    takes: str = ""
    group: str = "Application"
    footer: str = ""


ACTIONS = (
    # chats
    Action("write", "Write", "Go to the prompt.", "i,enter", group="Chats", footer="write"),
    Action("new", "New chat", "Open an empty chat; its system prompt is the default one.", "o", "new", "[title]", "Chats", "new"),
    Action("fork", "Fork this chat", "Open a chat that begins with everything said here. Both hold the same KV blocks: "
           "watch the refcounts.", "f", "fork", group="Chats", footer="fork"),
    Action("replay", "Replay the system prompt", "Ask the same first question in a new chat with the same system prompt, "
           "and show how much of the prompt came from the cache.", "r", "replay", group="Chats", footer="replay"),
    Action("all", "Send to all", "Send one prompt to every chat at once.", "A", "all", "text", "Chats"),
    Action("cancel", "Cancel the answer", "End the answer being written; what is there stays.", "", "cancel", group="Chats"),
    Action("retry", "Ask again", "Ask the last question again.", "R", "retry", group="Chats"),
    Action("next", "Next chat", "Show the next chat.", "right_square_bracket,l", "next", group="Chats", footer="chats"),
    Action("previous", "Previous chat", "Show the previous chat.", "left_square_bracket,h", "prev", group="Chats"),
    Action("go", "Go to a chat", "Show chat N (also /1, /2, …).", "", "go", "N", "Chats"),
    Action("rename", "Rename this chat", "Give this chat a title.", "e", "rename", "[title]", "Chats"),
    Action("close", "Close this chat", "Close it; it stays in the chat file.", "x", "close", group="Chats"),
    Action("system", "System prompt", "Read or change the system prompt of this chat. The next turn then differs from its "
           "first tokens on, and nothing cached fits.", "s", "system", "[text]", "Chats"),
    Action("ask", "Questions it knows", "List the questions that the bundled model answers right.", "a", "ask", "[word]", "Chats"),
    Action("set", "Sampling", "temperature, top_p, top_k, max_tokens, seed or ignore_eos of this chat.", "", "set", "name value", "Chats"),
    Action("think", "Show thinking", "Unfold or fold what a thinking model thought before it answered.", "t", "think", group="Chats"),
    Action("copy", "Copy the answer", "Copy the last answer to the clipboard.", "y", "copy", group="Chats"),
    Action("export", "Export the chat", "Write this chat as Markdown to a file.", "", "export", "[file]", "Chats"),
    # the engine
    Action("freeze", "Freeze the view", "Stop the picture; the engine runs on, and the header says how far behind the "
           "picture is.", "space", "freeze", group="Engine", footer="freeze"),
    Action("gate", "Pause the engine", "Stop the engine between two steps, or let it run again.", "p", "pause", group="Engine", footer="pause"),
    Action("step", "One step", "Let the engine take one step and stop (N: ten).", "n", "step", "[count]", "Engine", "step"),
    Action("step10", "Ten steps", "Let the engine take ten steps and stop.", "N", group="Engine"),
    Action("until", "Run until…", "Run until an admission, a hit, an eviction, a preemption, …, then stop.", "u", "until", "[event]", "Engine", "until"),
    Action("slower", "Slower", "Slow motion: stretch every step in proportion to its real duration. Figures stay the real "
           "ones.", "less_than_sign", group="Engine", footer="slow motion"),
    Action("faster", "Faster", "Less slow motion, down to real time.", "greater_than_sign", group="Engine"),
    Action("slow", "Slow motion", "Stretch every step by a factor from 1 (real time) to 200.", "", "slow", "factor", "Engine"),
    Action("back", "Back in time", "Show the engine one step earlier (inspect).", "comma", group="Engine"),
    Action("forward", "Forward in time", "Show the engine one step later, up to now (inspect).", "full_stop", group="Engine"),
    Action("clear", "Clear the cache", "Empty the radix tree: the next prompt is computed from its first token.", "", "clear-cache", group="Engine"),
    Action("restart", "Restart the engine", "Start the engine process again after it has ended.", "", "restart", group="Engine"),
    # the application
    Action("chat", "Chat", "The chats.", "1", "chat"),
    Action("inspect", "Inspect", "The engine: step, blocks, tree, batches, timings, events.", "2", "inspect", footer="inspect"),
    Action("theme", "Theme", "Dark, light or projector.", "T", "theme", "[name]"),
    Action("help", "Help", "What everything is, and every key.", "question_mark", "help", footer="help"),
    Action("palette", "Commands", "Search every command.", "colon", "commands", footer="commands"),
    Action("slash", "Slash command", "Begin a slash command in the prompt.", "slash"),
    Action("quit", "Quit", "Leave; open answers are kept as far as they are.", "q", "quit"),
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


def complete_slash(text: str) -> list[Action]:
    """The slash commands that `text` ("/fo") may become, in the table's order."""
    if not text.startswith("/") or " " in text or "\n" in text:
        return []
    return [action for action in ACTIONS if action.slash.startswith(text[1:]) and action.slash]
