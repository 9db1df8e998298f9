// Requests to the server with the visitor's key, and helpers that build elements from text.

const SPACES = {svg: "http://www.w3.org/2000/svg", math: "http://www.w3.org/1998/Math/MathML"};

/** Make an element: el("p", {class: "note", onclick: f}, "text", child), el("svg:path", {d}).
 * Texts become text nodes; null is left out; lists of children may be nested.
 * An attribute is a string or number, a boolean, or (on...) a function. */
export function el(name, attributes = {}, ...children) {
  const [space, local] = name.includes(":") ? name.split(":") : [null, name];
  const node = space ? document.createElementNS(SPACES[space], local) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "value") node.value = value;
    else if (typeof value === "boolean") node.toggleAttribute(key, value);
    else if (value !== undefined && value !== null) node.setAttribute(key, value);
  }
  for (const child of children.flat(3)) if (child !== null && child !== undefined) node.append(child);
  return node;
}

export const byId = id => document.getElementById(id);
export const scroll = (label, content) => el("div", {class: "scroll", tabindex: 0, role: "group", "aria-label": label}, content);
/** Return a table. A cell is a text, an element, a number, or {number: text or elements}. */
export function table(heads, rows, label) {
  const cell = value => el("td", typeof value === "number" || value?.number !== undefined ? {class: "number"} : {}, value?.number ?? value);
  return el("table", {"aria-label": label}, el("thead", {}, el("tr", {}, heads.map(head => el("th", {scope: "col"}, head)))),
    el("tbody", {}, rows.map(cells => el("tr", {}, cells.map(cell)))));
}

export const note = text => el("p", {class: "dim"}, text);
export const whole = value => Math.round(value).toLocaleString("en");
export const percent = share => `${(100 * share).toFixed(1)} %`;
export const ms = value => `${value.toLocaleString("en", {maximumFractionDigits: value < 10 ? 2 : 0})} ms`;
export const clock = seconds => new Date(seconds * 1000).toLocaleTimeString();
/** Show a message for a few seconds; screen readers read it. */
export function say(text) {
  const status = byId("status");
  status.textContent = text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { status.textContent = ""; }, 6000);
}

/** Ask for the key; return false if the visitor cancels. One dialog serves all who wait. */
export function askKey(why) {
  askKey.open ??= new Promise(resolve => {
    const dialog = byId("ask"), input = byId("ask-key");
    byId("ask-text").textContent = why ?? "This server needs an API key. The browser keeps it until you close this tab.";
    input.value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      askKey.open = null;
      if (dialog.returnValue === "ok") sessionStorage.setItem("key", input.value.trim());
      resolve(dialog.returnValue === "ok");
    }, {once: true});
    dialog.showModal();
  });
  return askKey.open;
}

/** Send a request; `path` has no leading slash, so that it works at any path of a proxy.
 * `body` (an object) makes it a POST. Raises Error with the server's message and the HTTP status;
 * asks for the key if the server wants one. */
async function request(path, {body, signal, headers} = {}) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers: {...(body && {"Content-Type": "application/json"}), ...(key && {Authorization: `Bearer ${key}`}), ...headers},
      body: body && JSON.stringify(body), signal,
    });
    if (response.ok) return response;
    const text = await response.text();
    let error = {message: `${response.status} ${response.statusText}`};
    try { error = JSON.parse(text).error ?? error; } catch { /* not JSON */ }
    const again = response.status === 401 && await askKey(key ? `${error.message} Give another one.` : undefined);
    if (!again) throw Object.assign(new Error(error.message), {status: response.status});
  }
}

/** Yield the events {event, data} of a response; they end with the response. */
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", event = {data: []};
  try {
    for (;;) {
      const {done, value} = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        const [, field, text] = /^([^:]*):? ?(.*)$/s.exec(line);
        if (field === "data") event.data.push(text);
        else if (field === "event") event.event = text;
        else if (line === "") {
          if (event.data.length) yield {...event, data: event.data.join("\n")};
          event = {data: []};
        }
      }
    }
  } finally { reader.cancel().catch(() => {}); }
}

/** What each view's `mount(element, api)` receives. */
export const api = {
  el, say, readEvents, json: async (path, options) => (await request(path, options)).json(),
  async* events(path, options) { yield* readEvents(await request(path, options)); },
  /** Open a view, with a text for its `show`: open("explain", "chatcmpl-1"). */
  open(view, argument = "") {
    // With a slash: the browser would move the focus to an element of that id.
    location.hash = `/${view}${argument && `/${encodeURIComponent(argument)}`}`;
  },
};
