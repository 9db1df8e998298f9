// Chat: messages and their branches, answers as they arrive, tools tried by hand.
import {arrow, byId, el, events, failure, fromTemplate, json, open, parts, percent, say, sentence, table} from "./api.js";
import * as store from "./conversations.js";
import {copy, render} from "./markdown.js";
import * as media from "./media.js";
import {readSettings, showSettings} from "./settings.js";
function callCard({name, arguments: given}) {
  try { given = JSON.stringify(JSON.parse(given), null, 2); } catch { /* not complete */ }
  return fromTemplate("call", {name, given});
}
/** Return tokens that show their alternatives. */
function tokenView(rows) {
  const visible = text => text.replaceAll("\n", "↵").replaceAll(" ", "␣") || "(empty)";
  const probable = ([token, logprob]) => `${visible(token)} ${percent(Math.exp(logprob))}`;
  const tip = el("div.tip", {hidden: true, "aria-hidden": "true"}), hide = () => { tip.hidden = true; };
  const spans = rows.map((row, i) => {
    const [token, logprob, top] = row;
    const show = ({target}) => {
      const cells = top.map(other => [visible(other[0]), {number: percent(Math.exp(other[1]))}, {number: other[1].toFixed(3)}]);
      tip.replaceChildren(table([probable(row), "probability", "logprob"], cells));
      tip.hidden = false;
      target.after(tip);
    };
    return el("span", {role: "option", class: `token p${Math.min(4, Math.floor(-logprob / 0.6))}`, tabindex: i ? "-1" : "0",
      "aria-selected": "false", "aria-label": `${probable(row)}; ${top.map(probable).join(", ")}`,
      onmouseenter: show, onfocus: show, onmouseleave: hide, onblur: hide}, token);
  });
  return el("div.tokens-box", el("div.tokens", {role: "listbox", "aria-label": "Tokens of the answer", onkeydown: event => {
    const next = spans[spans.indexOf(document.activeElement) + arrow(event)];
    if (!next) return;
    for (const span of spans) span.tabIndex = span === next ? 0 : -1;
    next.focus();
    event.preventDefault();
  }}, spans));
}
function wire({role, content: text, images, reasoning, calls, call_id}) {
  const content = images ? [...images.map(url => ({type: "image_url", image_url: {url}})), {type: "text", text}] : text;
  const tool_calls = calls?.map(({id, name, arguments: given}) => ({id, type: "function", function: {name, arguments: given}}));
  return {role, content, tool_calls, tool_call_id: call_id, reasoning_content: reasoning};
}
function merge(node, {delta = {}, logprobs, finish_reason}) {
  node.content += delta.content ?? "";
  const reasoning = delta.reasoning ?? delta.reasoning_content;
  if (reasoning) node.reasoning = (node.reasoning ?? "") + reasoning;
  for (const part of delta.tool_calls ?? []) {
    node.calls ??= [];
    const call = node.calls[part.index] ??= {id: part.id ?? `call-${part.index}`, name: "", arguments: ""};
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  for (const {token, logprob, top_logprobs: top = []} of logprobs?.content ?? []) {
    (node.logprobs ??= []).push([token, logprob, top.map(other => [other.token, other.logprob])]);
  }
  if (finish_reason) node.finish = finish_reason;
}
function describe(usage, wait, time) {
  const {cached_tokens: count} = usage.prompt_tokens_details ?? {}, cached = count ? `, ${count} from the cache` : "";
  return sentence("usage", {...usage, cached, seconds: (time / 1000).toFixed(2), wait: Math.round(wait)});
}
const {side, fresh, list, exportOne, exportAll, choose, file, sideButton, picker, settingsButton, log, live, input, button, settings} = parts(byId("chat"));
let chats = [], chat = store.create(), models = [];
// From conversation to AbortController of its answer; from node to function that shows its changes.
const runs = new Map(), shown = new Map();

side.hidden = innerWidth < 900;
settings.hidden = innerWidth < 1200;
fresh.onclick = () => showChat(store.create(chat.settings), true);
exportOne.onclick = () => store.exportFile([chat]);
exportAll.onclick = () => store.exportFile(chats);
choose.onclick = () => file.click();
file.onchange = () => attempt(async () => {
  const text = await file.files[0].text();
  file.value = "";
  const added = store.importText(text);
  for (const one of added) await store.save(one);
  chats = [...added, ...chats];
  if (added.length) showChat(added[0], true);
  say(`Imported conversations: ${added.length}.`);
});
picker.onchange = () => { media.offer(models, chat.settings.model = picker.value); save(); };
button.onclick = () => (runs.has(chat) ? stop() : send());
input.onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
};
byId("chat").onkeydown = event => { if (event.key === "Escape" && runs.has(chat)) stop(); };
for (const [toggle, panel, other] of [[sideButton, side, settings], [settingsButton, settings, side]]) {
  toggle.onclick = () => { panel.hidden = !panel.hidden; if (innerWidth < 900) other.hidden = true; };
  const tell = () => { toggle.ariaExpanded = String(!panel.hidden); };
  new MutationObserver(tell).observe(panel, {attributes: true});
  tell();
}
async function attempt(work) { try { return await work(); } catch (error) { say(error.message); } }
async function start() {
  showChat(chat);
  chats = await attempt(store.load) ?? [];
  if (chats.length && !chat.nodes.length) showChat(chats[0]);
}
export async function show() {
  models = (await attempt(() => json("v1/models")))?.data ?? models;
  if (models.length) showModels();
}
const save = (changed = chat) => attempt(() => changed.nodes.length && store.save(changed));
function showModels() {
  if (!models.some(({id}) => id === chat.settings.model)) chat.settings.model = models[0].id;
  picker.replaceChildren(...models.map(({id, state}) => el("option", {value: id}, state && state !== "loaded" ? `${id} (${state})` : id)));
  picker.value = chat.settings.model;
  media.offer(models, picker.value);
}
function showChat(next, focus) {
  chat = next;
  if (models.length) showModels();
  showSettings(chat.settings, () => save());
  list.replaceChildren(...chats.map(other => el("li.row",
    el("button.quiet.name", {onclick: () => showChat(other, true), "aria-current": other === chat && "true"}, other.title),
    el("button.quiet", {onclick: () => remove(other), "aria-label": `Delete ${other.title}`}, "×"))));
  draw();
  log.scrollTop = log.scrollHeight;
  if (focus) input.focus();
}
async function remove(other) {
  if (!confirm(`Delete “${other.title}”?`)) return;
  runs.get(other)?.abort();
  await store.remove(other);
  chats = chats.filter(kept => kept !== other);
  showChat(chat === other ? chats[0] ?? store.create(chat.settings) : chat);
}
function draw() {
  shown.clear();
  log.replaceChildren(...store.path(chat).map(message));
  button.textContent = runs.has(chat) ? "Stop" : "Send";
}
function message(i) {
  const owner = chat, node = owner.nodes[i], others = store.branches(owner, node.parent), place = others.indexOf(i);
  const article = fromTemplate("message"), part = parts(article), {body, tokens, counted} = part, isAnswer = node.role === "assistant";
  article.classList.add(node.role);
  article.ariaLabel = part.name.textContent = sentence(node.role);
  part.model.textContent = node.model;
  part.branches.hidden = others.length < 2;
  part.number.textContent = `${place + 1}/${others.length}`;
  for (const [turn, target] of [[part.earlier, others[place - 1]], [part.later, others[place + 1]]]) {
    turn.disabled = target === undefined;
    turn.onclick = () => { store.select(owner, target); save(); draw(); };
  }
  part.copying.onclick = () => copy(node.content);
  part.editing.onclick = () => edit(i, body, part.foot);
  part.again.onclick = () => answer(node.parent);
  part.explain.onclick = () => open("explain", node.request);
  counted.onclick = () => {
    const isOn = tokens.hidden;
    [tokens.hidden, body.hidden] = [!isOn, isOn];
    counted.ariaPressed = String(isOn);
    if (isOn) tokens.replaceChildren(tokenView(node.logprobs));
  };
  const update = () => {
    if (isAnswer) render(body, node.content); else body.textContent = node.content;
    part.reasoning.hidden = !node.reasoning;
    if (node.reasoning) render(part.thought, node.reasoning);
    counted.hidden = !node.logprobs?.length;
    part.explain.hidden = !node.request;
    part.meta.textContent = node.meta;
    const isRunning = runs.has(owner) && owner.leaf === i;
    part.extra.replaceChildren(...media.images(node.images), ...(node.calls ?? []).map(callCard), node.error ? failure(node.error) : "",
      node.calls && !isRunning && owner.leaf === i ? resultForm(i) : "");
    article.ariaBusy = String(isRunning);
  };
  shown.set(node, update);
  update();
  return article;
}
function resultForm(i) {
  const {calls} = chat.nodes[i], labels = calls.map(({name}) => `Result of ${name}`);
  const areas = labels.map(label => el("textarea", {rows: 2, class: "mono", "aria-label": label, placeholder: label}));
  return el("div.results", areas, el("button.primary", {onclick: () => {
    let last = i;
    calls.forEach(({id}, k) => { last = store.add(chat, last, {role: "tool", call_id: id, content: areas[k].value}); });
    answer(last);
  }}, "Send results"));
}
function edit(i, body, foot) {
  const owner = chat, {content, parent, role, call_id, images} = owner.nodes[i], isAnswer = role === "assistant";
  const form = fromTemplate("edit", {area: content, keep: isAnswer ? "Save" : "Send"}), {area, cancel, keep} = parts(form);
  cancel.onclick = draw;
  keep.onclick = () => {
    store.add(owner, parent, {role, content: area.value, ...(call_id && {call_id}), ...(images && {images})});
    if (!isAnswer) return answer(owner.leaf);
    save();
    draw();
  };
  body.hidden = false;
  body.replaceChildren(form);
  foot.hidden = true;
  area.focus();
}
/** Return the request's fields that settings stand for; undefined if one is wrong. */
function fieldsOf(owner) { try { return readSettings(owner.settings); } catch (error) { say(error.message); } }
function send() {
  const content = input.value;
  if (runs.has(chat) || !fieldsOf(chat)) return;
  const images = media.take();
  if (!content.trim() && !images.length) return;
  input.value = "";
  if (!chats.includes(chat)) chats.unshift(chat);
  answer(store.add(chat, chat.leaf, {role: "user", content, ...(images.length && {images})}));
}
function stop() { runs.get(chat).abort(); input.focus(); }
function following(work) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  work();
  if (atEnd) log.scrollTop = log.scrollHeight;
}
async function answer(parent) {
  const owner = chat, nodes = new Map(), abort = new AbortController(), begin = performance.now();
  if (runs.has(owner)) return;
  const fields = fieldsOf(owner), {system, model} = owner.settings;
  if (!fields) return draw();
  const messages = store.path(owner, parent).map(i => wire(owner.nodes[i]));
  if (system.trim()) messages.unshift({role: "system", content: system});
  const body = {model: model || undefined, messages, stream: true, stream_options: {include_usage: true}, ...fields};
  const nodeOf = index => {
    if (!nodes.has(index)) nodes.set(index, owner.nodes[store.add(owner, parent, {role: "assistant", content: "", model})]);
    return nodes.get(index);
  };
  runs.set(owner, abort);
  const main = nodeOf(0);
  showChat(owner);
  save(owner);
  let frame = 0, first = 0;
  const redraw = () => { for (const node of nodes.values()) shown.get(node)?.(); };
  const update = () => { frame = 0; following(redraw); };
  try {
    for await (const {data} of events("v1/chat/completions", {body, signal: abort.signal})) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      main.request = chunk.id ?? "";
      for (const choice of chunk.choices ?? []) merge(nodeOf(choice.index), choice);
      first ||= performance.now();
      if (chunk.usage) main.meta = describe(chunk.usage, first - begin, performance.now() - begin);
      frame ||= requestAnimationFrame(update);
    }
  } catch (error) { if (abort.signal.aborted) main.finish = "stopped"; else main.error = error.message; }
  cancelAnimationFrame(frame);
  runs.delete(owner);
  const odd = [...nodes.values()].filter(({finish}) => !["stop", "tool_calls", undefined].includes(finish));
  for (const node of odd) node.meta = [node.finish, node.meta].filter(Boolean).join(" · ");
  owner.updated = Date.now();
  await save(owner);
  if (!models.length) show();
  if (chat !== owner) return;
  following(draw);
  live.textContent = main.error ? `Error: ${main.error}` : `Answer: ${main.content.slice(0, 2000)}`;
}

start();
if (document.activeElement === document.body) input.focus();
