// Conversations: trees of messages, kept in the browser, moved as JSON. A node is a message with the
// index of its `parent` (-1: none), which precedes it; `leaf` is the last shown node.
import {el, sentence} from "./api.js";

const FORMAT = "octavo-conversations", MAX_CONVERSATIONS = 200, MAX_CHARS = 8_000_000;
const TEXTS = ["content", "reasoning", "model", "finish", "error", "call_id", "request", "meta"], CALL = ["id", "name", "arguments"];
export const SETTINGS = {model: "", system: "", schema: "", tools: "", choice: "auto", logprobs: "0", other: "", sampling: {}};
export const create = settings => ({
  id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "New chat", updated: Date.now(),
  settings: structuredClone(settings ?? SETTINGS), nodes: [], leaf: -1,
});
export function add(chat, parent, message) {
  chat.nodes.push({...message, parent});
  chat.leaf = chat.nodes.length - 1;
  if (message.role === "user" && parent < 0) chat.title = message.content.trim().slice(0, 60) || "New chat";
  return chat.leaf;
}
export function path(chat, leaf = chat.leaf) {
  const found = [];
  for (let i = leaf; i >= 0; i = chat.nodes[i].parent) found.unshift(i);
  return found;
}
export const branches = (chat, parent) => [...chat.nodes.keys()].filter(i => chat.nodes[i].parent === parent);
/** Show a node, with the newest messages after it. */
export function select(chat, node) {
  for (let next = node; next !== undefined; next = branches(chat, next).at(-1)) chat.leaf = next;
}

const finished = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});
let database;
async function store(mode, work) {
  const opening = database ? null : indexedDB.open("octavo", 1);
  if (opening) opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", {keyPath: "id"});
  database ??= finished(opening);
  return finished(work((await database).transaction("conversations", mode).objectStore("conversations")));
}
export async function load() {
  const all = (await store("readonly", kept => kept.getAll())).sort((a, b) => b.updated - a.updated);
  for (const old of all.slice(MAX_CONVERSATIONS)) await remove(old);
  return all.slice(0, MAX_CONVERSATIONS);
}
export async function save(chat) {
  if (JSON.stringify(chat).length > MAX_CHARS) throw new Error(sentence("tooLong"));
  await store("readwrite", kept => kept.put(chat));
}
export const remove = chat => store("readwrite", kept => kept.delete(chat.id));

export function exportFile(chats) {
  const text = JSON.stringify({format: FORMAT, version: 1, conversations: chats}, null, 1);
  const link = el("a", {href: URL.createObjectURL(new Blob([text])), download: `${FORMAT}.json`});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
const isText = value => typeof value === "string";
const isIndex = (value, end) => Number.isInteger(value) && value >= -1 && value < end;
const isRow = ([token, logprob]) => isText(token) && Number.isFinite(logprob);
const texts = (names, from = {}) => Object.fromEntries(names.filter(name => isText(from[name])).map(name => [name, from[name]]));
/** Return the conversations of a file's text: known fields of the right type. */
export function importText(text) {
  let where = "it is not JSON";
  const check = (good, what) => { if (!good) throw new Error(where = what); };
  try {
    const {format, version, conversations} = JSON.parse(text);
    check(format === FORMAT && version === 1, "format or version");
    return conversations.map((given, number) => {
      const chat = create(), here = `conversation ${number + 1}`, {nodes, leaf, title, settings = {}} = given;
      where = here;
      nodes.forEach((node, i) => {
        const {role, parent, calls, logprobs, images} = node, message = {role, ...texts(TEXTS, node)}, place = `message ${i + 1} of ${here}`;
        check(["user", "assistant", "tool"].includes(role) && isText(message.content), place);
        check(isIndex(parent, i), `the parent of ${place}`);
        check(!images || images.every(isText), `pictures of ${here}`);
        check(!calls || calls.every(call => CALL.every(name => isText(call[name]))), `calls of ${here}`);
        check(!logprobs || logprobs.every(row => isRow(row) && row[2].every(isRow)), `logprobs of ${here}`);
        add(chat, parent, {...message, ...(calls && {calls: calls.map(call => texts(CALL, call))}), ...(logprobs && {logprobs}), ...(images && {images})});
      });
      check(isIndex(leaf, nodes.length), `leaf of ${here}`);
      const {sampling = {}} = settings, taken = {...texts(Object.keys(SETTINGS), settings), sampling: texts(Object.keys(sampling), sampling)};
      return Object.assign(chat, texts(["title"], {title}), {leaf, settings: {...chat.settings, ...taken}});
    });
  } catch { throw new Error(sentence("noChats", {where})); }
}
