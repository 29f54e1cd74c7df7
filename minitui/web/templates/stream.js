// `show(state)` draws a state. A lost stream is opened again after a random time: two hundred phones come back together.
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
  for (const each of parts) if (each.scrollWidth > each.clientWidth) each.textContent = "";  // else cut within a letter
  put("step", "step" in bar ? "step " + bar.step + ": " + bar.tokens + " of " + bar.budget + " tokens" : "");
};
