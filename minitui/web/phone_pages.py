"""The pages of a class: for phones, for the lecturer, and for afterwards. They need no other server."""

from __future__ import annotations

import html
import json
from typing import Any

STYLE = """
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
  body { margin: 0 auto; max-width: 42rem; padding: 1rem; background: #0c181f; color: #e6edf0;
         font: 1.1rem/1.5 system-ui, sans-serif; }
  h1 { font-size: 1rem; font-weight: normal; color: #9fb3bd; margin: 0 0 .5rem; }
  h2 { font-size: 1.2rem; margin: 1.5rem 0 .3rem; }
  a { color: #4ec9b0; } .dim { color: #9fb3bd; font-size: .9rem; }
  p, li { overflow-wrap: anywhere; } .said { white-space: pre-wrap; }
  button { font: inherit; color: inherit; background: #173039; border: 2px solid #4ec9b0; border-radius: .6rem; }
  .choice { display: block; width: 100%; min-height: 4.2rem; margin: .6rem 0; padding: .6rem 1rem; text-align: left; }
  .choice b { font-size: 1.6rem; margin-right: .8rem; } .chosen { background: #4ec9b0; color: #0c181f; }
  .bar { display: flex; height: 2rem; margin: .3rem 0; background: #173039; border-radius: .3rem; overflow: hidden; }
  [hidden] { display: none !important; }
  .bar div { min-width: 2px; overflow: hidden; white-space: nowrap; font-size: .8rem; line-height: 2rem;
             padding-left: .2rem; box-sizing: border-box; color: #0c181f; background: #d7ba7d; }
  .bar .decode { background: #4ec9b0; } .bar .rest { background: none; }
  .clock { font-size: 2rem; } .late { color: #f48771; } .next { width: 100%; min-height: 4rem; }
  .scenes { padding-left: 2rem; } .scenes button { border: 0; background: none; text-align: left; }
</style>
"""
# `show(state)` draws a state. A lost stream is opened again after a random time: two hundred phones come back together.
STREAM = """
const element = (id) => document.getElementById(id);
const put = (id, text) => { if (element(id).textContent !== text) element(id).textContent = text; };
const listen = (address, show) => {
  const source = new EventSource(address);
  source.onmessage = ({data}) => { put("problem", ""); show(JSON.parse(data)); };
  source.onerror = () => {
    source.close();
    put("problem", "no connection: trying again");
    setTimeout(() => listen(address, show), 1000 + 4000 * Math.random());
  };
};
const drawBar = (bar) => {
  const line = element("bar"), parts = [];
  const part = (n, text, kind) => {
    const piece = document.createElement("div");
    piece.style.flex = n; piece.textContent = text; piece.className = kind; parts.push(piece);
  };
  if (bar.decodes) part(bar.decodes, "decode " + bar.decodes, "decode");
  for (const [name, n] of bar.chunks || []) part(n, name + " +" + n, "");
  if (bar.budget > bar.tokens) part(bar.budget - bar.tokens, "", "rest");
  line.replaceChildren(...parts);
  for (const each of document.querySelectorAll(".of-step")) each.hidden = !parts.length;
  put("step", "step" in bar ? "step " + bar.step + ": " + bar.tokens + " of " + bar.budget + " tokens" : "");
};
"""
PHONE = f"""<!doctype html><html lang="en"><head><title>minitui: class</title>{STYLE}</head><body>
<h1 id="title"></h1><p id="problem" class="dim"></p>
<div id="ask"></div>
<p id="said" class="said"></p>
<p id="step" class="dim"></p><div id="bar" class="bar of-step"></div>
<p class="dim of-step">decode: a token of an answer each. The other parts: tokens of a prompt.</p>
<p class="dim"><a href="SCREEN">Watch the whole screen</a></p>
<script>{STREAM}
const here = location.pathname;
let drawn = 0, chosen = -1, letters = [];
const vote = async (number, choice) => {{
  chosen = choice; mark();
  const body = JSON.stringify({{number, choice}});
  try {{
    const headers = {{"Content-Type": "application/json"}};
    const reply = await fetch(here + "/vote", {{method: "POST", headers, body}});
    put("problem", reply.ok ? "" : await reply.text());
  }} catch {{ put("problem", "the answer was not sent: press again"); }}
}};
const mark = () => letters.forEach((button, i) => button.classList.toggle("chosen", i === chosen));
const drawAsk = (ask) => {{
  const number = ask ? ask.number : 0;
  if (number === drawn) return;
  drawn = number; chosen = -1; letters = [];
  if (!ask) {{ element("ask").replaceChildren(); return; }}
  const question = document.createElement("p");
  question.textContent = ask.question;
  letters = ask.choices.map((choice, i) => {{
    const button = document.createElement("button"), letter = document.createElement("b");
    letter.textContent = "abcd"[i];
    button.className = "choice"; button.append(letter, choice); button.onclick = () => vote(number, i);
    return button;
  }});
  element("ask").replaceChildren(question, ...letters);
}};
listen(here + "/events", (state) => {{
  put("title", [state.title, state.scene].filter(Boolean).join(" · ") + (state.paused ? " · paused" : ""));
  put("said", state.ask ? "" : state.say || ""); drawAsk(state.ask); drawBar(state.bar || {{}});
}});
</script></body></html>"""
LECTURER = f"""<!doctype html><html lang="en"><head><title>minitui: lecturer</title>{STYLE}</head><body>
<h1 id="title"></h1><p id="problem" class="dim"></p>
<p class="clock"><span id="clock"></span></p><p id="plan" class="dim"></p>
<p id="notes" class="said"></p>
<button id="next" class="next"></button>
<p id="votes" class="said"></p>
<p id="said" class="said dim"></p><p id="step" class="dim"></p><div id="bar" class="bar of-step"></div>
<ol id="scenes" class="scenes"></ol>
<p class="dim">Phones: LINK</p>
<script>{STREAM}
let since = 0, told = {{}};
const phones = (n) => n + (n === 1 ? " phone" : " phones");
const act = (verb, number) => fetch("/lecturer/act" + location.search, {{
  method: "POST", headers: {{"Content-Type": "application/json"}}, body: JSON.stringify({{verb, number}})}});
element("next").onclick = () => act("next", 0);
addEventListener("keydown", ({{key}}) => {{ if (["F8", "PageDown", "ArrowRight"].includes(key)) act("next", 0); }});
const minutes = (s) => Math.floor(s / 60) + ":" + String(Math.floor(s % 60)).padStart(2, "0");
setInterval(() => {{
  const mine = told.lecturer || {{}};
  if (!("of" in mine)) return;
  const past = (Date.now() - since) / 1000, left = mine.minutes * 60 - mine.scene_s - past;
  put("clock", minutes(mine.elapsed_s + past) + " of " + mine.of + " min · this scene: " +
      minutes(Math.abs(left)) + (left < 0 ? " over" : " left"));
  element("clock").className = left < 0 ? "late" : "";
  put("plan", "planned to begin at minute " + mine.begins + " and to take " + mine.minutes);
}}, 250);
listen("/lecturer/events" + location.search, (state) => {{
  const mine = state.lecturer || {{}};
  if (mine.number !== (told.lecturer || {{}}).number || mine.elapsed_s !== (told.lecturer || {{}}).elapsed_s)
    since = Date.now();
  told = state;
  put("title", [state.all.title, state.all.scene].filter(Boolean).join(" · "));
  put("notes", mine.notes || ""); put("said", state.all.say || ""); drawBar(state.all.bar || {{}});
  put("next", mine.asks || state.all.ask ? "Show the answer" : mine.runs ? "Run the experiment to its end" :
      mine.next ? (mine.plays ? "Leave what still plays. " : "") + "Next: " + mine.next : "The last scene");
  put("votes", state.votes ? state.votes.counts.map((n, i) => "abcd"[i] + " " + n).join("   ") +
      "   of " + phones(state.votes.phones) : phones(state.phones));
  const list = element("scenes");
  if (list.childElementCount !== (mine.scenes || []).length)
    list.replaceChildren(...(mine.scenes || []).map((name, i) => {{
      const row = document.createElement("li"), button = document.createElement("button");
      button.textContent = name; button.onclick = () => act("scene", i + 1); row.append(button); return row;
    }}));
}});
</script></body></html>"""


def phone_page(screen: str) -> str:
    """Returns the page for phones. `screen`: the address of the mirror."""
    return PHONE.replace("SCREEN", html.escape(screen))


def lecturer_page(link: str) -> str:
    """Returns the lecturer's page. `link`: the address for the phones."""
    return LECTURER.replace("LINK", html.escape(link))


def afterwards_page(title: str, scenes: list[dict[str, Any]], files: list[str], link: str) -> str:
    """Returns the page for afterwards: the scenes with their steps and the answers, and the recordings. `scenes`: those
    of the file of a class, with the sentences of their steps as "told". `files`: the names of the recordings."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for scene in scenes:
        parts.append(f"<h2>{html.escape(str(scene['number']))} {html.escape(scene['title'])}</h2>")
        for asked in scene["answers"]:
            rows = "".join(
                f"<li>{html.escape(str(choice))}: <b>{int(n)}</b></li>"
                for choice, n in zip(asked["choices"], asked["counts"], strict=True)
            )
            parts.append(f"<p>{html.escape(str(asked['question']))}</p><ol type='a'>{rows}</ol>")
        told = "".join(f"<li class='said'>{html.escape(line)}</li>" for line in scene["told"])
        if told:
            parts.append(f"<details><summary>{len(scene['told'])} steps</summary><ul>{told}</ul></details>")
    links = "".join(f"<li><a href='{link}/{at}'>{html.escape(name)}</a></li>" for at, name in enumerate(files))
    if files:
        parts.append(f"<h2>Recordings</h2><p>Play them with <code>minitui replay FILE</code>.</p><ul>{links}</ul>")
    head = f"<title>{html.escape(title)}</title>{STYLE}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def event(state: dict[str, Any]) -> bytes:
    """Returns a state as one server-sent event."""
    return b"data: " + json.dumps(state, separators=(",", ":")).encode() + b"\n\n"
