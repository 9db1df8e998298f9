// History of the engine view: what the events of /v1/engine/view have told; docs/engine_view.md describes them.

const MAX_SECONDS = 600, MAX_BYTES = 48 * 2 ** 20, KEY_FRAMES = 50;
const OWNER = 4096; // a cell is flags + OWNER * number of the owner

/** State and history of the engines. A frame is the state after a tick; maps are kept as changes. */
export class History {
  constructor() { this.clear({}); }

  clear(hello) {
    Object.assign(this, {hello, frames: [], steps: [], first: 0, bytes: 0, maps: {}, owners: {}, stats: {}, experts: {},
      requests: {rows: []}, engines: [0], health: "", deaths: []});
  }

  /** Take in an event. */
  take(name, data, bytes = 0) {
    if (name === "hello") this.clear(data);
    else if (name === "requests") {
      this.requests = data;
      if (this.frames.length) this.frames.at(-1).requests = data;
      this.count(bytes);
    } else if (name === "history" && (data.first ?? 0) + data.steps.length === this.first) {
      this.steps.unshift(...this.read(data));
      this.first = data.first ?? 0;
    } else if (name === "tick") this.tick(data, bytes);
  }

  tick(data, bytes) {
    const begin = data.first ?? 0;
    if (begin !== this.first + this.steps.length) Object.assign(this, {steps: [], first: begin});
    for (const step of this.read(data)) this.steps.push(step);
    Object.assign(this.stats = {...this.stats}, data.stats);
    for (const [engine, changes] of Object.entries(data.blocks ?? {})) {
      for (const [number, label] of Object.entries(changes.owners ?? {})) this.owners[number] = label;
      this.maps[engine] = applied(this.maps[engine], changes);
    }
    for (const [engine, layers] of Object.entries(data.experts ?? {})) this.experts[engine] = {layers, before: this.experts[engine]?.layers};
    this.engines = data.engines ?? this.engines;
    this.health = data.health ?? this.health;
    this.deaths = [...this.deaths, ...(data.deaths ?? [])];
    const isKey = this.frames.length % KEY_FRAMES === 0;
    this.frames.push({time: data.time, begin, end: this.first + this.steps.length, stats: this.stats, requests: this.requests, health: this.health,
      engines: this.engines, changes: data.blocks ?? {}, maps: isKey ? copied(this.maps) : null, experts: {...this.experts}, bytes});
    this.count(bytes);
  }

  /** Return the steps of an event, with absolute times and all parts. */
  read({steps = [], time}) {
    const last = {};
    return steps.map(step => {
      const parts = last[step.engine] = step.parts ?? last[step.engine] ?? [];
      return {...step, parts, time: time + step.at / 1000};
    });
  }

  /** Drop what is too old or too much; the first frame always has whole maps. */
  count(bytes) {
    this.bytes += bytes;
    const {frames, steps} = this, oldest = (frames.at(-1)?.time ?? 0) - MAX_SECONDS;
    let drop = 0, kept = this.bytes;
    while (drop < frames.length - 1 && (kept > MAX_BYTES || frames[drop].time < oldest)) kept -= frames[drop++].bytes;
    if (drop < KEY_FRAMES) return;
    this.bytes = kept;
    frames[drop].maps = this.mapsAt(drop);
    frames.splice(0, drop);
    const old = steps.findIndex(step => step.time >= oldest);
    if (old > 0) steps.splice(0, old), this.first += old;
  }

  /** Return the maps of a frame. */
  mapsAt(index) {
    let key = index;
    while (key > 0 && !this.frames[key].maps) key--;
    const maps = copied(this.frames[key]?.maps ?? {});
    for (const frame of this.frames.slice(key + 1, index + 1)) for (const [engine, changes] of Object.entries(frame.changes)) maps[engine] = applied(maps[engine], changes);
    return maps;
  }

  step(number) { return this.steps[number - this.first]; }

  /** Return the frame that shows a step first; -1: no frame was recorded then. */
  frameOf(number) {
    if (!this.frames.length || number < this.frames[0].begin) return -1;
    return this.frames.findIndex(frame => frame.end > number);
  }
}

function copied(maps) {
  return Object.fromEntries(Object.entries(maps).map(([engine, map]) => [engine, {...map, cells: map.cells.slice(), states: map.states.slice()}]));
}

/** Return a map with changes; a whole map replaces it. */
function applied(map, changes) {
  if (changes.num_cells) map = {cells: new Float64Array(changes.num_cells), states: new Float64Array(changes.num_states ?? 0)};
  const {cells, states} = map ?? {cells: new Float64Array(0), states: new Float64Array(0)};
  for (const [target, runs] of [[cells, changes.runs ?? []], [states, changes.states ?? []]]) for (let i = 0; i < runs.length; i += 3) target.fill(runs[i + 2], runs[i], runs[i] + runs[i + 1]);
  return {cells, states, blocks: changes.num_blocks, perCell: changes.blocks_per_cell};
}

export const isPrompt = ([, tokens, drafts = 0, first = 0]) => Boolean(first) || tokens !== 1 + drafts;

/** Return the numbers of tokens of a step: of prompts, of answers, and drafts. */
export function split(step) {
  let prompt = 0, answer = 0, drafts = 0;
  for (const part of step.parts) {
    drafts += part[2] ?? 0;
    if (isPrompt(part)) prompt += part[1] - (part[2] ?? 0);
    else answer += 1;
  }
  return {prompt, answer, drafts};
}

export const flags = cell => {
  const low = cell % OWNER;
  return {age: low & 7, known: low >> 3 & 7, used: low >> 6 & 7, refs: low >> 9 & 7, owner: Math.floor(cell / OWNER)};
};
export const slotFlags = cell => ({age: cell % 8, kind: (cell % OWNER) >> 3, owner: Math.floor(cell / OWNER)});
