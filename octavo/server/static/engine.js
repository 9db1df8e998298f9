// Engine view: KV blocks, steps and requests, live from /v1/engine/view or from a file of its events.

import {api, clock, el, ms, note, percent, scroll, table, whole} from "./api.js";
import {flags, History, isPrompt, split} from "./engine_history.js";

const RATE_SECONDS = 5, BAD_MS = 2000, BAR = 7, BATCH_HEIGHT = 90, TIMES_HEIGHT = 60;
const WAITS = {
  SEAT: "all seats are taken (max_num_seqs)", BUDGET: "the step has no tokens left for it",
  BLOCKS: "there are not enough free KV blocks", LEADER: "a step computes the prompt that it shares",
  REMOTE_KVS: "a KV connector loads its blocks", IN_FLIGHT: "it was preempted, and steps in flight still sample its tokens",
};
const TOKENS = [["prompt", "--c2"], ["answer", "--c1"], ["drafts", "--c4"]];
const TIMES = [["schedule", "--c3"], ["forward", "--c1"], ["sample", "--c2"], ["output", "--c4"]];
const COLUMNS = ["Number", "Engine", "State", "Prompt", "From cache", "Answer", "Seconds", "Id"];

const colour = label => {
  let hash = 7;
  for (const letter of String(label)) hash = (hash * 31 + letter.charCodeAt(0)) % 65521;
  return `hsl(${(hash * 137.508) % 360} 62% 52%)`;
};
const total = (values, kinds) => kinds.reduce((sum, [name]) => sum + (values[name] ?? 0), 0);
function key(tone, text) {
  const mark = el("span", {class: "swatch", "aria-hidden": "true"});
  mark.style.background = tone.startsWith("--") ? `var(${tone})` : tone;
  return el("span", {class: "key-item"}, mark, `${text} `);
}

/** Clear a canvas; return a function that fills a rectangle of it with a colour. */
function prepare(canvas, width, height) {
  const scale = devicePixelRatio || 1, style = getComputedStyle(document.documentElement), tones = new Map();
  const size = {width: Math.round(width * scale), height: Math.round(height * scale)};
  if (canvas.width !== size.width || canvas.height !== size.height) Object.assign(canvas, size);
  Object.assign(canvas.style, {width: `${width}px`, height: `${height}px`});
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return (tone, x, y, w, h, alpha = 1) => {
    if (!tones.has(tone)) tones.set(tone, tone.startsWith("--") ? style.getPropertyValue(tone).trim() : tone);
    context.fillStyle = tones.get(tone);
    context.globalAlpha = alpha;
    context.fillRect(x, y, w, h);
  };
}

export function mount(element) {
  const history = new History(), panels = new Map();
  let held = null, stream = null, fromFile = false, drawing = false, spoken = 0, width = 0, badAt = -Infinity;

  const status = note("Connecting…"), layout = note(), more = note(), when = el("span", {class: "dim"});
  const alive = el("p", {class: "hidden-text", role: "status"}), deaths = el("ul");
  const health = el("p", {class: "error", hidden: true, role: "alert"});
  const hold = el("button", {onclick: () => { if (held === null) holdAt(last()); else { held = null; draw(); } }}, "Hold");
  const back = el("button", {onclick: () => move(-1), title: "Shortcut: left arrow"}, "◀ Step");
  const on = el("button", {onclick: () => move(1), title: "Shortcut: right arrow"}, "Step ▶");
  const slider = el("input", {type: "range", "aria-label": "Step", class: "time", oninput: () => holdAt(Number(slider.value))});
  const file = el("input", {type: "file", id: "engine-file", onchange: open});
  const detail = el("div"), engines = el("div"), requests = scroll("Requests");
  element.classList.add("engine");
  element.append(el("h2", {}, "Engine"), layout, health,
    el("div", {class: "row", role: "toolbar", "aria-label": "Time", onkeydown: keys}, hold, back, slider, on, when),
    el("div", {class: "row"}, el("label", {for: "engine-file"}, "Open a file of octavo replay --view"), file,
      el("button", {onclick: watch}, "Live server")),
    status, alive, deaths, engines, el("h3", {}, "Step"), detail, el("h3", {}, "Requests"), requests, more);

  const last = () => history.first + history.steps.length - 1;
  function holdAt(number) { held = Math.max(history.first, Math.min(last(), number)); draw(); }
  function move(by) { holdAt((held ?? last()) + by); }
  function keys(event) {
    const by = event.target === slider ? 0 : {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (by) { event.preventDefault(); move(by); }
  }

  async function open() {
    const chosen = file.files[0];
    if (!chosen) return;
    stop();
    fromFile = true;
    history.clear({});
    try {
      for await (const {event, data} of api.readEvents(new Response(chosen.stream()))) history.take(event, JSON.parse(data));
      if (!history.hello.version) throw new Error("it has no events of an engine");
      status.textContent = `${chosen.name}: ${whole(history.steps.length)} steps.`;
    } catch (error) { status.textContent = `${chosen.name} cannot be shown: ${error.message}`; }
    holdAt(history.first);
  }

  function stop() { stream?.abort(); stream = null; }

  /** Follow the server until `stop`; connect again when the stream ends. */
  async function watch() {
    if (stream) return;
    [held, fromFile] = [null, false];
    file.value = "";
    const mine = stream = new AbortController();
    while (stream === mine) {
      let wait = 1000;
      try {
        for await (const {event, data} of api.events("v1/engine/view", {signal: mine.signal})) {
          history.take(event, JSON.parse(data), data.length);
          status.textContent = "";
          draw();
        }
      } catch (error) {
        if (stream !== mine) return;
        status.textContent = error.status ? error.message : "The server does not answer; trying again…";
        if (error.status && error.status < 500 && error.status !== 429) return stop();
        wait = 3000;
      }
      await new Promise(done => setTimeout(done, wait));
    }
  }

  function draw() {
    if (!drawing) requestAnimationFrame(() => { drawing = false; if (!element.hidden) render(); });
    drawing = true;
  }

  function render() {
    const shown = held ?? last(), step = history.step(shown), {frames} = history;
    width = Math.max(200, engines.clientWidth - 2);
    Object.assign(hold, {textContent: held === null ? "Hold" : "Live", disabled: fromFile, ariaPressed: String(held !== null)});
    for (const control of [back, on, slider]) control.disabled = !step;
    Object.assign(slider, {min: history.first, max: Math.max(history.first, last()), value: shown});
    const index = held === null ? frames.length - 1 : history.frameOf(shown), frame = frames[index];
    const present = frame?.engines ?? history.engines;
    when.textContent = step ? `${held === null ? "live" : fromFile ? "recording" : "held"}, ${clock(step.time)}` : "";
    layout.textContent = describe(history.hello, present);
    const isBad = Boolean(frame) && frame.health !== "ok", now = performance.now();
    if (isBad) badAt = now;
    health.hidden = !isBad && (held !== null || now - badAt > BAD_MS);
    if (!isBad && !health.hidden) setTimeout(draw, BAD_MS);  // a revival may take less than one can read
    if (isBad && health.textContent !== frame.health) health.textContent = frame.health;
    deaths.replaceChildren(...history.deaths.slice(-5).map(({time, engine, reason, seconds}) => el("li", {},
      `${clock(time)}: engine ${engine} died (${reason}); its requests continued after ${seconds.toFixed(2)} s.`)));
    for (const engine of present) renderEngine(engine, shown, index);
    for (const [engine, panel] of panels) panel.root.hidden = !present.includes(engine);
    renderStep(step);
    renderRequests(frame);
    speak(figures(present[0], index));
  }

  function describe(hello, present) {
    if (!hello.version) return "";
    const {pipeline_parallel: stages = 1, tensor_parallel: workers = 1, front_ends: fronts = 1} = hello;
    return [
      hello.models.join(", "), `${present.length} engine(s) of ${stages} stage(s) with ${workers} worker(s)`,
      `at most ${whole(hello.max_num_batched_tokens)} tokens and ${hello.max_num_seqs} requests in a step`,
      fronts > 1 && `requests of one of ${fronts} front ends`, hello.all_requests === false && "other keys' requests have a number only",
    ].filter(Boolean).join("; ");
  }

  /** Return the figures of an engine: the state, and the rates of the last seconds. */
  function figures(engine, index) {
    const {frames, steps, first} = history, frame = frames[index], now = frame?.stats[engine];
    if (!now) return [];
    let from = index;
    while (from > 0 && frames[from].time > frame.time - RATE_SECONDS) from--;
    const before = frames[from].stats[engine] ?? {}, seconds = frame.time - frames[from].time;
    const rate = (name, more = 0) => whole(seconds > 0 ? (Math.max(0, (now[name] ?? 0) - (before[name] ?? 0)) + more) / seconds : 0);
    const recent = steps.slice(Math.max(0, frames[from].end - first), frame.end - first).filter(step => step.engine === engine);
    const answers = recent.reduce((sum, step) => sum + split(step).answer, 0);
    const count = name => whole(now[name] ?? 0);
    return [
      ["running", count("running")], ["waiting", count("waiting")], ["KV blocks in use", `${count("used_blocks")} of ${count("total_blocks")}`],
      ["tokens/s", rate("tokens")], ["answer tokens/s", rate("accepted", answers)],
      ["prefix cache hits", now.cache_queries ? percent((now.cache_hits ?? 0) / now.cache_queries) : "–"], ["preemptions", count("preemptions")],
      ...(now.drafts ? [["drafts accepted", percent((now.accepted ?? 0) / now.drafts)]] : []),
      ...(now.expert_balance ? [["balance of experts", Math.min(...now.expert_balance).toFixed(2)]] : []),
      ...(now.snapshots ? [["snapshots", count("snapshots")]] : []),
    ];
  }

  function makePanel(engine) {
    const canvas = label => el("canvas", {role: "img", "aria-label": label, class: "plot"});
    const panel = {
      figures: el("dl", {class: "figures"}), batch: canvas("Tokens of each step"), times: canvas("Time of each step"),
      legend: note(), map: canvas("Map of the KV blocks"), noMap: note("There is no map of this time."),
    };
    panel.root = el("section", {class: "card", "aria-label": `Engine ${engine}`}, el("h3", {}, `Engine ${engine}`), panel.figures,
      el("h4", {}, "Steps"), panel.batch, panel.times, panel.legend, el("h4", {}, "KV cache"), panel.map, panel.noMap);
    panel.batch.addEventListener("click", event => {
      const number = panel.bars[Math.floor(event.offsetX / BAR)];
      if (number !== undefined) holdAt(number);
    });
    engines.append(panel.root);
    return panel;
  }

  function renderEngine(engine, shown, index) {
    if (!panels.has(engine)) panels.set(engine, makePanel(engine));
    const panel = panels.get(engine), frame = history.frames[index], map = frame?.maps[engine];
    panel.figures.replaceChildren(...figures(engine, index).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
    drawSteps(panel, engine, shown);
    panel.map.hidden = !map;
    panel.noMap.hidden = Boolean(map);
    if (map) drawMap(panel, map);
  }

  function drawSteps(panel, engine, shown) {
    const count = Math.floor(width / BAR), bars = panel.bars = [], budget = history.hello.max_num_batched_tokens ?? 0;
    let number = held === null ? shown : Math.min(last(), shown + (count >> 2));
    for (; number >= history.first && bars.length < count; number--) if (history.step(number)?.engine === engine) bars.unshift(number);
    const steps = bars.map(at => history.step(at)), splits = steps.map(split);
    const most = Math.max(4, ...splits.map(tokens => total(tokens, TOKENS)));
    const sums = steps.map(step => total(step, TIMES)).sort((a, b) => a - b);
    const longest = Math.max(0.1, 1.5 * (sums[Math.floor(0.95 * (sums.length - 1))] ?? 0));
    const batch = prepare(panel.batch, width, BATCH_HEIGHT), times = prepare(panel.times, width, TIMES_HEIGHT);
    const stack = (fill, values, kinds, x, height, top) => {
      let y = height;
      for (const [name, tone] of kinds) {
        const part = Math.min(y, (values[name] ?? 0) / top * (height - 2));
        fill(tone, x, y -= part, BAR - 2, part);
      }
    };
    steps.forEach((step, i) => {
      const x = i * BAR, isHeld = bars[i] === shown && held !== null;
      if (isHeld) for (const fill of [batch, times]) fill("--mark", x - 1, 0, BAR, BATCH_HEIGHT);
      stack(batch, splits[i], TOKENS, x, BATCH_HEIGHT, most);
      stack(times, step, TIMES, x, TIMES_HEIGHT, longest);
      if (step.preempted || step.failed) batch("--bad", x, 0, BAR - 2, 4);
    });
    if (budget <= most) batch("--bad", 0, BATCH_HEIGHT - budget / most * (BATCH_HEIGHT - 2), width, 1);
    const legend = kinds => kinds.map(([name, tone]) => key(tone, name));
    panel.legend.replaceChildren(...legend(TOKENS), `up to ${whole(most)} tokens, budget ${whole(budget)}. Below: `,
      ...legend(TIMES), `up to ${ms(longest)}. A red edge: preemption or failure.`);
  }

  const label = owner => history.owners[owner] ?? "?";

  function drawMap(panel, map) {
    const count = map.cells.length, size = Math.max(4, Math.min(16, Math.floor(Math.sqrt(width * 220 / count))));
    const columns = Math.max(1, Math.floor(width / size)), side = size - 1;
    const fill = prepare(panel.map, width, Math.ceil(count / columns) * size);
    const fromBelow = (tone, x, y, share, alpha) => fill(tone, x, y + side * (1 - share / 7), side, side * share / 7, alpha);
    let inUse = 0, kept = 0, shared = 0;
    map.cells.forEach((cell, i) => {
      const {age, known, used, refs, owner} = flags(cell), x = i % columns * size, y = Math.floor(i / columns) * size;
      fill("--bg3", x, y, side, side);
      if (known > used) fromBelow("--c7", x, y, known, 0.9 - 0.09 * age);
      if (used) {
        fromBelow(colour(label(owner)), x, y, used, known ? 1 : 0.65);
        if (refs > 1) fill("--text", x, y, Math.max(2, side / 3), Math.max(2, side / 3));
      }
      if (used) inUse++; else if (known) kept++;
      if (refs > 1) shared++;
    });
    const unit = map.perCell > 1 ? `cells of ${map.perCell} blocks` : "blocks";
    panel.map.setAttribute("aria-label", `Map of ${count} ${unit}: ${inUse} in use, ${shared} shared, ${kept} kept for later prompts`);
  }

  function renderStep(step) {
    if (!step) return detail.replaceChildren(note("No step yet."));
    const {prompt, answer, drafts} = split(step), times = TIMES.map(([name]) => `${name} ${ms(step[name] ?? 0)}`).join(", ");
    const lines = [`Step ${step.number} of engine ${step.engine}: ${prompt} prompt tokens, ${answer} answer tokens, `
      + `${drafts} drafts; ${times}${step.failed ? "; the step failed" : ""}.`];
    if (step.wait) lines.push(`Request ${step.wait[0]} waits: ${WAITS[step.wait[1]] ?? step.wait[1]}.`);
    const loss = ([name, by]) => `Request ${name} lost its blocks${by === null ? " because a step failed" : ` to request ${by}`}.`;
    lines.push(...(step.preempted ?? []).map(loss));
    const parts = step.parts.map(part => key(colour(part[0]),
      `${part[0]}: ${part[1]}${isPrompt(part) ? " prompt" : ""}${part[2] ? ` (${part[2]} drafts)` : ""}`));
    detail.replaceChildren(...lines.map(line => el("p", {}, line)), el("p", {}, parts));
  }

  function renderRequests(frame) {
    const {rows = [], others = [], more: hidden = 0} = frame?.requests ?? {}, own = new Set(rows.map(row => row[0]));
    const known = rows.map(([name, engine, state, id, prompt, computed, output, cached, arrived]) => {
      const progress = el("progress", {max: Math.max(1, prompt), value: computed, "aria-label": "Computed"});
      return [key(colour(name), name), engine ?? "–", state, {number: [progress, ` ${whole(computed)} of ${whole(prompt)}`]},
        cached, output, {number: Math.max(0, frame.time - arrived).toFixed(1)}, el("span", {class: "mono"}, id)];
    });
    const unknown = others.filter(([name]) => !own.has(name)).map(([name, engine, state]) => [
      key(colour(name), name), engine ?? "–", state, "", "", "", "", "of another key"]);
    requests.replaceChildren(table(COLUMNS, [...known, ...unknown]));
    more.textContent = hidden ? `and ${whole(hidden)} more` : rows.length || others.length ? "" : "There are none.";
  }

  /** Tell screen readers the step if the time is held; else the state, not too often. */
  function speak(found) {
    detail.ariaLive = held === null ? "off" : "polite";
    if (held !== null || performance.now() - spoken < 10000) return;
    spoken = performance.now();
    alive.textContent = found.map(([name, value]) => `${name}: ${value}`).join(", ");
  }
  addEventListener("resize", draw);
  return {show() { if (!fromFile) watch(); draw(); }, hide() { if (held === null) stop(); }};
}
