// Requests to the server with the visitor's key, and helpers that build elements from text.

const SPACES = {svg: "http://www.w3.org/2000/svg", math: "http://www.w3.org/1998/Math/MathML"};

/** Make an element: el("p", {class: "note", onclick: f}, "text", child), el("svg:path", {d}).
 * Texts become text nodes; null is left out; lists of children may be nested. An attribute is a string or number, a boolean, or (on...) a function. */
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

/** Error of a request: the message of the server, its HTTP status, its code. */
export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Show a message for a few seconds; screen readers read it. */
export function say(text) {
  const status = document.getElementById("status");
  status.textContent = text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { status.textContent = ""; }, 6000);
}

/** Ask for the key; return false if the visitor cancels. One dialog serves all who wait. */
export function askKey(why) {
  askKey.open ??= new Promise(resolve => {
    const dialog = document.getElementById("ask"), input = document.getElementById("ask-key");
    document.getElementById("ask-text").textContent = why ??
      "This server needs an API key. The browser keeps it until you close this tab.";
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
 * `body` (an object) makes it a POST. Raises ApiError; asks for the key if the server wants one. */
async function request(path, {body, signal, headers = {}, method} = {}) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const response = await fetch(path, {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers: {
        ...(body === undefined ? {} : {"Content-Type": "application/json"}),
        ...(key ? {Authorization: `Bearer ${key}`} : {}),
        ...headers,
      },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
    if (response.ok) return response;
    const text = await response.text();
    let error = {message: `${response.status} ${response.statusText}`};
    try { error = JSON.parse(text).error ?? error; } catch { /* not JSON */ }
    if (response.status === 401) {
      if (await askKey(key ? `${error.message} Give another one.` : undefined)) continue;
    }
    throw new ApiError(error.message, response.status, error.code);
  }
}

/** Yield the events {event, id, data} of a response; they end with the response. */
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
        if (line === "") {
          if (event.data.length) yield {...event, data: event.data.join("\n")};
          event = {data: []};
          continue;
        }
        const [, field, text] = /^([^:]*):? ?(.*)$/s.exec(line);
        if (field === "data") event.data.push(text);
        else if (field === "event" || field === "id") event[field] = text;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** What each view's `mount(element, api)` receives. */
export const api = {
  el, say, request, readEvents,
  /** Return the JSON of a route. */
  json: async (path, options) => (await request(path, options)).json(),
  /** Yield the events of a route. */
  async* events(path, options) { yield* readEvents(await request(path, options)); },
  /** Open a view, with a text for its `show`: open("explain", "chatcmpl-1"). */
  open(view, argument = "") {
    // With a slash: the browser would move the focus to an element of that id.
    location.hash = `/${view}${argument && `/${encodeURIComponent(argument)}`}`;
  },
};
