// Chat: messages and their branches, answers as they arrive, tools tried by hand.

import {api, el, percent, say} from "./api.js";
import * as store from "./conversations.js";
import {copy, render} from "./markdown.js";
import {readSettings, showSettings} from "./settings.js";

const NAMES = {user: "You", assistant: "Assistant", tool: "Tool"};
const quiet = (name, onclick, more) => el("button", {class: "quiet", onclick, ...more}, name);
function callCard(call) {
  let text = call.arguments;
  try { text = JSON.stringify(JSON.parse(text), null, 2); } catch { /* not complete */ }
  return el("div", {class: "card"}, el("p", {}, "Call of ", el("code", {}, call.name)),
    el("pre", {tabindex: "0", role: "group", "aria-label": "Arguments"}, text));
}

/** Show tokens; the one under the pointer, or chosen with the arrow keys, shows its alternatives. */
function tokenView(rows) {
  const visible = text => text.replaceAll("\n", "↵").replaceAll(" ", "␣") || "(empty)";
  const probable = ([token, logprob]) => `${visible(token)} ${percent(Math.exp(logprob))}`;
  const tip = el("table", {class: "tip", hidden: true}), hide = () => { tip.hidden = true; };
  const spans = rows.map((row, i) => {
    const [token, logprob, top] = row;
    const show = ({target}) => {
      tip.replaceChildren(el("caption", {}, probable(row)), ...top.map(([other, value]) => el("tr", {}, el("td", {}, visible(other)),
        el("td", {class: "number"}, percent(Math.exp(value))), el("td", {class: "number"}, value.toFixed(3)))));
      tip.hidden = false;
      tip.style.left = `${Math.max(0, Math.min(target.offsetLeft, target.offsetParent.clientWidth - tip.offsetWidth))}px`;
      tip.style.top = `${target.offsetTop + target.offsetHeight + 2}px`;
    };
    return el("span", {role: "option", class: `token p${Math.min(4, Math.floor(-logprob / 0.6))}`, tabindex: i ? "-1" : "0",
      "aria-selected": "false", "aria-label": `${probable(row)}; ${top.map(probable).join(", ")}`,
      onmouseenter: show, onfocus: show, onmouseleave: hide, onblur: hide}, token);
  });
  return el("div", {class: "tokens-box"}, el("div", {class: "tokens", role: "listbox", "aria-label": "Tokens of the answer", onkeydown: event => {
    const next = spans[spans.indexOf(document.activeElement) + ({ArrowRight: 1, ArrowLeft: -1}[event.key] ?? NaN)];
    if (!next) return;
    for (const span of spans) span.tabIndex = span === next ? 0 : -1;
    next.focus();
    event.preventDefault();
  }}, spans), tip);
}

/** Return a message as the API takes it. */
function wire({role, content, reasoning, calls, call_id}) {
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

function describe({prompt_tokens, completion_tokens, prompt_tokens_details: details}, wait, time) {
  const cached = details?.cached_tokens ? `, ${details.cached_tokens} from the cache` : "";
  return `prompt ${prompt_tokens} tokens${cached} · answer ${completion_tokens} tokens in ${(time / 1000).toFixed(2)} s, `
    + `the first after ${Math.round(wait)} ms`;
}
export function mount(element) {
  let chats = [], chat = store.create(), models = [];
  // From conversation to AbortController of its answer; from node to function that shows its changes.
  const runs = new Map(), shown = new Map();
  const picker = el("select", {"aria-label": "Model", onchange: () => { chat.settings.model = picker.value; save(); }});
  const list = el("ul", {class: "chats"});
  const side = el("aside", {class: "side", "aria-label": "Conversations", hidden: innerWidth < 900});
  const settings = el("aside", {class: "side right", "aria-label": "Settings", hidden: innerWidth < 1200, tabindex: "-1"});
  const log = el("div", {class: "log", tabindex: "-1"}), live = el("p", {class: "hidden-text", role: "status"});
  const input = el("textarea", {rows: 3, "aria-label": "Message", placeholder: "Message (Enter sends, Shift+Enter begins a line)", onkeydown: event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  }});
  const button = el("button", {class: "primary", onclick: () => (runs.has(chat) ? stop() : send())}, "Send");
  const file = el("input", {type: "file", accept: ".json", hidden: true, "aria-label": "File of conversations", onchange: importFile});
  const toggle = (name, panel, other) => {
    const made = quiet(name, () => { panel.hidden = !panel.hidden; if (innerWidth < 900) other.hidden = true; });
    const show = () => made.setAttribute("aria-expanded", String(!panel.hidden));
    new MutationObserver(show).observe(panel, {attributes: true});
    show();
    return made;
  };
  side.append(el("button", {class: "primary", onclick: () => show(store.create(chat.settings), true)}, "New chat"), list,
    el("div", {class: "row"}, el("button", {onclick: () => store.exportFile(chats)}, "Export all"),
      el("button", {onclick: () => file.click()}, "Import"), file));
  element.classList.add("chat");
  element.append(side, el("div", {class: "talk"},
    el("div", {class: "row tools"}, toggle("Chats", side, settings), picker, el("span", {class: "space"}), toggle("Settings", settings, side)),
    log, live, el("div", {class: "composer"}, input, button)), settings);
  element.addEventListener("keydown", event => { if (event.key === "Escape" && runs.has(chat)) stop(); });

  async function attempt(work) { try { return await work(); } catch (error) { say(error.message); } }
  async function start() {
    show(chat);
    chats = await attempt(store.load) ?? [];
    if (chats.length && !chat.nodes.length) show(chats[0]);
    models = (await attempt(() => api.json("v1/models")))?.data.map(model => model.id) ?? [];
    if (models.length) showModels();
  }

  const save = (changed = chat) => attempt(() => changed.nodes.length && store.save(changed));
  function showModels() {
    if (!models.includes(chat.settings.model)) chat.settings.model = models[0] ?? "";
    picker.replaceChildren(...models.map(name => el("option", {value: name}, name)));
    picker.value = chat.settings.model;
  }

  function show(next, focus) {
    chat = next;
    if (models.length) showModels();
    showSettings(settings, chat.settings, () => save());
    list.replaceChildren(...chats.map(other => el("li", {class: "row"},
      quiet(other.title, () => show(other, true), {class: "quiet name", "aria-current": other === chat ? "true" : null}),
      quiet("×", () => remove(other), {"aria-label": `Delete ${other.title}`}))));
    draw();
    log.scrollTop = log.scrollHeight;
    if (focus) input.focus();
  }

  async function remove(other) {
    if (!confirm(`Delete “${other.title}”?`)) return;
    runs.get(other)?.abort();
    await store.remove(other);
    chats = chats.filter(kept => kept !== other);
    show(chat === other ? chats[0] ?? store.create(chat.settings) : chat);
  }

  async function importFile() {
    await attempt(async () => {
      const added = store.importText(await file.files[0].text());
      for (const one of added) await store.save(one);
      chats = [...added, ...chats];
      if (added.length) show(added[0], true);
      say(`Imported ${added.length} conversations.`);
    });
    file.value = "";
  }

  function draw() {
    shown.clear();
    log.replaceChildren(...store.path(chat).map(message));
    if (!chat.nodes.length) log.append(el("p", {class: "dim center"}, "Ask something. Conversations stay in this browser."));
    button.textContent = runs.has(chat) ? "Stop" : "Send";
  }

  function message(i) {
    const owner = chat, node = owner.nodes[i], others = store.branches(owner, node.parent), place = others.indexOf(i);
    const head = el("header", {class: "row"}, el("strong", {}, NAMES[node.role]), el("span", {class: "dim"}, node.model), el("span", {class: "space"}));
    const turn = (sign, name, by) => quiet(sign, () => { store.select(owner, others[place + by]); save(); draw(); },
      {"aria-label": name, disabled: others[place + by] === undefined});
    const number = el("span", {"aria-label": `Branch ${place + 1} of ${others.length}`, role: "img"}, `${place + 1}/${others.length}`);
    if (others.length > 1) head.append(turn("‹", "Earlier branch", -1), number, turn("›", "Later branch", 1));
    const body = el("div", {class: "body"}), thought = el("div", {class: "body"}), tokens = el("div", {hidden: true});
    const extra = el("div"), meta = el("span", {class: "dim"});
    const reasoning = el("details", {class: "card reasoning", hidden: true}, el("summary", {}, "Reasoning"), thought);
    const copying = quiet("Copy", () => copy(node.content, copying));
    const counted = quiet("Tokens", () => {
      const isOn = tokens.hidden;
      [tokens.hidden, body.hidden] = [!isOn, isOn];
      counted.setAttribute("aria-pressed", String(isOn));
      if (isOn) tokens.replaceChildren(tokenView(node.logprobs));
    }, {"aria-pressed": "false"});
    const foot = el("footer", {class: "row"}, meta, el("span", {class: "row actions"}, counted, copying,
      quiet("Edit", () => edit(i, body, foot)), node.role === "assistant" ? quiet("Regenerate", () => answer(node.parent)) : null,
      node.request ? quiet("Explain", () => api.open("explain", node.request)) : null));
    const update = () => {
      if (node.role === "assistant") render(body, node.content); else body.textContent = node.content;
      reasoning.hidden = !node.reasoning;
      if (node.reasoning) render(thought, node.reasoning);
      counted.hidden = !node.logprobs?.length;
      meta.textContent = node.meta ?? "";
      const isRunning = runs.has(owner) && owner.leaf === i;
      extra.replaceChildren(...(node.calls ?? []).map(callCard), node.error ? el("p", {class: "error"}, node.error) : "",
        node.calls && !isRunning && owner.leaf === i ? resultForm(i) : "");
      article.setAttribute("aria-busy", String(isRunning));
    };
    const article = el("article", {class: `message ${node.role}`, "aria-label": NAMES[node.role]}, head, reasoning, body, tokens, extra, foot);
    shown.set(node, update);
    update();
    return article;
  }

  function resultForm(i) {
    const {calls} = chat.nodes[i], area = label => el("textarea", {rows: 2, class: "mono", "aria-label": label, placeholder: label});
    const areas = calls.map(({name}) => area(`Result of ${name}`));
    return el("div", {class: "results"}, areas, el("button", {class: "primary", onclick: () => {
      let last = i;
      calls.forEach(({id}, k) => { last = store.add(chat, last, {role: "tool", call_id: id, content: areas[k].value}); });
      answer(last);
    }}, "Send results"));
  }

  /** Let the visitor change a message, as a new branch. */
  function edit(i, body, foot) {
    const owner = chat, {content, parent, role, call_id} = owner.nodes[i], isAnswer = role === "assistant";
    const area = el("textarea", {rows: Math.min(16, content.split("\n").length + 2), "aria-label": "Edited message", value: content});
    const keep = () => {
      store.add(owner, parent, {role, content: area.value, ...(call_id && {call_id})});
      if (!isAnswer) return answer(owner.leaf);
      save();
      draw();
    };
    body.hidden = false;
    body.replaceChildren(area, el("div", {class: "row end"}, el("button", {onclick: draw}, "Cancel"),
      el("button", {class: "primary", onclick: keep}, isAnswer ? "Save" : "Send")));
    foot.hidden = true;
    area.focus();
  }

  /** Return the request's fields of a conversation's settings; undefined, and a message, if one is wrong. */
  function fieldsOf(owner) { try { return readSettings(owner.settings); } catch (error) { say(error.message); } }
  function send() {
    const content = input.value;
    if (!content.trim() || runs.has(chat) || !fieldsOf(chat)) return;
    input.value = "";
    if (!chats.includes(chat)) chats.unshift(chat);
    answer(store.add(chat, chat.leaf, {role: "user", content}));
  }

  function stop() { runs.get(chat).abort(); input.focus(); }

  /** Do work that changes the log; stay at its end. */
  function following(work) {
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    work();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  /** Generate the answer, or the n answers, to a node. */
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
    show(owner);
    save(owner);
    let frame = 0, first = 0;
    const redraw = () => { for (const node of nodes.values()) shown.get(node)?.(); };
    const update = () => { frame = 0; following(redraw); };
    try {
      for await (const {data} of api.events("v1/chat/completions", {body, signal: abort.signal})) {
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
    if (chat !== owner) return;
    following(draw);
    live.textContent = main.error ? `Error: ${main.error}` : `Answer: ${main.content.slice(0, 2000)}`;
  }

  start();
  if (document.activeElement === document.body) input.focus();
}
