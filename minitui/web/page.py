"""The page of `minitui chat --web`: textual-serve's page, with minitui's font, sizes, title and touch keys.

The application tells the page its title and the keys of its screen (minitui/tui/widgets/bars.py). Where the pointer is
a finger, the page has a button for each key, and a swipe turns the wheel of the mouse.

xterm takes the pixels of its canvas from a ResizeObserver, whose device-pixel-content-box does not know of an emulated
device pixel ratio (DevTools, Emulation.setDeviceMetricsOverride): there the terminal is two or three times too large.
Devices are right; to try a ratio, start Chromium with --force-device-scale-factor=3.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from textual_serve import server as textual_serve

SMALLEST, LARGEST = 12, 16  # font size in pixels

# This server sends the font itself, so the page works offline and no font server learns of the visit. A cell is 0.605
# font sizes wide. dvh: the height without the bars of a phone's browser; iOS does not subtract its keyboard from it.
HEAD = """
<title>minitui</title>
<link rel="icon" href="data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 4 4'%3E
%3Crect width='4' height='4' fill='%230c181f'/%3E%3Cpath d='M0 0h3v1H0zM0 2h2v1H0z' fill='%234ec9b0'/%3E%3C/svg%3E">
<meta name="viewport" content="width=device-width, initial-scale=1, interactive-widget=resizes-content">
<style>
  @font-face { font-family: "Roboto Mono"; src: url(/static/fonts/RobotoMono-VariableFont_wght.ttf); }
  body { display: flex; flex-direction: column; height: 100dvh; margin: 0; }
  #terminal { width: 100%; flex: 1; min-height: 0; }
  #terminal .xterm-viewport { overflow: hidden; }
  .intro { box-sizing: border-box; max-width: calc(100vw - 64px); }
  .intro svg { display: none; }
  .shade { background-image: none; }
  #keys { display: none; }
  @media (pointer: coarse) {
    #terminal { touch-action: none; }
    #keys { display: block; background: #0c181f; touch-action: pan-x; user-select: none; }
    #keys div { display: flex; overflow-x: auto; scrollbar-width: none; height: 46px; }
    #keys button { flex: 1 0 auto; min-width: 44px; margin: 2px; padding: 0 6px; border-radius: 4px;
      background: #1d2b34; color: #e6e8eb; font: 15px "Roboto Mono", monospace; }
    #keys small { margin-left: 5px; color: #9aa4ad; }
  }
  @media (pointer: coarse) and (orientation: landscape) { #keys { display: flex; } #keys div { flex: 1; } }
</style>
<script>
  let socket;
  const heard = {page: (title) => { document.title = title; }};  // kind of message -> its handler
  WebSocket = class extends WebSocket {
    constructor(url) {
      super(url);
      socket = this;
      this.addEventListener("message", ({data}) => {
        const [kind, ...rest] = typeof data === "string" ? JSON.parse(data) : [];
        if (Object.hasOwn(heard, kind)) heard[kind](...rest);
      });
    }
  };
  document.addEventListener("DOMContentLoaded", () => {
    const terminal = document.getElementById("terminal").dataset;
    terminal.sessionWebsocketUrl =
      (location.protocol === "https:" ? "wss:" : "ws:") + "//" + location.host + "SOCKET";
    terminal.fontSize = fitting();
  });
</script>
"""

# For a page that may type. A key is named as in the status bar; "esc r" is two keys, one after the other. A button
# does not take the focus from the terminal: the phone's keyboard would close.
TOUCH = r"""
<script>
  const SENT = {
    esc: "\x1b", tab: "\t", enter: "\r", space: " ", "←": "\x1b[D", "↑": "\x1b[A", "↓": "\x1b[B", "→": "\x1b[C",
    left: "\x1b[D", up: "\x1b[A", down: "\x1b[B", right: "\x1b[C", home: "\x1b[H", end: "\x1b[F",
    "ctrl+g": "\x07", "ctrl+j": "\n",
  };
  const known = ([key]) => key.split(" ").every((name) => name.length === 1 || Object.hasOwn(SENT, name));
  const keyButton = ([key, what]) => {
    const button = document.createElement("button");
    const sent = key.split(" ").map((name) => SENT[name] ?? name).join("");
    button.append(key, Object.assign(document.createElement("small"), {textContent: what ?? ""}));
    button.onclick = () => socket.send(JSON.stringify(["stdin", sent]));
    return button;
  };
  addEventListener("DOMContentLoaded", () => {
    const keys = document.createElement("div"), always = document.createElement("div");
    const here = document.createElement("div"), terminal = document.getElementById("terminal");
    keys.id = "keys";
    keys.append(here, always);
    keys.onmousedown = (event) => event.preventDefault();
    document.body.append(keys);
    always.append(...["esc", "tab", "←", "↑", "↓", "→", "enter", "ctrl+g"].map((key) => keyButton([key])));
    heard.page = (title, hints) => {
      document.title = title;
      here.replaceChildren(...hints.filter(known).map(keyButton));
    };
    let from = 0;
    terminal.addEventListener("touchstart", ({touches: [at]}) => { from = at.clientY; }, {passive: true});
    terminal.addEventListener("touchmove", ({touches: [at]}) => {
      if (Math.abs(at.clientY - from) < 16) return;
      const wheel = {deltaY: from - at.clientY, clientX: at.clientX, clientY: at.clientY, bubbles: true};
      terminal.querySelector(".xterm-screen").dispatchEvent(new WheelEvent("wheel", {...wheel, cancelable: true}));
      from = at.clientY;
    }, {passive: true});
    visualViewport.addEventListener("resize", () => {  // a keyboard covers a part of the window
      document.body.style.height = visualViewport.scale === 1 ? visualViewport.height + "px" : "";
      dispatchEvent(new Event("resize"));
    });
  });
</script>
"""


def fitting(largest: int = LARGEST) -> str:
    """Returns the script that chooses the font: the largest with which 80 columns fit, within SMALLEST and `largest`.
    In a narrower window there are fewer columns."""
    size = f"Math.max({SMALLEST}, Math.min({largest}, innerWidth / (80 * 0.605)))"
    return f"<script>const fitting = () => String(Math.floor(10 * {size}) / 10);</script>"


def page(socket_path: str, more: str) -> str:
    """Returns textual-serve's page for the websocket at `socket_path`; `more` is added to its head."""
    templates = Environment(loader=FileSystemLoader(asset_folder("templates")), autoescape=True)
    text = templates.get_template("app_index.html").render(
        config={"static": {"url": "/static/"}}, application={"name": "minitui"}, font_size=16, app_websocket_url=""
    )
    text = text.replace("https://fonts.googleapis.com/css?family=Roboto%20Mono", "/static/css/xterm.css")
    return text.replace("</head>", HEAD.replace("SOCKET", socket_path) + more + "</head>", 1)


def asset_folder(name: str) -> Path:
    """Returns one of textual-serve's folders: "static" or "templates"."""
    return Path(textual_serve.__file__).parent / name
