// Chat: messages and their branches, answers as they arrive, tools tried by hand.

import * as store from "./conversations.js";
import {copy, render} from "./markdown.js";
import {readSettings, showSettings} from "./settings.js";

const NAMES = {user: "You", assistant: "Assistant", tool: "Tool"};

export function mount(element, {el, json, open, readEvents, request, say}) {
  const quiet = (name, onclick, more) => el("button", {class: "quiet", onclick, ...more}, name);
  let chats = [], chat = store.create(), models = [];
  const runs = new Map();    // conversation -> AbortController of its answer
  const shown = new Map();   // node -> function that shows its changes

  const picker = el("select", {"aria-label": "Model", onchange: event => { chat.settings.model = event.target.value; save(); }});
  const servers = el("span", {class: "dim"});
  const list = el("ul", {class: "chats"});
  const side = el("aside", {class: "side", "aria-label": "Conversations", hidden: innerWidth < 900});
  const settings = el("aside", {class: "side right", "aria-label": "Settings", hidden: innerWidth < 1200, tabindex: "-1"});
  const log = el("div", {class: "log", tabindex: "-1"});
  const live = el("p", {class: "hidden-text", role: "status"});
  const input = el("textarea", {rows: 3, "aria-label": "Message", placeholder: "Message (Enter sends, Shift+Enter begins a line)", onkeydown: event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  }});
  const button = el("button", {class: "primary", onclick: () => (runs.has(chat) ? stop() : send())}, "Send");
  const file = el("input", {type: "file", accept: ".json,application/json", hidden: true, "aria-label": "File of conversations", onchange: importFile});
  const toggle = (name, panel, other) => {
    const made = quiet(name, () => {
      panel.hidden = !panel.hidden;
      if (innerWidth < 900) other.hidden = true;
    });
    const show = () => made.setAttribute("aria-expanded", String(!panel.hidden));
    new MutationObserver(show).observe(panel, {attributes: true});
    show();
    return made;
  };
  side.append(
    el("button", {class: "primary", onclick: () => show(store.create(chat.settings), true)}, "New chat"), list,
    el("div", {class: "row"}, el("button", {onclick: () => store.exportFile([chat])}, "Export"), el("button", {onclick: () => store.exportFile(chats)}, "Export all"),
      el("button", {onclick: () => file.click()}, "Import"), file));
  element.classList.add("chat");
  element.append(side, el("div", {class: "talk"},
    el("div", {class: "row tools"}, toggle("Chats", side, settings), picker, servers, el("span", {class: "space"}), toggle("Settings", settings, side)),
    log, live, el("div", {class: "composer"}, input, button)), settings);
  element.addEventListener("keydown", event => { if (event.key === "Escape" && runs.has(chat)) stop(); });

  async function start() {
    show(chat);
    try {
      chats = await store.load();
      if (chats.length && !chat.nodes.length) show(chats[0]);
    } catch (error) { say(`Conversations are not kept: ${error.message}`); }
    try {
      models = (await json("v1/models")).data.map(model => model.id);
      showModels();
      const index = await json("./", {headers: {Accept: "application/json"}});
      if (index.servers) servers.textContent = `${index.servers.filter(server => server.ready).length} of ${index.servers.length} replicas ready`;
    } catch (error) { say(error.message); }
  }

  const save = async (changed = chat) => {
    try { if (changed.nodes.length) await store.save(changed); } catch (error) { say(error.message); }
  };

  function showModels() {
    if (!models.includes(chat.settings.model)) chat.settings.model = models[0] ?? "";
    picker.replaceChildren(...models.map(name => el("option", {value: name}, name)));
    picker.value = chat.settings.model;
  }

  /** Show a conversation. */
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
    try {
      const added = store.importText(await file.files[0].text());
      for (const one of added) await store.save(one);
      chats = [...added, ...chats];
      if (added.length) show(added[0], true);
      say(`Imported ${added.length} conversations.`);
    } catch (error) { say(error.message); }
    file.value = "";
  }

  /** Show the messages of the current branch. */
  function draw() {
    shown.clear();
    log.replaceChildren(...store.path(chat).map(message));
    if (!chat.nodes.length) log.append(el("p", {class: "dim center"}, "Ask something. Conversations stay in this browser."));
    button.textContent = runs.has(chat) ? "Stop" : "Send";
  }

  function message(i) {
    const owner = chat, node = owner.nodes[i], others = store.branches(owner, node.parent), place = others.indexOf(i);
    const step = by => { store.select(owner, others[place + by]); save(); draw(); };
    const head = el("header", {class: "row"}, el("strong", {}, NAMES[node.role]), el("span", {class: "dim"}, node.model ?? ""), el("span", {class: "space"}));
    if (others.length > 1) {
      head.append(quiet("‹", () => step(-1), {"aria-label": "Earlier branch", disabled: place === 0}),
        el("span", {"aria-label": `Branch ${place + 1} of ${others.length}`, role: "img"}, `${place + 1}/${others.length}`),
        quiet("›", () => step(1), {"aria-label": "Later branch", disabled: place === others.length - 1}));
    }
    const body = el("div", {class: "body"}), thought = el("div", {class: "body"}), tokens = el("div", {hidden: true}), extra = el("div"), meta = el("span", {class: "dim"});
    const reasoning = el("details", {class: "card reasoning", hidden: true}, el("summary", {}, "Reasoning"), thought);
    const copying = quiet("Copy", () => copy(node.content, copying));
    const counted = quiet("Tokens", () => {
      const isOn = tokens.hidden;
      [tokens.hidden, body.hidden] = [!isOn, isOn];
      counted.setAttribute("aria-pressed", String(isOn));
      if (isOn) tokens.replaceChildren(tokenView(node.logprobs));
    }, {"aria-pressed": "false"});
    const foot = el("footer", {class: "row"}, meta, el("span", {class: "row actions"}, counted, copying, quiet("Edit", () => edit(i, body, foot)),
      node.role === "assistant" ? quiet("Regenerate", () => answer(node.parent)) : null,
      node.request ? quiet("Explain", () => open("explain", node.request)) : null));
    const update = () => {
      if (node.role === "assistant") render(body, node.content); else body.textContent = node.content;
      reasoning.hidden = !node.reasoning;
      if (node.reasoning) render(thought, node.reasoning);
      counted.hidden = !node.logprobs?.length;
      meta.textContent = node.meta ?? "";
      const isRunning = runs.has(owner) && owner.leaf === i;
      extra.replaceChildren(...(node.calls ?? []).map(callCard), el("p", {class: "error", hidden: !node.error}, node.error ?? ""),
        node.calls && !isRunning && owner.leaf === i ? resultForm(i) : "");
      article.setAttribute("aria-busy", String(isRunning));
    };
    const article = el("article", {class: `message ${node.role}`, "aria-label": NAMES[node.role]}, head, reasoning, body, tokens, extra, foot);
    shown.set(node, update);
    update();
    return article;
  }

  const callCard = call => {
    let text = call.arguments;
    try { text = JSON.stringify(JSON.parse(text), null, 2); } catch { /* not complete */ }
    return el("div", {class: "card"}, el("p", {}, "Call of ", el("code", {}, call.name)), el("pre", {tabindex: "0", role: "group", "aria-label": "Arguments"}, text));
  };

  /** Return the form in which the visitor types the results of an answer's calls. */
  function resultForm(i) {
    const calls = chat.nodes[i].calls;
    const areas = calls.map(call => el("textarea", {rows: 2, class: "mono", "aria-label": `Result of ${call.name}`, placeholder: `Result of ${call.name}`}));
    return el("div", {class: "results"}, ...areas, el("button", {class: "primary", onclick: () => {
      let last = i;
      calls.forEach((call, k) => { last = store.add(chat, last, {role: "tool", call_id: call.id, content: areas[k].value}); });
      answer(last);
    }}, "Send results"));
  }

  /** Show tokens; the one under the pointer, or chosen with the arrow keys, shows its alternatives. */
  function tokenView(rows) {
    const percent = logprob => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
    const visible = text => text.replaceAll("\n", "↵").replaceAll(" ", "␣") || "(empty)";
    const tip = el("table", {class: "tip", hidden: true});
    const about = (span, [token, logprob, top]) => {
      tip.replaceChildren(el("caption", {}, `${visible(token)} ${percent(logprob)}`), ...top.map(([other, value]) =>
        el("tr", {}, el("td", {}, visible(other)), el("td", {class: "number"}, percent(value)), el("td", {class: "number"}, value.toFixed(3)))));
      tip.hidden = false;
      tip.style.left = `${Math.max(0, Math.min(span.offsetLeft, span.offsetParent.clientWidth - tip.offsetWidth))}px`;
      tip.style.top = `${span.offsetTop + span.offsetHeight + 2}px`;
    };
    const hide = () => { tip.hidden = true; };
    const spans = rows.map((row, i) => {
      const span = el("span", {role: "option", class: `token p${Math.min(4, Math.floor(-row[1] / 0.6))}`, tabindex: i ? "-1" : "0", "aria-selected": "false",
        "aria-label": `${visible(row[0])} ${percent(row[1])}; ${row[2].map(([other, value]) => `${visible(other)} ${percent(value)}`).join(", ")}`,
        onmouseenter: () => about(span, row), onfocus: () => about(span, row), onmouseleave: hide, onblur: hide}, row[0]);
      return span;
    });
    const view = el("div", {class: "tokens", role: "listbox", "aria-label": "Tokens of the answer", onkeydown: event => {
      const next = spans[spans.indexOf(document.activeElement) + ({ArrowRight: 1, ArrowLeft: -1}[event.key] ?? NaN)];
      if (!next) return;
      spans.forEach(span => { span.tabIndex = span === next ? 0 : -1; });
      next.focus();
      event.preventDefault();
    }}, ...spans);
    return el("div", {class: "tokens-box"}, view, tip);
  }

  /** Let the visitor change a message, as a new branch. */
  function edit(i, body, foot) {
    const owner = chat, node = owner.nodes[i];
    const area = el("textarea", {rows: Math.min(16, node.content.split("\n").length + 2), "aria-label": "Edited message", value: node.content});
    const keep = () => {
      const {role, call_id} = node;
      store.add(owner, node.parent, call_id ? {role, call_id, content: area.value} : {role, content: area.value});
      if (role === "assistant") { save(); draw(); } else answer(owner.leaf);
    };
    body.hidden = false;
    body.replaceChildren(area, el("div", {class: "row end"}, el("button", {onclick: draw}, "Cancel"), el("button", {class: "primary", onclick: keep}, node.role === "assistant" ? "Save" : "Send")));
    foot.hidden = true;
    area.focus();
  }

  function send() {
    const content = input.value;
    if (!content.trim() || runs.has(chat)) return;
    try { readSettings(chat.settings); } catch (error) { say(error.message); return; }
    input.value = "";
    if (!chats.includes(chat)) chats.unshift(chat);
    answer(store.add(chat, chat.leaf, {role: "user", content}));
  }

  function stop() {
    runs.get(chat).abort();
    input.focus();
  }

  /** Return a message as the API takes it. */
  function wire({role, content, reasoning, calls, call_id}) {
    const made = {role, content};
    if (reasoning) made.reasoning_content = reasoning;
    if (calls) made.tool_calls = calls.map(call => ({id: call.id, type: "function", function: {name: call.name, arguments: call.arguments}}));
    if (call_id) made.tool_call_id = call_id;
    return made;
  }

  /** Generate the answer, or the n answers, to a node. */
  async function answer(parent) {
    const owner = chat, nodes = new Map(), abort = new AbortController(), begin = performance.now();
    if (runs.has(owner)) return;
    let fields;
    try { fields = readSettings(owner.settings); } catch (error) { say(error.message); draw(); return; }
    const {system, model} = owner.settings;
    const messages = store.path(owner, parent).map(i => wire(owner.nodes[i]));
    if (system.trim()) messages.unshift({role: "system", content: system});
    const body = {model: model || undefined, messages, stream: true, stream_options: {include_usage: true}, ...fields};
    const nodeOf = index => {
      if (!nodes.has(index)) nodes.set(index, owner.nodes[store.add(owner, parent, {role: "assistant", content: "", model})]);
      return nodes.get(index);
    };
    runs.set(owner, abort);
    nodeOf(0);
    show(owner);
    save(owner);
    let frame = 0, first = 0;
    const later = () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
        for (const node of nodes.values()) shown.get(node)?.();
        if (atEnd && chat === owner) log.scrollTop = log.scrollHeight;
      });
    };
    try {
      const response = await request("v1/chat/completions", {body, signal: abort.signal});
      for await (const {data} of readEvents(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        nodeOf(0).request = chunk.id ?? "";
        for (const choice of chunk.choices ?? []) merge(nodeOf(choice.index), choice);
        first ||= performance.now();
        if (chunk.usage) nodeOf(0).meta = describe(chunk.usage, first - begin, performance.now() - begin);
        later();
      }
    } catch (error) {
      if (abort.signal.aborted) nodeOf(0).finish = "stopped"; else nodeOf(0).error = error.message;
    }
    cancelAnimationFrame(frame);
    runs.delete(owner);
    for (const node of nodes.values()) if (!["stop", "tool_calls", undefined].includes(node.finish)) node.meta = [node.finish, node.meta].filter(Boolean).join(" · ");
    owner.updated = Date.now();
    await save(owner);
    if (chat !== owner) return;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    draw();
    if (atEnd) log.scrollTop = log.scrollHeight;
    const last = nodeOf(0);
    live.textContent = last.error ? `Error: ${last.error}` : `Answer: ${last.content.slice(0, 2000)}`;
  }

  /** Add a chunk's choice to a message. */
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
    for (const one of logprobs?.content ?? []) (node.logprobs ??= []).push([one.token, one.logprob, (one.top_logprobs ?? []).map(other => [other.token, other.logprob])]);
    if (finish_reason) node.finish = finish_reason;
  }

  function describe({prompt_tokens, completion_tokens, prompt_tokens_details}, wait, time) {
    const cached = prompt_tokens_details?.cached_tokens ?? 0;
    return `prompt ${prompt_tokens} tokens${cached ? `, ${cached} from the cache` : ""} · answer ${completion_tokens} tokens in ${(time / 1000).toFixed(2)} s, the first after ${Math.round(wait)} ms`;
  }

  start();
  if (document.activeElement === document.body) input.focus();
}
