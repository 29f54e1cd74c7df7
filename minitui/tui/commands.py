"""The code of each action. Keys, slash commands and the palette all call `Commands.run`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from engine.errors import EngineError
from minitui.tui.actions import BY_ID, BY_SLASH, key_label
from minitui.tui.chat_commands import ChatCommands, whole_number
from minitui.tui.panels import BY_KEY
from minitui.tui.screens.help import CURSOR_KEYS, HelpScreen, bindings_here, name_of_text, panel_help
from minitui.tui.screens.inspect import InspectScreen
from minitui.tui.screens.prefix import PrefixScreen
from minitui.viewmodel.places import find

PACES = (1, 2, 5, 10, 20, 50, 100, 200)
UNTIL = {
    "admission": "a waiting request gets a row in the batch",
    "prefill": "a step computes tokens of a prompt",
    "hit": "the beginning of a prompt is found in the radix tree",
    "eviction": "cached blocks are evicted to make room",
    "preemption": "a running request returns to the queue because blocks are missing",
    "finish": "an answer ends",
    "slow": "a step takes longer than 20 ms",
}
MODES = {"chat", "lecture", "replicas"}  # actions that show the screen of the same name
CONTROLS = {"step", "step10", "until", "slow", "slower", "faster"}  # refused while a demo controls the engine
SHORTCUTS = 15  # cells for the key and the slash command in the palette
NOT_IN_PALETTE = {"palette", "slash", "write", "keys", "go"}


class Commands(ChatCommands):
    """One method per action, named `do_<id>`; its argument is the text after the slash command."""

    def run(self, action: str, argument: str = "") -> bool:
        """Run an action; an error is shown on the screen. Returns False after an error."""
        try:
            self._check(action)
            if action in MODES:
                self.app.open_mode(action)
            elif action in BY_KEY:
                self._show_alone(action)
            else:
                getattr(self, f"do_{action}")(argument.strip())
            return True
        except EngineError as error:
            self.app.say(str(error), error=True)
            return False

    def _check(self, action: str) -> None:
        reason = self.app.reason_against(BY_ID[action])
        if reason:
            raise EngineError(reason)
        if action in CONTROLS and self.app.asking is not None:
            raise EngineError("the demo controls the engine: space pauses the demo; this command works after the demo")

    def run_slash(self, text: str) -> bool:
        """Run "/fork", "/rename paging" or "/2" (chat 2). A command can be shortened if it stays unambiguous. Returns
        False after an error."""
        name, _, argument = text[1:].partition(" ")
        if whole_number(name) is not None:
            return self.run("go", name)
        fits = [a for slash, a in BY_SLASH.items() if slash == name] or [
            a for a in self.app.actions if a.slash and name and a.slash.startswith(name)
        ]
        if len(fits) == 1:
            return self.run(fits[0].id, argument)
        if fits:
            self.app.say(f"/{name} is ambiguous: " + ", ".join(f"/{a.slash}" for a in fits), error=True)
        else:
            self.app.say(f"there is no command /{name}: type / for a list of commands", error=True)
        return False

    # --- the engine

    def do_freeze(self, _: str) -> None:
        if self.app.view.moment.playback is not None:  # a recording does not run on behind a frozen picture
            self.do_gate("")
            return
        self.app.feed.frozen = not self.app.feed.frozen

    def do_gate(self, _: str) -> None:
        if self.app.asking is not None:  # the demo controls the engine, and waits while the view is frozen
            self.do_freeze("")
            return
        self._control(self.app.source.control("resume" if self.app.gated else "pause"), runs=self.app.gated)

    def do_resume(self, _: str) -> None:
        if not self.app.gated:
            raise EngineError("the engine is not paused")
        self.do_gate("")

    def do_step(self, count: str) -> None:
        steps = whole_number(count or "1")
        if steps is None:
            raise EngineError(f"/step takes a number of steps, not {count[:40]!r}")
        if self.app.idle:
            raise EngineError("nothing to step: no request is running")
        self._control(self.app.source.control("step", n=steps), runs=True)

    def do_prefix(self, _: str) -> None:
        if not self.app.feed.live:
            raise EngineError(f"{self.app.view.history.missing}: there are no requests yet")
        self.app.push_screen(PrefixScreen())

    def do_step10(self, _: str) -> None:
        self.do_step("10")

    def do_until(self, event: str) -> None:
        if not event:
            self.app.choose("Run until", list(UNTIL.items()), self.do_until)
            return
        if event not in UNTIL:
            raise EngineError(f"/until takes {', '.join(UNTIL)}, not {event!r}")
        predicate: dict[str, Any] = {"event": event} | ({"ms": 20.0} if event == "slow" else {})
        self._control(self.app.source.control("run_until", predicate=predicate), runs=True)

    def do_slower(self, _: str) -> None:
        self._pace(next((p for p in PACES if p > self.app.pace), PACES[-1]))

    def do_faster(self, _: str) -> None:
        self._pace(next((p for p in reversed(PACES) if p < self.app.pace), PACES[0]))

    def do_slow(self, factor: str) -> None:
        try:
            times = float(factor)
        except ValueError:
            times = 0.0
        if not PACES[0] <= times <= PACES[-1]:
            raise EngineError(f"/slow takes a factor from {PACES[0]} to {PACES[-1]}, not {factor!r}")
        self._pace(times)

    def _pace(self, factor: float) -> None:
        self._control(self.app.source.control("pace", factor=factor))

    def do_back(self, _: str) -> None:
        self.app.travel_to(self.app.view.moment.horizon - 1)

    def do_forward(self, _: str) -> None:
        self.app.travel_to(self.app.view.moment.horizon + 1)

    def do_now(self, _: str) -> None:
        if not self.app.view.moment.travel_text and self.app.view.moment.playback is None:
            raise EngineError("the picture already shows the present")
        self.app.to_now()

    def do_clear(self, _: str) -> None:
        self._control(self.app.source.control("clear_cache"))
        self.app.say("the radix tree is emptied, except for blocks that answers still use")

    def do_reset(self, _: str) -> None:
        if not self.app.feed.live:
            raise EngineError(f"{self.app.view.history.missing}: there is nothing to start over")
        self.app.run_worker(self.app.start_over(), group="start", exclusive=True)

    def do_restart(self, _: str) -> None:
        condition = self.app.condition
        if self.app.source.error is None and not condition.hung and not condition.long:
            raise EngineError("the engine is running: there is nothing to restart")
        self.app.restart_engine()

    def _control(self, call: Coroutine[Any, Any, Any], runs: bool = False) -> None:
        """Send a command to the engine: now, or as soon as the engine has started. `runs`: it lets the engine run."""
        if not self.app.source.info and self.app.source.error is None:
            self.app.say(f"{self.app.view.history.missing}: the command is sent as soon as this has ended")

        async def guarded() -> None:
            try:
                await self.app.source.ready()
                if runs:
                    await self.app.begin_here()
                await call
            except EngineError as error:
                self.app.say(str(error), error=True)
            finally:
                call.close()  # needed if the engine did not start and `call` was never awaited

        self.app.run_worker(guarded(), group="control")

    # --- the application

    def do_goto(self, text: str) -> None:
        """Show what the text names. Chats and other screens that show no single step give way to the inspector."""
        view, steps = self.app.view, self.app.steps_kept
        if not text:
            first, last = steps
            known = f" ({first:,} to {last:,})" if last >= first else ""
            self.app.ask_text(f"Go to a step{known}, r12, block 17, node 5, or a chat", "", partial(self.run, "goto"))
            return
        place = find(view, text, steps)
        if self.app.current_mode == "lecture" and place.kind != "request":
            if place.kind == "step":
                self.app.travel_to(place.id)
            else:
                view.select(place.kind, place.id)
            return
        if self.app.current_mode != "inspect":
            self.app.open_mode("inspect")
        if isinstance(screen := self.app.screen, InspectScreen):
            screen.go_to(place.kind, place.id)

    def do_inspect(self, _: str) -> None:
        if self.app.current_mode != "inspect":
            self.app.open_mode("inspect")
        elif isinstance(screen := self.app.screen, InspectScreen):
            screen.show_all()

    def _show_alone(self, panel: str) -> None:
        """Show a panel that is never beside others; on the inspect screen, the same again shows all panels."""
        inspecting = self.app.current_mode == "inspect"
        self.app.open_mode("inspect")
        screen = self.app.screen
        if isinstance(screen, InspectScreen) and (inspecting or screen.current != panel):
            screen.toggle(panel)

    def do_theme(self, name: str) -> None:
        ours = [t for t in self.app.available_themes if t.startswith("minitui-")]
        wanted = f"minitui-{name}" if name and not name.startswith("minitui-") else name
        if wanted and wanted not in ours:
            raise EngineError(f"there is no theme {name!r}: {', '.join(t.removeprefix('minitui-') for t in ours)}")
        self.app.set_theme(wanted or ours[(ours.index(self.app.theme) + 1) % len(ours)])

    def do_help(self, _: str) -> None:
        app = self.app
        about, here = name_of_text(app.screen, app.current_mode), bindings_here(app)
        app.push_screen(HelpScreen(about, [*app.HELP_FIRST, *panel_help(app.focused)], here))

    def do_palette(self, _: str) -> None:
        rows: list[tuple[str, str]] = []
        searched: list[str] = []
        calls: dict[str, Callable[[], Any]] = {}

        def add(title: str, id: str, key: str, slash: str, help: str, call: Callable[[], Any]) -> None:
            """Add a row with the first sentence of the help; all of it is searched."""
            shortcuts = (key_label(self.app.settings.keys.get(id, key)), slash and f"/{slash}")
            keys, first = " ".join(filter(None, shortcuts)), help.partition(". ")[0].rstrip(".")
            rows.append((title, f"{keys:<{SHORTCUTS}}{first}"))
            searched.append(f"{title} {keys} {help}")
            calls[title] = call

        for a in self.app.actions:
            if a.id not in NOT_IN_PALETTE:
                add(a.title, a.id, a.key, a.slash, a.help, partial(self.run, a.id))
        for here in bindings_here(self.app):
            for b in here.bindings:
                if not CURSOR_KEYS.issuperset(b.key.split(",")):
                    call = partial(self.app.call_later, self.app.run_action, b.action, here.node)
                    title = b.description if b.description not in calls else f"{b.description} ({here.name})"
                    add(title, b.id or "", b.key, "", f"{here.name}. {b.tooltip}".strip(), call)
        self.app.choose("Commands", rows, lambda title: calls[title](), searched, hang=SHORTCUTS)

    def do_quit(self, _: str) -> None:
        self.app.exit()
