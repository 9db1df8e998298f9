// Requests to the server with the visitor's key, and helpers that build elements from text.

const SPACES = {svg: "http://www.w3.org/2000/svg", math: "http://www.w3.org/1998/Math/MathML"};
/** Make an element: el("p.note", {onclick: f}, "text", child), el("svg:path", {d}).
 * Null is left out; lists of children may be nested. */
export function el(name, ...children) {
  const [tag, ...classes] = name.split("."), [local, space] = tag.split(":").reverse();
  const node = space ? document.createElementNS(SPACES[space], local) : document.createElement(local);
  const attributes = children[0]?.constructor === Object ? children.shift() : {};
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (typeof value === "boolean") node.toggleAttribute(key, value);
    else if (value !== undefined && value !== null) node.setAttribute(key, value);
  }
  node.append(...children.flat(3).filter(child => child !== null && child !== undefined));
  return node;
}
export const byId = id => document.getElementById(id);
/** Return the elements in another that have a `data-part`, by its name. */
export const parts = element => Object.fromEntries([...element.querySelectorAll("[data-part]")].map(part => [part.dataset.part, part]));
const sentences = parts(byId("sentences").content);
/** Return a sentence of index.html with values in its braces; without one, its name. */
export const sentence = (name, values) => (sentences[name]?.textContent ?? name).replace(/{(\w+)}/g, (_, key) => values[key]);
/** Return a copy of a template, with texts in its parts. */
export function fromTemplate(id, texts = {}) {
  const node = byId(id).content.firstElementChild.cloneNode(true), found = parts(node);
  for (const [name, text] of Object.entries(texts)) found[name].textContent = text;
  return node;
}
export const scroll = (label, content) => el("div.scroll", {tabindex: 0, role: "group", "aria-label": label}, content);
/** Return a table; `heads` are a list, or the name of a sentence. A cell may be {number: text or elements}. */
export function table(heads, rows, label) {
  const names = typeof heads === "string" ? sentence(heads).split(", ") : heads;
  const cell = value => el(typeof value === "number" || value?.number !== undefined ? "td.number" : "td", value?.number ?? value);
  return el("table", {"aria-label": label}, el("thead", el("tr", names.map(name => el("th", {scope: "col"}, name)))),
    el("tbody", rows.map(cells => el("tr", cells.map(cell)))));
}
export const arrow = event => ({ArrowLeft: -1, ArrowRight: 1})[event.key];
export const failure = text => el("p.error", text);
export const whole = value => Math.round(value).toLocaleString("en");
export const percent = share => `${(100 * share).toFixed(1)} %`;
export const ms = value => `${value.toLocaleString("en", {maximumFractionDigits: value < 10 ? 2 : 1})} ms`;
export const clock = seconds => new Date(seconds * 1000).toLocaleTimeString();
export function say(text) {
  const status = byId("status");
  status.textContent = text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { status.textContent = ""; }, 6000);
}
/** Ask for the key; return false if the visitor cancels. */
export function askKey(why) {
  askKey.open ??= new Promise(resolve => {
    const dialog = byId("ask"), input = byId("ask-key");
    byId("ask-text").textContent = why ?? sentence("needsKey");
    input.value = dialog.returnValue = "";
    dialog.onclose = () => {
      askKey.open = null;
      if (dialog.returnValue) sessionStorage.setItem("key", input.value.trim());
      resolve(Boolean(dialog.returnValue));
    };
    dialog.showModal();
  });
  return askKey.open;
}
/** Send a request, or POST a body: an object or a form. `path` has no leading slash, for proxies.
 * Raises Error with the server's message and HTTP status; asks for the key if the server wants one. */
async function request(path, {body, signal} = {}) {
  const isForm = body instanceof FormData;
  for (;;) {
    const key = sessionStorage.getItem("key");
    const response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers: {...(body && !isForm && {"Content-Type": "application/json"}), ...(key && {Authorization: `Bearer ${key}`})},
      body: isForm ? body : body && JSON.stringify(body), signal,
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
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = "", end = false; !end;) {
      const {done, value = ""} = await reader.read(), blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      end = done;
      for (const block of blocks) {
        const {event, data} = Object.fromEntries(block.split("\n").map(line => line.split(/: (.*)/s)));
        if (data) yield {event, data};
      }
    }
  } finally { reader.cancel().catch(() => {}); }
}
export const json = async (path, options) => (await request(path, options)).json();
export async function* events(path, options) { yield* readEvents(await request(path, options)); }
export function open(view, argument = "") {
  // With a slash: the browser would move the focus to an element of that id.
  location.hash = `/${view}${argument && `/${encodeURIComponent(argument)}`}`;
}
