"""Every action of the application: its key outside the prompt, its slash command, and one sentence about it.

Bindings, slash commands, the palette and the help are made from ACTIONS. The table [keys] of settings.toml can change
the key of an action. An entry of this table names the action by its `id`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module

from textual import events, keys
from textual.binding import Binding
from textual.dom import DOMNode

from minitui.tui.panels import BY_KEY, PANELS
from minitui.tui.terminal.textual_insides import ESC, AltEscape


@dataclass(frozen=True)
class Action:
    """An action. `key` holds Textual's names of the action's keys, separated by commas. `slash` is the slash command
    without the slash. `takes` is the command's argument, as the help shows it. `footer` is the action's word in the
    status bar; an action without this word is not shown there.
    """

    id: str
    title: str
    help: str
    key: str = ""
    slash: str = ""
    takes: str = ""
    footer: str = ""
    group: str = ""


_TABLE = {
    "Chats": (
        Action("write", "Write", key="i,enter", footer="write", help="Go to the prompt."),
        Action("keys", "Leave the prompt", key="ctrl+g", slash="keys",
            help="Leave the prompt: letters are then keys. The answer continues (esc would cancel it). This key "
                 "works only in the prompt."),
        Action("new", "New chat", key="o", slash="new", takes="[title]", footer="new",
            help="Open an empty chat with the default system prompt."),
        Action("fork", "Fork this chat", key="f", slash="fork", footer="fork",
            help="Open a copy of this chat. Both chats share KV blocks up to the first token that differs. Key A "
                 "sends one prompt to all chats."),
        Action("replay", "Replay the system prompt", key="r", slash="replay", footer="replay",
            help="Ask the first question again in a new chat with the same system prompt, and show how much of the "
                 "prompt came from the cache. If the cache has nothing of it, a first request computes it."),
        Action("all", "Send to all", key="A", slash="all", takes="text", help="Send one prompt to every chat at once."),
        Action("cancel", "Cancel the answer", slash="cancel",
            help="End the answer that is being written; the text so far stays."),
        Action("retry", "Ask again", key="R", slash="retry", help="Ask the last question again."),
        Action("edit", "Edit and ask again", key="E", slash="edit", takes="[text]",
            help="Change the last question of this chat and ask it again; the new answer replaces the old one."),
        Action("next", "Next chat", key="right_square_bracket,l", slash="next", footer="chats",
            help="Show the next chat."),
        Action("previous", "Previous chat", key="left_square_bracket,h", slash="prev", help="Show the previous chat."),
        Action("go", "Go to a chat", slash="go", takes="N", help="Show chat N (also /1, /2, …)."),
        Action("rename", "Rename this chat", key="e", slash="rename", takes="[title]", help="Give this chat a title."),
        Action("close", "Close this chat", key="x", slash="close", help="Close this chat; it stays in the chat file."),
        Action("system", "System prompt", key="s", slash="system", takes="[text]",
            help="Show or change the system prompt of this chat. A change affects the first tokens of the prompt, so "
                 "the next turn finds nothing in the cache."),
        Action("ask", "Known questions", key="a", slash="ask", takes="[word]",
            help="List the questions that the bundled model answers correctly."),
        Action("set", "Sampling", slash="set", takes="name value",
            help="Set temperature, top_p, top_k, max_tokens, seed or ignore_eos for this chat."),
        Action("think", "Show thinking", key="t", slash="think",
            help="Show or hide the thinking that comes before an answer."),
        Action("copy", "Copy the answer", key="y", slash="copy",
            help="Copy the last answer to the clipboard; /copy code copies its last code block, /copy chat the whole "
                 "chat."),
        Action("pick", "Copy…", key="Y", slash="pick",
            help="Choose a message or a code block of this chat and copy it."),
        Action("tokens", "What else?", key="k", slash="tokens",
            help="Choose a token of the last answer, and see which other tokens the model found likely there. The "
                 "engine computes the chosen token again."),
        Action("export", "Export the chat", slash="export", takes="[file]",
            help="Write this chat to a file: JSON if its name ends in .json, else Markdown."),
        Action("attach", "Attach a text file", slash="attach", takes="file",
            help="Put the text of a file into the prompt."),
        Action("search", "Search the chats", key="F", slash="search", takes="[words]",
            help="Find a saved chat by words in it, and open it. If it is open in another minitui, a copy opens here."),
    ),
    "Replicas": (
        Action("replicas", "Replicas", key="4", slash="replicas", footer="replicas",
            help="Show the servers of the chats: which of them are up, how busy they are, and their cache hits."),
        Action("pin", "Pin to a replica", key="P", slash="pin", takes="[N|URL]",
            help="Let only one replica answer this chat."),
        Action("unpin", "Unpin", key="U", slash="unpin",
            help="Let every replica answer this chat. Replicas that have its beginning in their cache are preferred."),
    ),
    "Engine": (
        Action("freeze", "Freeze the view", key="space", slash="freeze", footer="freeze",
            help="Freeze the picture. The engine keeps running; the top bar shows how far the picture is behind."),
        Action("gate", "Pause the engine", key="p", slash="pause", footer="pause",
            help="Pause the engine between two steps, or let it run again."),
        Action("resume", "Let the engine run", slash="resume", help="Let a paused engine run again."),
        Action("step", "One step", key="n", slash="step", takes="[count]", footer="step",
            help="Let the engine take one step, then pause. Key N: ten steps."),
        Action("step10", "Ten steps", key="N", help="Let the engine take ten steps, then pause."),
        Action("until", "Run until…", key="u", slash="until", takes="[event]", footer="until",
            help="Run until an admission, a hit, an eviction, a preemption, …, then pause."),
        Action("slower", "Slower", key="less_than_sign", footer="slow motion",
            help="Slow motion: stretch every step in proportion to its real duration. Figures show the real times."),
        Action("faster", "Faster", key="greater_than_sign", help="Reduce the slow motion, down to real time."),
        Action("slow", "Slow motion", slash="slow", takes="factor",
            help="Stretch every step by a factor from 1 (real time) to 200."),
        Action("back", "Back in time", key="comma", help="Show the engine as it was one step earlier."),
        Action("forward", "Forward in time", key="full_stop",
            help="After a step back: show the engine one step later, up to now."),
        Action("now", "Back to now", key="end", slash="now",
            help="Return from the past to the present. A new question, or a key that runs the engine, does the same."),
        Action("clear", "Clear the cache", slash="clear-cache",
            help="Empty the radix tree; the next prompt is computed from its first token."),
        Action("reset", "Start over", key="X", slash="reset",
            help="Cancel the answers, empty the cache, return to real time and clear the history; chats stay. A demo "
                 "starts again."),
        Action("restart", "Restart the engine", slash="restart",
            help="Start the engine process again after it has ended."),
    ),
    "Application": (
        Action("chat", "Chat", key="1", slash="chat", help="Show the chats."),
        Action("inspect", "Inspect", key="2", slash="inspect", footer="inspect",
            help="Show the engine: step, blocks, tree, batches, timings, events. Again: all panels."),
        *(Action(name, PANELS[name].title, key=PANELS[name].key, slash=name, help=PANELS[name].does)
          for name in BY_KEY),
        Action("prefix", "Prefix doctor", slash="prefix",
            help="Say for each request what it shares with an earlier one, what came from the cache, and whose fault "
                 "the rest is: changed history, tools, a date, a salt, an eviction, …"),
        Action("lecture", "Lecture", key="3", slash="lecture",
            help="Show one sentence for each step: what the step did, and why."),
        Action("goto", "Go to…", key="g", slash="goto", takes="[name]", footer="go to",
            help="Go to a step by its number (400), a request (r12, or the name of a chat), a block (b17) or a node of "
                 "the tree (n5). In the inspector, esc goes back."),
        Action("theme", "Theme", key="T", slash="theme", takes="[name]",
            help="Change the theme: dark, light or projector."),
        Action("help", "Help", key="question_mark", slash="help", footer="help",
            help="Explain this screen, and list every key."),
        Action("palette", "Commands", key="colon", slash="commands", footer="commands", help="Search all commands."),
        Action("slash", "Slash command", key="slash", help="Begin a slash command in the prompt."),
        Action("quit", "Quit", key="q", slash="quit",
            help="Quit; unfinished answers are kept with their text so far."),
    ),
}

ACTIONS = tuple(replace(action, group=group) for group, actions in _TABLE.items() for action in actions)
NEED_CONTROL = {"gate", "resume", "step", "step10", "until", "slower", "faster", "slow", "clear", "reset"}
BY_ID = {action.id: action for action in ACTIONS}
BY_SLASH = {action.slash: action for action in ACTIONS if action.slash}

KEY_NAMES = {
    "question_mark": "?", "colon": ":", "comma": ",", "full_stop": ".", "less_than_sign": "<", "greater_than_sign": ">",
    "left_square_bracket": "[", "right_square_bracket": "]", "slash": "/",
}

_keys = [key for action in ACTIONS for key in action.key.split(",") if key]
if taken := next((key for key in _keys if _keys.count(key) > 1), ""):
    raise TypeError(f"two actions have the key {taken!r}: {[a.id for a in ACTIONS if taken in a.key.split(',')]}")


def key_label(key: str) -> str:
    """Returns the first key of a binding, as printed on the keyboard."""
    first = key.split(",")[0]
    return KEY_NAMES.get(first, first)


def key_press(label: str) -> events.Key:
    """Returns the event of a key that `key_label`, or a hint such as "esc", names."""
    named = next((key for key, name in KEY_NAMES.items() if name == label), {"esc": "escape"}.get(label, label))
    return events.Key(named, label if len(label) == 1 else {"space": " "}.get(label))


def wrong_keys(table: Mapping[str, str]) -> Iterator[str]:
    """Yields a sentence for each id and for each key of the table [keys] that no binding and no terminal has."""
    ids = _binding_ids(DOMNode)
    if not table.keys() <= ids:
        for name in ("cache_app", "class_app", "exercise_app", "replica_app"):  # one file is for all applications
            import_module(f"minitui.tui.apps.{name}")
        ids = _binding_ids(DOMNode)
    names = {str(key.value) for key in keys.Keys} | {*keys.KEY_TO_UNICODE_NAME, *keys.REPLACED_KEYS}
    for id, value in table.items():
        if id not in ids:
            yield f"settings.toml: keys.{id} is not the name of an action{_near(id, ids)}; the help (?) lists them"
        for key in map(str.strip, value.split(",")):
            *modifiers, name = [key] if len(key) == 1 else key.split("+")
            letter = len(name) == 1 or (name.islower() and keys.key_to_character(name))
            if not (letter or name in names) or not {*modifiers} <= {"ctrl", "alt", "shift", "super"}:
                yield f"settings.toml: keys.{id} is {key!r}, which is not the name of a key{_near(key, names)}"


def _near(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name.lower(), names)
    return f" (near: {', '.join(near)})" if near else ""


def _binding_ids(of: type[DOMNode]) -> set[str]:
    """Returns the ids of the bindings that a class and its loaded subclasses declare."""
    ids = {one.id for one in vars(of).get("BINDINGS", ()) if isinstance(one, Binding) and one.id}
    return ids.union(*map(_binding_ids, of.__subclasses__()))


def alt_key(event: events.Key) -> list[events.Key]:
    """Returns a key that was pressed with alt, in a terminal that reports this, as AltEscape and the key."""
    name = event.key.removeprefix("alt+")
    label = name.removeprefix("shift+").upper() if name.startswith("shift+") else KEY_NAMES.get(name, name)
    return [event] if name == event.key or len(label) > 1 else [AltEscape("escape", ESC), key_press(label)]


def complete_slash(text: str, actions: Sequence[Action]) -> list[Action]:
    """Returns the `actions` whose slash command begins with `text` ("/fo"), in their order."""
    if not text.startswith("/") or " " in text or "\n" in text:
        return []
    return [action for action in actions if action.slash.startswith(text[1:]) and action.slash]
