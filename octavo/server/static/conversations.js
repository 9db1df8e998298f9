// Conversations: trees of messages, kept in the browser (IndexedDB), exported and imported as JSON.
// A conversation is {id, title, updated, settings, nodes, leaf}. A node is a message with the index
// of its `parent` (-1: none), which precedes it; `leaf` is the index of the last shown node.

const MAX_CONVERSATIONS = 200, MAX_CHARS = 8_000_000, MAX_NODES = 5000;
const TEXTS = ["content", "reasoning", "model", "finish", "error", "call_id", "request", "meta"];
export const SETTINGS = {model: "", system: "", schema: "", tools: "", choice: "auto", logprobs: "0", other: "", sampling: {}};

export const create = settings => ({
  id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "New chat", updated: Date.now(),
  settings: structuredClone(settings ?? SETTINGS), nodes: [], leaf: -1,
});

/** Add a message after a node; return its index. */
export function add(chat, parent, message) {
  chat.nodes.push({...message, parent});
  chat.leaf = chat.nodes.length - 1;
  if (message.role === "user" && parent < 0) chat.title = message.content.trim().slice(0, 60) || "New chat";
  return chat.leaf;
}

/** Return the indices of the messages from the first one to a node. */
export function path(chat, leaf = chat.leaf) {
  const found = [];
  for (let i = leaf; i >= 0; i = chat.nodes[i].parent) found.unshift(i);
  return found;
}

/** Return the indices of the messages that continue a node (-1: that begin the conversation). */
export const branches = (chat, parent) => [...chat.nodes.keys()].filter(i => chat.nodes[i].parent === parent);

/** Show a node, with the newest messages after it. */
export function select(chat, node) {
  for (let next = node; next !== undefined; next = branches(chat, next).at(-1)) chat.leaf = next;
}

let database;
function store(mode, work) {
  database ??= new Promise((resolve, reject) => {
    const opening = indexedDB.open("octavo", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", {keyPath: "id"});
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
  return database.then(open => new Promise((resolve, reject) => {
    const request = work(open.transaction("conversations", mode).objectStore("conversations"));
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  }));
}

/** Return the kept conversations, the newest first; delete those beyond the limit. */
export async function load() {
  const all = (await store("readonly", kept => kept.getAll())).sort((a, b) => b.updated - a.updated);
  for (const old of all.slice(MAX_CONVERSATIONS)) await remove(old);
  return all.slice(0, MAX_CONVERSATIONS);
}

/** Keep a conversation. Raises Error if it is too long. */
export async function save(chat) {
  if (JSON.stringify(chat).length > MAX_CHARS) throw new Error("This conversation is too long for the browser's memory; export it.");
  await store("readwrite", kept => kept.put(chat));
}

export const remove = chat => store("readwrite", kept => kept.delete(chat.id));

/** Save conversations as a file of the visitor. */
export function exportFile(chats) {
  const text = JSON.stringify({format: "octavo-conversations", version: 1, conversations: chats}, null, 1);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], {type: "application/json"}));
  link.download = "octavo-conversations.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Return the conversations of a file's text. Only known fields of the right type are taken.
 * Raises Error, which names what is wrong. */
export function importText(text) {
  const check = (good, what) => { if (!good) throw new Error(`The file is not one of Octavo's conversations: ${what}.`); };
  const isText = value => typeof value === "string", isList = (value, most, test = () => true) => Array.isArray(value) && value.length <= most && value.every(test);
  const isRow = pair => isList(pair, 3) && isText(pair[0]) && Number.isFinite(pair[1]);
  const pick = (names, from, to) => { for (const name of names) if (isText(from?.[name])) to[name] = from[name]; };
  let file = null;
  check(text.length <= MAX_CHARS * 4, "it is too large");
  try { file = JSON.parse(text); } catch { check(false, "it is not JSON"); }
  check(file?.format === "octavo-conversations" && file.version === 1, "format or version");
  check(isList(file.conversations, MAX_CONVERSATIONS), "conversations");
  return file.conversations.map((given, number) => {
    const where = `conversation ${number + 1}`, chat = create();
    check(isList(given?.nodes, MAX_NODES), `nodes of ${where}`);
    given.nodes.forEach((node, i) => {
      check(["user", "assistant", "tool"].includes(node?.role) && isText(node.content), `message ${i + 1} of ${where}`);
      check(Number.isInteger(node.parent) && node.parent >= -1 && node.parent < i, `the parent of message ${i + 1} of ${where}`);
      const {role, calls, logprobs} = node, message = {role};
      pick(TEXTS, node, message);
      check(calls === undefined || isList(calls, MAX_NODES, call => [call?.id, call?.name, call?.arguments].every(isText)), `calls of ${where}`);
      if (calls) message.calls = calls.map(({id, name, arguments: given}) => ({id, name, arguments: given}));
      check(logprobs === undefined || isList(logprobs, MAX_CHARS, row => isRow(row) && isList(row[2], MAX_NODES, isRow)), `logprobs of ${where}`);
      if (logprobs) message.logprobs = logprobs;
      add(chat, node.parent, message);
    });
    check(Number.isInteger(given.leaf) && given.leaf >= -1 && given.leaf < given.nodes.length, `leaf of ${where}`);
    chat.leaf = given.leaf;
    pick(["title"], given, chat);
    pick(Object.keys(SETTINGS), given.settings, chat.settings);
    pick(Object.keys(given.settings?.sampling ?? {}), given.settings?.sampling, chat.settings.sampling);
    return chat;
  });
}
