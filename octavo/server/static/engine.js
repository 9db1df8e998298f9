// Engine view: KV blocks, steps and requests, live or from a recording.
import {arrow, byId, clock, el, events, fromTemplate, ms, parts, percent, readEvents, sentence, table, whole} from "./api.js";
import {flags, History, isPrompt, split} from "./engine_history.js";

const RATE_SECONDS = 5, RETRY_MS = 2000, BAR = 7, BATCH_HEIGHT = 90, TIMES_HEIGHT = 60, SLOT = 14, STATE = 1, SNAPSHOT = 3;
const TOKENS = [["prompt", "--c2"], ["answer", "--c1"], ["drafts", "--c4"]];
const TIMES = [["schedule", "--c3"], ["forward", "--c1"], ["sample", "--c2"], ["output", "--c4"]];

const colour = label => {
  let hash = 7;
  for (const letter of String(label)) hash = (hash * 31 + letter.charCodeAt(0)) % 65521;
  return `hsl(${(hash * 137.508) % 360} 62% 52%)`;
};
const total = (values, kinds) => kinds.reduce((sum, [name]) => sum + (values[name] ?? 0), 0);
function key(name, text = name) {
  const mark = el("span.swatch", {"aria-hidden": "true"});
  mark.style.background = colour(name);
  return el("span.key-item", mark, `${text} `);
}
function prepare(canvas, height) {
  const scale = devicePixelRatio || 1, style = getComputedStyle(document.documentElement), tones = new Map();
  const context = canvas.getContext("2d");
  Object.assign(canvas, {width: Math.round(width * scale), height: Math.round(height * scale)});
  context.scale(scale, scale);
  return (tone, x, y, w, h, alpha = 1) => {
    if (!tones.has(tone)) tones.set(tone, tone.startsWith("--") ? style.getPropertyValue(tone).trim() : tone);
    context.fillStyle = tones.get(tone);
    context.globalAlpha = alpha;
    context.fillRect(x, y, w, h);
  };
}
const history = new History(), panels = new Map(), element = byId("engine");
const {layout, health, time, hold, back, slider, on, when, file, server, status, alive, deaths, engines, detail, requests, more} = parts(element);
let held = null, stream = null, fromFile = false, drawing = false, spoken = 0, width = 0;

hold.onclick = () => { if (held === null) return holdAt(last()); held = null; draw(); };
back.onclick = () => move(-1);
on.onclick = () => move(1);
slider.oninput = () => holdAt(Number(slider.value));
time.onkeydown = event => {
  const by = event.target === slider ? 0 : arrow(event);
  if (by) { event.preventDefault(); move(by); }
};
file.onchange = open;
server.onclick = watch;
addEventListener("resize", draw);
export function show() { if (!fromFile) watch(); draw(); }
export function hide() { if (held === null) stop(); }
const last = () => history.first + history.steps.length - 1;
function holdAt(number) { held = Math.max(history.first, Math.min(last(), number)); draw(); }
function move(by) { holdAt((held ?? last()) + by); }
async function open() {
  const chosen = file.files[0];
  if (!chosen) return;
  stop();
  fromFile = true;
  history.clear({});
  try {
    for await (const {event, data} of readEvents(new Response(chosen.stream()))) history.take(event, JSON.parse(data));
    if (!history.hello.version) throw new Error(sentence("noEvents"));
    status.textContent = `${chosen.name}: ${whole(history.steps.length)} steps.`;
  } catch (error) { status.textContent = `${chosen.name} cannot be shown: ${error.message}`; }
  holdAt(history.first);
}
function stop() { stream?.abort(); stream = null; draw(); }
async function watch() {
  if (stream) return;
  [held, fromFile] = [null, false];
  file.value = "";
  const mine = stream = new AbortController();
  while (stream === mine) {
    try {
      for await (const {event, data} of events("v1/engine/view", {signal: mine.signal})) {
        history.take(event, JSON.parse(data), data.length);
        status.textContent = "";
        draw();
      }
    } catch (error) {
      if (stream !== mine) return;
      status.textContent = error.status ? error.message : sentence("silent");
      if (error.status && error.status < 500 && error.status !== 429) return stop();
    }
    await new Promise(done => setTimeout(done, RETRY_MS));
  }
}
function draw() {
  if (!drawing) requestAnimationFrame(() => { drawing = false; if (!element.hidden) render(); });
  drawing = true;
}
function render() {
  const shown = held ?? last(), step = history.step(shown), {frames} = history;
  Object.assign(hold, {textContent: held === null ? "Hold" : "Live", disabled: fromFile, ariaPressed: String(held !== null)});
  for (const control of [back, on, slider]) control.disabled = !step;
  server.hidden = Boolean(stream);
  Object.assign(slider, {min: history.first, max: Math.max(history.first, last()), value: shown});
  const index = held === null ? frames.length - 1 : history.frameOf(shown), frame = frames[index];
  const present = frame?.engines ?? history.engines;
  when.textContent = step ? `${held === null ? "live" : fromFile ? "recording" : "held"}, ${clock(step.time)}` : "";
  layout.textContent = describe(history.hello, present.length);
  const bad = !frame || frame.health === "ok" ? "" : frame.health;
  if (health.textContent !== bad) health.textContent = bad;
  deaths.replaceChildren(...history.deaths.slice(-5).map(death => (
    el("li", sentence("death", {...death, at: clock(death.time), pause: death.seconds.toFixed(2)})))));
  for (const engine of present) renderEngine(engine, shown, index);
  for (const [engine, panel] of panels) panel.root.hidden = !present.includes(engine);
  renderStep(step);
  renderRequests(frame);
  speak(figures(present[0], index));
}
function describe({models, pipeline_parallel: stages = 1, tensor_parallel: workers = 1, front_ends: fronts = 1, ...hello}, count) {
  return !models ? "" : [sentence("layout", {...hello, models: models.join(", "), stages, workers, count}),
    fronts > 1 && sentence("fronts", {fronts}), hello.all_requests === false && sentence("others")].filter(Boolean).join("; ");
}
function figures(engine, index) {
  const {frames, steps, first} = history, frame = frames[index], now = frame?.stats[engine];
  if (!now) return [];
  const old = frames[Math.max(0, frames.findIndex(({time}) => time > frame.time - RATE_SECONDS) - 1)];
  const before = old.stats[engine] ?? {}, seconds = frame.time - old.time;
  const rate = (name, more = 0) => whole(seconds > 0 ? (Math.max(0, (now[name] ?? 0) - (before[name] ?? 0)) + more) / seconds : 0);
  const recent = steps.slice(Math.max(0, old.end - first), frame.end - first).filter(step => step.engine === engine);
  const answers = recent.reduce((sum, step) => sum + split(step).answer, 0);
  const count = name => whole(now[name] ?? 0);
  return Object.entries({
    running: count("running"), waiting: count("waiting"), "KV blocks in use": now.total_blocks && `${count("used_blocks")} of ${count("total_blocks")}`,
    "tokens/s": rate("tokens"), "answer tokens/s": rate("accepted", answers), preemptions: count("preemptions"),
    "prefix cache hits": now.cache_queries && percent((now.cache_hits ?? 0) / now.cache_queries),
    "drafts accepted": now.drafts && percent((now.accepted ?? 0) / now.drafts),
    "balance of experts": now.expert_balance && Math.min(...now.expert_balance).toFixed(2), snapshots: now.snapshots && count("snapshots"),
  }).filter(([, value]) => value);
}
function makePanel(engine) {
  const root = fromTemplate("engine-panel"), panel = {root, ...parts(root)};
  panel.batch.onclick = ({offsetX}) => holdAt(panel.bars[Math.floor(offsetX / BAR)] ?? last());
  for (const [canvas, chosen] of [[panel.map, panel.block], [panel.states, panel.slot]]) {
    canvas.onpointermove = ({offsetX, offsetY}) => {
      chosen.value = Math.floor(offsetX / canvas.size) + Math.floor(offsetY / canvas.size) * canvas.columns;
      draw();
    };
    chosen.oninput = draw;
  }
  engines.append(root);
  return panel;
}
function renderEngine(engine, shown, index) {
  if (!panels.has(engine)) panels.set(engine, makePanel(engine));
  const panel = panels.get(engine), frame = history.frames[index], map = frame?.maps[engine], experts = frame?.experts[engine];
  const {[engine]: place} = history.servers;
  panel.root.ariaLabel = panel.title.textContent = `Engine ${engine}${place ? `: ${place}` : ""}`;
  width = Math.max(200, panel.figures.clientWidth);
  panel.figures.replaceChildren(...figures(engine, index).map(([name, value]) => el("div", el("dt", name), el("dd", value))));
  drawSteps(panel, engine, shown);
  for (const [box, content, draw] of [[panel.mapBox, map, drawMap], [panel.statesBox, map?.states, drawStates], [panel.expertsBox, experts, drawExperts]]) {
    box.hidden = !content || content.length === 0;
    if (!box.hidden) draw(panel, content);
  }
}
function drawSteps(panel, engine, shown) {
  const count = Math.floor(width / BAR), bars = panel.bars = [], budget = history.hello.max_num_batched_tokens ?? 0;
  let number = held === null ? shown : Math.min(last(), shown + (count >> 2));
  for (; number >= history.first && bars.length < count; number--) if (history.step(number)?.engine === engine) bars.unshift(number);
  panel.steps.hidden = !bars.length;
  const steps = bars.map(at => history.step(at)), splits = steps.map(split);
  const most = Math.max(4, ...splits.map(tokens => total(tokens, TOKENS)));
  const sums = steps.map(step => total(step, TIMES)).sort((a, b) => a - b);
  const longest = Math.max(0.1, 1.5 * (sums[Math.floor(0.95 * (sums.length - 1))] ?? 0));
  const batch = prepare(panel.batch, BATCH_HEIGHT), times = prepare(panel.times, TIMES_HEIGHT);
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
  panel.most.textContent = sentence("most", {most: whole(most), budget: whole(budget)});
  panel.longest.textContent = `up to ${ms(longest)}`;
}
const label = owner => history.owners[owner] ?? "?", colourOf = owner => colour(label(owner));
/** Draw squares in rows; paint(cell, fill) fills rectangles of one. */
function drawSquares(canvas, cells, size, columns, paint, chosen) {
  const fill = prepare(canvas, Math.ceil(cells.length / columns) * size), marked = Number(chosen?.value);
  cells.forEach((cell, i) => {
    const left = i % columns * size, top = Math.floor(i / columns) * size;
    paint(cell, (tone, x, y, ...more) => fill(tone, left + x, top + y, ...more));
    if (i === marked) fill("--text", left, top + size - 3, size - 1, 2);
  });
  Object.assign(canvas, {size, columns});
}
function tellOf(cells, perCell, chosen, text, nameOf) {
  chosen.max = cells.length - 1;
  const place = Number(chosen.value), found = flags(cells[place]), first = 1 + place * perCell;
  const blocks = perCell > 1 ? `${first} to ${first + perCell - 1}` : first, tokens = perCell * history.hello.block_size;
  text.textContent = chosen.ariaValueText = sentence(nameOf(found), {...found, place, blocks, tokens, owner: label(found.owner)});
}
function drawMap(panel, {cells, perCell}) {
  const count = cells.length, size = Math.max(4, Math.min(16, Math.floor(Math.sqrt(width * 220 / count)))), side = size - 1;
  const columns = Math.max(1, Math.floor(width / size)), corner = Math.max(2, side / 3);
  let inUse = 0, kept = 0, shared = 0;
  drawSquares(panel.map, cells, size, columns, (cell, fill) => {
    const {age, known, used, refs, owner} = flags(cell);
    const fromBelow = (tone, share, alpha) => fill(tone, 0, side * (1 - share / 7), side, side * share / 7, alpha);
    fill("--bg3", 0, 0, side, side);
    if (known > used) fromBelow("--c7", known, 0.9 - 0.09 * age);
    if (used) fromBelow(colourOf(owner), used, known ? 1 : 0.65);
    if (refs > 1) fill("--text", 0, 0, corner, corner);
    if (used) inUse++; else if (known) kept++;
    if (refs > 1) shared++;
  }, panel.block);
  tellOf(cells, perCell, panel.block, panel.blockText, ({used, known}) => (used ? "blockUsed" : known ? "blockKept" : "blockEmpty"));
  const unit = perCell > 1 ? `cells of ${perCell} blocks` : "blocks";
  panel.map.ariaLabel = sentence("map", {count, unit, inUse, shared, kept});
}
function drawStates(panel, states) {
  const counts = [0, 0, 0, 0, 0], side = SLOT - 1;
  drawSquares(panel.states, states, SLOT, Math.max(1, Math.floor(width / SLOT)), (cell, fill) => {
    const {age, known: kind, owner} = flags(cell), tone = owner ? colourOf(owner) : "--c7";
    counts[kind]++;
    fill("--bg3", 0, 0, side, side);
    if (kind === STATE) fill(tone, 0, 0, side, side);
    else if (kind) fill(tone, 3, 3, side - 6, side - 6, kind === SNAPSHOT ? 0.9 - 0.09 * age : 1);
  }, panel.slot);
  tellOf(states, 1, panel.slot, panel.slotText, ({known}) => `slot${known}`);
  const {[STATE]: live, [SNAPSHOT]: kept} = counts;
  panel.states.ariaLabel = sentence("stateMap", {count: states.length, live, kept});
}
function drawExperts(panel, {layers, before = []}) {
  const past = new Map(before), [[, {length}]] = layers, size = Math.max(3, Math.min(SLOT, Math.floor(width / length)));
  const loads = layers.flatMap(([layer, counts]) => {
    const recent = counts.map((count, i) => count - (past.get(layer)?.[i] ?? 0)), sum = recent.reduce((a, b) => a + b, 0);
    return recent.map(count => count * length / (sum || 1));
  });
  drawSquares(panel.experts, loads, size, length, (load, fill) => fill("--c5", 0, 0, size - 1, size - 1, 0.06 + 0.94 * Math.min(1, load / 2)));
  const most = Math.max(...loads), at = loads.indexOf(most), [layer] = layers[Math.floor(at / length)];
  panel.hottest.textContent = sentence("hottest", {expert: at % length, layer, load: most.toFixed(1)});
}
function renderStep(step) {
  if (!step) return detail.replaceChildren(el("p.dim", sentence("noSteps")));
  const times = TIMES.map(([name]) => `${name} ${ms(step[name] ?? 0)}`).join(", ");
  const lines = [sentence("step", {...step, ...split(step), times: `${times}${step.failed ? "; the step failed" : ""}`})];
  if (step.wait) lines.push(sentence("waits", {name: step.wait[0], reason: sentence(step.wait[1])}));
  for (const [name, by] of step.preempted ?? []) lines.push(sentence(by === null ? "lostByFailure" : "lostToRequest", {name, by}));
  const parts = step.parts.map(part => key(part[0],
    `#${part[0]}: ${part[1]}${isPrompt(part) ? " prompt" : ""}${part[2] ? ` (${part[2]} drafts)` : ""}`));
  detail.replaceChildren(...lines.map(line => el("p", line)), el("p", sentence("byRequest"), parts));
}
function renderRequests(frame) {
  const {rows = [], others = [], more: hidden = 0} = frame?.requests ?? {}, own = new Set(rows.map(row => row[0]));
  const known = rows.map(([name, engine, state, id, prompt, computed, output, cached, arrived]) => {
    const progress = el("progress", {max: Math.max(1, prompt), value: computed, "aria-label": "Computed"});
    return [key(name, `#${name}`), engine ?? "–", state, {number: [progress, ` ${whole(computed)} of ${whole(prompt)}`]},
      cached, output, {number: Math.max(0, frame.time - arrived).toFixed(1)}, el("a.mono", {href: `#/explain/${encodeURIComponent(id)}`}, id)];
  });
  const unknown = others.filter(([name]) => !own.has(name)).map(([name, engine, state]) => [
    key(name, `#${name}`), engine ?? "–", state, "of another key"]), all = [...known, ...unknown];
  requests.replaceChildren(all.length ? table("requestColumns", all) : "");
  more.textContent = hidden ? `and ${whole(hidden)} more` : all.length ? "" : sentence("idle");
}
/** Tell screen readers the held step, or the state. */
function speak(found) {
  detail.ariaLive = held === null ? "off" : "polite";
  if (held !== null || performance.now() - spoken < 10000) return;
  spoken = performance.now();
  alive.textContent = found.map(([name, value]) => `${name}: ${value}`).join(", ");
}
