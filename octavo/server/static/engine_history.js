// History of the engine view, from the events that docs/engine_view.md describes.

const MAX_SECONDS = 600, MAX_BYTES = 96 * 2 ** 20;
const OWNER = 4096; // a cell is flags + OWNER * number of the owner
/** State and history of the engines. A frame is the state after a tick. */
export class History {
  constructor() { this.clear({}); }
  clear(hello) {
    Object.assign(this, {hello, frames: [], steps: [], first: 0, bytes: 0, maps: {}, owners: {}, stats: {}, experts: {},
      requests: {rows: []}, engines: [0], servers: {}, health: "", deaths: []});
  }

  take(name, data, bytes = 0) {
    if (name === "hello") this.clear(data);
    else if (name === "requests") {
      this.requests = data;
      if (this.frames.length) this.frames.at(-1).requests = data;
      this.bytes += bytes;
    } else if (name === "history" && (data.first ?? 0) + data.steps.length === this.first) {
      this.steps.unshift(...stepsOf(data));
      this.first = data.first ?? 0;
    } else if (name === "tick") this.tick(data, bytes);
  }

  tick(data, bytes) {
    if (!this.steps.length) this.first = data.first ?? 0; // later, steps that the server left out have no number
    const begin = this.first + this.steps.length;
    for (const step of stepsOf(data)) this.steps.push(step);
    this.stats = {...this.stats, ...data.stats};
    this.maps = {...this.maps};
    let size = bytes;
    for (const [engine, changes] of Object.entries(data.blocks ?? {})) {
      Object.assign(this.owners, changes.owners);
      this.maps[engine] = changed(this.maps[engine], changes);
      size += this.maps[engine].cells.byteLength + this.maps[engine].states.byteLength;
    }
    for (const [engine, layers] of Object.entries(data.experts ?? {})) {
      if (layers.length) this.experts = {...this.experts, [engine]: {layers, before: this.experts[engine]?.layers}};
    }
    this.engines = data.engines ?? this.engines;
    this.servers = data.servers ?? this.servers;
    this.health = data.health ?? this.health;
    this.deaths = [...this.deaths, ...(data.deaths ?? [])];
    const {stats, requests, health, engines, maps, experts} = this;
    this.frames.push({time: data.time, begin, end: this.first + this.steps.length, stats, requests, health, engines, maps, experts, size});
    this.bytes += size;
    this.drop();
  }
  drop() {
    const {frames, steps} = this, oldest = frames.at(-1).time - MAX_SECONDS;
    while (frames.length > 1 && (this.bytes > MAX_BYTES || frames[0].time < oldest)) this.bytes -= frames.shift().size;
    const old = steps.findIndex(step => step.time >= oldest);
    if (old > 0) this.first += steps.splice(0, old).length;
  }

  step(number) { return this.steps[number - this.first]; }
  /** Return the frame that shows a step first, or -1. */
  frameOf(number) {
    if (!this.frames.length || number < this.frames[0].begin) return -1;
    return this.frames.findIndex(frame => frame.end > number);
  }
}
function stepsOf({steps = [], time}) {
  const last = {};
  return steps.map(step => {
    const parts = last[step.engine] = step.parts ?? last[step.engine] ?? [];
    return {...step, parts, time: time + step.at / 1000};
  });
}
function changed(map, {num_cells, num_states, blocks_per_cell: perCell, runs, states = []}) {
  return {cells: filled(map?.cells, num_cells, runs), states: filled(map?.states, num_states, states), perCell};
}
function filled(old = new Float64Array(0), size, runs) {
  const cells = size ? new Float64Array(size) : old.slice();
  for (let i = 0; i < runs.length; i += 3) cells.fill(runs[i + 2], runs[i], runs[i] + runs[i + 1]);
  return cells;
}
export const isPrompt = ([, tokens, drafts = 0, first = 0]) => Boolean(first) || tokens !== 1 + drafts;
export function split({parts}) {
  const found = {prompt: 0, answer: 0, drafts: 0};
  for (const part of parts) {
    const [, tokens, drafts = 0] = part;
    found.drafts += drafts;
    if (isPrompt(part)) found.prompt += tokens - drafts;
    else found.answer += 1;
  }
  return found;
}
/** Return the parts of a cell; of a state, `known` is the kind. */
export const flags = cell => {
  const low = cell % OWNER;
  return {age: low & 7, known: low >> 3 & 7, used: low >> 6 & 7, refs: low >> 9 & 7, owner: Math.floor(cell / OWNER)};
};
