// Engine view: KV blocks, steps and requests, live from /v1/engine/view or from a file of its events.

import {flags, History, isPrompt, slotFlags, split} from "./engine_history.js";

const RATE_SECONDS = 5;
const KINDS = ["free", "state of a request", "snapshot being written", "snapshot", "snapshot being loaded"];
const WAITS = {
  SEAT: "all seats are taken (max_num_seqs)", BUDGET: "the step has no tokens left for it",
  BLOCKS: "there are not enough free KV blocks", LEADER: "a step computes the prompt that it shares",
  REMOTE_KVS: "a KV connector loads its blocks", IN_FLIGHT: "it was preempted, and steps in flight still sample its tokens",
};
const TIMES = [["schedule", "--c3"], ["forward", "--c1"], ["sample", "--c2"], ["output", "--c4"]];

const colour = label => {
  let hash = 7;
  for (const letter of String(label)) hash = (hash * 31 + letter.charCodeAt(0)) % 65521;
  return `hsl(${(hash * 137.508) % 360} 62% 52%)`;
};
const ms = value => (value ?? 0).toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2);
const whole = value => Math.round(value).toLocaleString("en");
const percent = share => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

export function mount(element, api) {
  const {el} = api, history = new History();
  let held = null, stream = null, fromFile = false, drawing = false, spoken = 0, width = 0;

  const canvas = label => el("canvas", {role: "img", "aria-label": label, class: "plot"});
  const status = el("p", {class: "dim"}, "Connecting…"), layout = el("p", {class: "dim"});
  const alive = el("p", {class: "hidden-text", role: "status"}), health = el("p", {class: "error", hidden: true, role: "alert"}), deaths = el("ul", {hidden: true});
  const hold = el("button", {onclick: () => (held === null ? holdAt(last()) : live()), "aria-pressed": "false"}, "Hold");
  const back = el("button", {onclick: () => move(-1), title: "Shortcut: left arrow"}, "◀ Step"), on = el("button", {onclick: () => move(1), title: "Shortcut: right arrow"}, "Step ▶");
  const slider = el("input", {type: "range", min: 0, max: 0, value: 0, "aria-label": "Step", class: "time", oninput: () => holdAt(Number(slider.value))});
  const file = el("input", {type: "file", id: "engine-file", onchange: open});
  const when = el("span", {class: "dim"}), detail = el("div"), engines = el("div"), table = el("tbody"), more = el("p", {class: "dim"});
  element.classList.add("engine");
  element.append(el("h2", {}, "Engine"), layout, health,
    el("div", {class: "row", role: "toolbar", "aria-label": "Time", onkeydown: keys}, hold, back, slider, on, when),
    el("div", {class: "row"}, el("label", {for: "engine-file"}, "Open a file of octavo replay --view"), file, el("button", {onclick: watch}, "Live server")),
    status, alive, deaths, engines, el("h3", {}, "Step"), detail, el("h3", {}, "Requests"),
    el("div", {class: "scroll", tabindex: "0", role: "group", "aria-label": "Requests"}, el("table", {},
      el("thead", {}, el("tr", {}, ...["Number", "Engine", "State", "Prompt", "From cache", "Answer", "Seconds", "Id"].map(name => el("th", {scope: "col"}, name)))), table)), more);
  const panels = new Map();

  const last = () => history.first + history.steps.length - 1;

  function holdAt(number) {
    held = Math.max(history.first, Math.min(last(), number));
    draw();
  }

  function live() { held = null; draw(); }
  function move(by) { holdAt((held ?? last()) + by); }
  function keys(event) {
    if (event.target === slider) return;
    const by = {ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20}[event.key];
    if (by) event.preventDefault(), move(by);
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
    fromFile = false;
    file.value = "";
    held = null;
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
    if (drawing) return;
    drawing = true;
    requestAnimationFrame(() => { drawing = false; if (!element.hidden) render(); });
  }

  function render() {
    const shown = held ?? last(), step = history.step(shown), {hello, frames} = history;
    width = Math.max(200, engines.clientWidth - 2);
    hold.textContent = held === null ? "Hold" : "Live";
    hold.disabled = fromFile;
    hold.setAttribute("aria-pressed", String(held !== null));
    for (const control of [back, on, slider]) control.disabled = !step;
    Object.assign(slider, {min: history.first, max: Math.max(history.first, last()), value: shown});
    const index = held === null ? frames.length - 1 : history.frameOf(shown), frame = frames[index];
    const maps = held === null ? history.maps : frame ? history.mapsAt(index) : {};
    when.textContent = step ? `${held === null ? "live" : fromFile ? "recording" : "held"}, ${new Date(step.time * 1000).toLocaleTimeString()}` : "";
    layout.textContent = describe(hello, frame);
    const bad = frame && frame.health !== "ok";
    health.hidden = !bad;
    if (bad && health.textContent !== frame.health) health.textContent = frame.health;
    deaths.hidden = !history.deaths.length;
    deaths.replaceChildren(...history.deaths.slice(-5).map(death => el("li", {}, `${new Date(death.time * 1000).toLocaleTimeString()}: engine ${death.engine} died (${death.reason}); its requests continued after ${death.seconds.toFixed(2)} s.`)));
    for (const engine of frame?.engines ?? history.engines) renderEngine(engine, shown, index, maps[engine]);
    for (const [engine, panel] of panels) panel.root.hidden = !(frame?.engines ?? history.engines).includes(engine);
    renderStep(step);
    renderRequests(frame);
    speak(frame, step);
  }

  function describe(hello, frame) {
    if (!hello.version) return "";
    const parts = [hello.models.join(", "), `${(frame?.engines ?? history.engines).length} engine(s)`];
    const away = history.engines.length - (hello.local_engines ?? 1);
    if (away > 0) parts.push(`${away} of them on nodes`);
    if ((hello.tensor_parallel ?? 1) * (hello.pipeline_parallel ?? 1) > 1) parts.push(`${hello.pipeline_parallel ?? 1} stage(s) of ${hello.tensor_parallel ?? 1} worker(s) each`);
    parts.push(`${whole(hello.max_num_batched_tokens)} tokens and ${hello.max_num_seqs} requests in a step at most`, `${hello.block_size} tokens in a block`);
    if ((hello.front_ends ?? 1) > 1) parts.push(`requests of one of ${hello.front_ends} front ends, steps of all`);
    if (hello.all_requests === false) parts.push("requests of other keys have a number only");
    return parts.join("; ");
  }

  /** Return the figures of an engine: the state, and the rates of the last seconds. */
  function figures(engine, index) {
    const {frames} = history, frame = frames[index], now = frame?.stats[engine];
    if (!now) return [];
    let first = index;
    while (first > 0 && frames[first].time > frame.time - RATE_SECONDS) first--;
    const before = frames[first].stats[engine] ?? {}, seconds = frame.time - frames[first].time;
    const change = name => Math.max(0, (now[name] ?? 0) - (before[name] ?? 0)), rate = name => (seconds > 0 ? change(name) / seconds : 0);
    const steps = history.steps.slice(Math.max(0, frames[first].end - history.first), frame.end - history.first).filter(step => step.engine === engine);
    const answers = seconds > 0 ? (steps.reduce((sum, step) => sum + split(step).answer, 0) + change("accepted")) / seconds : 0;
    const found = [["running", whole(now.running ?? 0)], ["waiting", whole(now.waiting ?? 0)], ["KV blocks in use", `${whole(now.used_blocks ?? 0)} of ${whole(now.total_blocks ?? 0)}`],
      ["tokens/s", whole(rate("tokens"))], ["answer tokens/s", whole(answers)], ["prefix cache hits", now.cache_queries ? percent((now.cache_hits ?? 0) / now.cache_queries) : "–"], ["preemptions", whole(now.preemptions ?? 0)]];
    if (now.drafts) found.push(["drafts accepted", percent((now.accepted ?? 0) / now.drafts)]);
    if (now.snapshots) found.push(["snapshots", whole(now.snapshots)]);
    return found;
  }

  function renderEngine(engine, shown, index, map) {
    if (!panels.has(engine)) panels.set(engine, makePanel(engine));
    const panel = panels.get(engine), found = figures(engine, index);
    panel.figures.replaceChildren(...found.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
    drawSteps(panel, engine, shown);
    panel.noMap.hidden = Boolean(map);
    panel.map.hidden = panel.cells.hidden = !map;
    if (map) drawMap(panel, map);
    panel.statesBox.hidden = !map?.states.length;
    if (map?.states.length) drawStates(panel, map.states);
    const experts = history.frames[index]?.experts[engine];
    panel.expertsBox.hidden = !experts?.layers.length;
    if (experts?.layers.length) drawExperts(panel, experts);
  }

  function makePanel(engine) {
    const panel = {figures: el("dl", {class: "figures"}), batch: canvas("Tokens of each step"), times: canvas("Time of each step"), legend: el("p", {class: "dim"}), map: canvas("Map of the KV blocks"), under: el("p", {class: "dim", "aria-hidden": "true"}, "Point at a block."),
      noMap: el("p", {class: "dim"}, "There is no map of this time."), cells: el("details", {ontoggle: draw}, el("summary", {}, "KV blocks as a table"), el("table")), states: canvas("Map of the recurrent states"), statesText: el("p", {class: "dim"}), experts: canvas("Heat of the experts"), expertsText: el("p", {class: "dim"})};
    panel.statesBox = el("div", {hidden: true}, el("h4", {}, "Recurrent states"), panel.states, panel.statesText);
    panel.expertsBox = el("div", {hidden: true}, el("h4", {}, "Experts"), panel.experts, panel.expertsText);
    panel.root = el("section", {class: "card", "aria-label": `Engine ${engine}`}, el("h3", {}, `Engine ${engine}`), panel.figures, el("h4", {}, "Steps"), panel.batch, panel.times, panel.legend, el("h4", {}, "KV cache"), panel.noMap, panel.map, panel.under, panel.cells, panel.statesBox, panel.expertsBox);
    panel.batch.addEventListener("click", event => { const at = panel.bars?.[Math.floor(event.offsetX / panel.barWidth)]; if (at !== undefined) holdAt(at); });
    panel.map.addEventListener("pointermove", event => {
      const {map, columns, size} = panel.drawn ?? {}, cell = Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size);
      if (map && cell < map.cells.length) panel.under.textContent = blockText(map, cell);
    });
    engines.append(panel.root);
    return panel;
  }

  /** Prepare a canvas of `height` pixels; return its context and the colours of the page. */
  function prepare(target, height) {
    const scale = devicePixelRatio || 1;
    if (target.width !== Math.round(width * scale) || target.height !== Math.round(height * scale)) Object.assign(target, {width: Math.round(width * scale), height: Math.round(height * scale)});
    Object.assign(target.style, {width: `${width}px`, height: `${height}px`});
    const context = target.getContext("2d"), style = getComputedStyle(document.documentElement);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    return [context, name => style.getPropertyValue(name).trim()];
  }

  function drawSteps(panel, engine, shown) {
    const barWidth = panel.barWidth = 7, count = Math.floor(width / barWidth), bars = [];
    for (let number = held === null ? shown : Math.min(last(), shown + (count >> 2)); number >= history.first && bars.length < count; number--) if (history.step(number)?.engine === engine) bars.unshift(number);
    panel.bars = bars;
    const steps = bars.map(number => history.step(number)), splits = steps.map(split), budget = history.hello.max_num_batched_tokens ?? 0;
    const [batch, tone] = prepare(panel.batch, 90), most = Math.max(4, ...splits.map(({prompt, answer, drafts}) => prompt + answer + drafts));
    const [times] = prepare(panel.times, 60), sums = steps.map(step => TIMES.reduce((sum, [name]) => sum + (step[name] ?? 0), 0)), sorted = [...sums].sort((a, b) => a - b), longest = Math.max(0.1, 1.5 * (sorted[Math.floor(0.95 * (sorted.length - 1))] ?? 0));
    const stack = (context, x, height, values, top) => {
      let y = height;
      for (const [value, name] of values) { const h = Math.min(y, value / top * (height - 2)); context.fillStyle = tone(name); context.fillRect(x, y - h, barWidth - 2, h); y -= h; }
    };
    bars.forEach((number, i) => {
      const {prompt, answer, drafts} = splits[i], step = steps[i], x = i * barWidth;
      if (number === shown && held !== null) { batch.fillStyle = times.fillStyle = tone("--mark"); batch.fillRect(x - 1, 0, barWidth, 90); times.fillRect(x - 1, 0, barWidth, 60); }
      stack(batch, x, 90, [[prompt, "--c2"], [answer, "--c1"], [drafts, "--c4"]], most);
      stack(times, x, 60, TIMES.map(([name, at]) => [step[name] ?? 0, at]), longest);
      if (step.preempted || step.failed) { batch.fillStyle = tone("--bad"); batch.fillRect(x, 0, barWidth - 2, 4); }
    });
    if (budget <= most) { batch.fillStyle = tone("--bad"); batch.fillRect(0, 90 - budget / most * 88, width, 1); }
    panel.legend.replaceChildren(...[["--c2", "prompt"], ["--c1", "answers"], ["--c4", "drafts"]].map(([name, text]) => key(name, text)), `up to ${whole(most)} tokens, budget ${whole(budget)}. Below: `, ...TIMES.map(([name, at]) => key(at, name)), `up to ${ms(longest)} ms. A red edge: preemption or failure.`);
  }

  function key(tone, text) {
    const mark = el("span", {class: "swatch", "aria-hidden": "true"});
    mark.style.background = tone.startsWith("--") ? `var(${tone})` : tone;
    return el("span", {class: "key-item"}, mark, `${text} `);
  }

  const label = owner => history.owners[owner] ?? "?";

  function drawMap(panel, map) {
    const count = map.cells.length, size = Math.max(4, Math.min(16, Math.floor(Math.sqrt(width * 220 / count)))), columns = Math.max(1, Math.floor(width / size));
    const [context, tone] = prepare(panel.map, Math.ceil(count / columns) * size), inner = size - 1, owners = new Map();
    const free = tone("--bg3"), kept = tone("--c7"), edge = tone("--text");
    let used = 0, known = 0, shared = 0;
    map.cells.forEach((cell, i) => {
      const {age, known: k, used: u, refs, owner} = flags(cell), x = i % columns * size, y = Math.floor(i / columns) * size;
      context.fillStyle = free;
      context.fillRect(x, y, inner, inner);
      if (k > u) { context.globalAlpha = 0.9 - 0.09 * age; context.fillStyle = kept; context.fillRect(x, y + inner - inner * k / 7, inner, inner * k / 7); context.globalAlpha = 1; }
      if (u) {
        const name = label(owner);
        context.globalAlpha = k ? 1 : 0.65;
        context.fillStyle = colour(name);
        context.fillRect(x, y + inner - inner * u / 7, inner, inner * u / 7);
        context.globalAlpha = 1;
        if (refs > 1) { context.fillStyle = edge; context.fillRect(x, y, Math.max(2, inner / 3), Math.max(2, inner / 3)); }
        owners.set(name, (owners.get(name) ?? 0) + 1);
      }
      used += u > 0; known += k > 0 && !u; shared += refs > 1;
    });
    panel.drawn = {map, columns, size};
    const unit = map.perCell > 1 ? `cells of ${map.perCell} blocks` : "blocks";
    panel.map.setAttribute("aria-label", `Map of ${count} ${unit}: ${used} in use, ${shared} shared, ${known} kept for later prompts`);
    if (panel.cells.open) panel.cells.lastChild.replaceChildren(el("tbody", {}, ...[["in use", used], ["shared", shared], ["kept for later prompts", known], ["free", count - used - known], ...[...owners].sort((a, b) => b[1] - a[1]).slice(0, 50).map(([name, n]) => [`request ${name}`, n])].map(([name, n]) => el("tr", {}, el("th", {scope: "row"}, name), el("td", {class: "number"}, `${n} ${unit}`)))));
  }

  function blockText(map, cell) {
    const {age, known, used, refs, owner} = flags(map.cells[cell]), first = 1 + cell * map.perCell;
    const name = map.perCell > 1 ? `Blocks ${first} to ${Math.min(map.blocks, first + map.perCell - 1)}` : `Block ${first}`;
    if (used) return `${name}: request ${label(owner)}${refs > 1 ? `, shared by ${refs === 7 ? "7 or more" : refs}` : ""}${known ? ", known to the prefix cache" : ""}.`;
    return known ? `${name}: kept for later prompts, age ${age} of 7 (7 is reused next).` : `${name}: free.`;
  }

  function drawStates(panel, states) {
    const size = 14, columns = Math.max(1, Math.floor(width / size)), counts = KINDS.map(() => 0);
    const [context, tone] = prepare(panel.states, Math.ceil(states.length / columns) * size);
    states.forEach((cell, i) => {
      const {age, kind, owner} = slotFlags(cell), x = i % columns * size, y = Math.floor(i / columns) * size;
      counts[kind]++;
      context.fillStyle = tone("--bg3");
      context.fillRect(x, y, size - 1, size - 1);
      context.globalAlpha = kind === 3 ? 0.9 - 0.09 * age : 1;
      context.fillStyle = kind === 0 ? tone("--bg3") : owner ? colour(label(owner)) : tone("--c7");
      context.beginPath();
      if (kind === 1) context.arc(x + 6.5, y + 6.5, 6, 0, 7); else if (kind) context.rect(x + 2, y + 2, 9, 9);
      context.fill();
      context.globalAlpha = 1;
    });
    panel.statesText.textContent = KINDS.map((name, kind) => `${name}: ${counts[kind]}`).join(", ");
  }

  function drawExperts(panel, {layers, before}) {
    const most = Math.max(...layers.map(([, counts]) => counts.length)), size = Math.max(3, Math.min(14, Math.floor(width / most)));
    const [context, tone] = prepare(panel.experts, layers.length * size), past = new Map(before ?? []);
    let hottest = [0, 0, 0];
    layers.forEach(([layer, counts], row) => {
      let recent = counts.map((n, i) => n - (past.get(layer)?.[i] ?? 0));
      if (!recent.some(n => n > 0)) recent = counts;
      const mean = recent.reduce((a, b) => a + b, 0) / recent.length || 1;
      recent.forEach((n, expert) => {
        if (n / mean > hottest[2]) hottest = [layer, expert, n / mean];
        context.globalAlpha = 0.06 + 0.94 * Math.min(1, n / mean / 2);
        context.fillStyle = tone("--c5");
        context.fillRect(expert * size, row * size, size - 1, size - 1);
      });
    });
    context.globalAlpha = 1;
    panel.expertsText.textContent = `A row is a layer, a column an expert; full colour is twice the mean or more. Most chosen: expert ${hottest[1]} of layer ${hottest[0]}, ${hottest[2].toFixed(1)} times the mean.`;
  }

  function renderStep(step) {
    if (!step) return detail.replaceChildren(el("p", {class: "dim"}, "No step yet."));
    const {prompt, answer, drafts} = split(step), lines = [`Step ${step.number} of engine ${step.engine}: ${prompt} prompt tokens, ${answer} answer tokens, ${drafts} drafts; ${TIMES.map(([name]) => `${name} ${ms(step[name])} ms`).join(", ")}${step.failed ? "; the step failed" : ""}.`];
    if (step.wait) lines.push(`Request ${step.wait[0]} waits: ${WAITS[step.wait[1]] ?? step.wait[1]}.`);
    for (const [name, by] of step.preempted ?? []) lines.push(`Request ${name} lost its blocks${by === null ? " because a step failed" : ` to request ${by}`}.`);
    detail.replaceChildren(...lines.map(line => el("p", {}, line)), el("p", {}, ...step.parts.map(part => key(colour(part[0]), `${part[0]}: ${part[1]}${isPrompt(part) ? " prompt" : ""}${part[2] ? ` (${part[2]} drafts)` : ""}`))));
  }

  function renderRequests(frame) {
    const {rows = [], others = [], more: hidden = 0} = frame?.requests ?? {}, own = new Set(rows.map(row => row[0]));
    const time = frame?.time ?? 0, number = text => el("td", {class: "number"}, text);
    table.replaceChildren(...rows.map(([name, engine, state, id, prompt, computed, output, cached, arrived]) => el("tr", {}, el("td", {}, key(colour(name), name)), el("td", {}, engine ?? "–"), el("td", {}, state),
      el("td", {class: "number"}, el("progress", {max: Math.max(1, prompt), value: computed, "aria-label": "Computed"}), ` ${whole(computed)} of ${whole(prompt)}`), number(whole(cached)), number(whole(output)), number(Math.max(0, time - arrived).toFixed(1)), el("td", {class: "mono"}, id))),
    ...others.filter(([name]) => !own.has(name)).map(([name, engine, state]) => el("tr", {}, el("td", {}, key(colour(name), name)), el("td", {}, engine ?? "–"), el("td", {}, state), el("td", {colspan: 5, class: "dim"}, "of another key"))));
    more.textContent = hidden ? `and ${whole(hidden)} more` : rows.length || others.length ? "" : "There are none.";
  }

  /** Tell screen readers the state, not too often. */
  function speak(frame, step) {
    if (!frame || (held === null && performance.now() - spoken < 10000)) return;
    spoken = performance.now();
    const {running = 0, waiting = 0, used_blocks: used = 0, total_blocks: total = 1} = Object.values(frame.stats)[0] ?? {};
    alive.textContent = held === null ? `${running} requests run, ${waiting} wait, ${percent(used / total)} of the KV blocks are in use.` : detail.firstChild?.textContent ?? `Step ${step?.number}`;
  }

  addEventListener("resize", draw);
  return {show() { if (!fromFile) watch(); draw(); }, hide() { if (held === null) stop(); }};
}
