// Benchmark view: files of `octavo bench`, drawn as --plot draws them, and compared.

const UNITS = {ttft: "TTFT", tpot: "TPOT", itl: "ITL", e2el: "E2EL"};
const W = 560, LEFT = 62, RIGHT = 12, TOP = 28, BOTTOM = 42, MAX_SHOWN = 2000;

const numbers = list => (Array.isArray(list) ? list.map(value => (typeof value === "number" ? value : NaN)) : []);
const sum = list => numbers(list).reduce((a, b) => a + b, 0);
const unique = list => [...new Set(list)];
const plain = value => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4))));

/** Return the value at a share of sorted values, interpolated as numpy does. */
function percentile(values, share) {
  const at = share * (values.length - 1), low = Math.floor(at);
  return values[low] + (at - low) * ((values[low + 1] ?? values[low]) - values[low]);
}

/** Return {place, ticks} of an axis from one coordinate to another. */
function scale(values, log, from, to, zero) {
  const map = log ? Math.log10 : value => value, good = values.filter(value => Number.isFinite(value) && (!log || value > 0));
  if (zero && !log) good.push(0);
  let low = good.reduce((a, b) => Math.min(a, b), Infinity), high = good.reduce((a, b) => Math.max(a, b), -Infinity);
  if (low >= high) [low, high] = log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  const ticks = [], rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  if (log) {
    for (let e = Math.floor(map(low)); e <= map(high); e++) ticks.push(...(high / low < 50 ? [1, 2, 5] : [1]).map(k => k * 10 ** e));
  } else {
    const size = [1, 2, 5, 10].find(k => k * power >= rough) * power;
    for (let k = Math.ceil(low / size); k * size <= high; k++) ticks.push(k * size);
  }
  return {place: value => from + (map(value) - map(low)) / (map(high) - map(low)) * (to - from), ticks: ticks.filter(tick => tick >= low && tick <= high)};
}

export function mount(element, {el, say}) {
  let files = [];
  const shown = el("div");
  const input = el("input", {type: "file", id: "bench-files", accept: ".json", multiple: true, onchange: async () => {
    for (const file of input.files) {
      try {
        const result = JSON.parse(await file.text());
        if (result?.constructor !== Object) throw new Error("it is no result");
        files.push({name: file.name, result});
      } catch (error) { say(`${file.name}: ${error.message}`); }
    }
    input.value = "";
    draw();
  }});
  element.append(el("h2", {}, "Benchmark results"),
    el("p", {class: "dim"}, "Open files of octavo bench serve (--save-detailed), throughput, latency (--breakdown), startup, sweep or tune. Several files are compared. They stay in this browser."),
    el("div", {class: "row"}, el("label", {for: "bench-files"}, "Files"), input, el("button", {onclick: () => { files = []; draw(); }}, "Clear")), shown);

  function draw() {
    shown.replaceChildren();
    for (const part of [compare, distributions, timelines, sweeps, trials, starts, rooflines]) {
      try { shown.append(...part()); } catch (error) { shown.append(el("p", {class: "error"}, `A file cannot be drawn: ${error.message}`)); }
    }
  }

  /** Draw series {label, points: [x, y, x end of a bar, text], colour, dots, dashed, step, bars}. */
  function chart(title, xName, yName, series, {logX, logY, fromZero, down, marks = [], height = 300} = {}) {
    const all = series.flatMap(one => one.points), bottom = height - BOTTOM;
    const x = scale(all.flatMap(([a, , b]) => [a, b ?? a]).concat(marks.map(([at]) => at)), logX, LEFT, W - RIGHT, fromZero);
    const y = scale(all.map(point => point[1]), logY, ...(down ? [TOP, bottom] : [bottom, TOP]), true);
    const svg = el("svg:svg", {viewBox: `0 0 ${W} ${height}`, role: "img", "aria-label": `${title}: ${yName} over ${xName}`, class: "chart"});
    const text = (x, y, anchor, words, more) => svg.append(el("svg:text", {x, y, "text-anchor": anchor, ...more}, words));
    const line = (x1, y1, x2, y2, name) => svg.append(el("svg:line", {x1, y1, x2, y2, class: name}));
    text(LEFT, 16, "start", title, {class: "title"});
    text((LEFT + W) / 2, height - 8, "middle", xName);
    text(0, 0, "middle", yName, {transform: `translate(12 ${height / 2}) rotate(-90)`});
    for (const tick of x.ticks) { line(x.place(tick), TOP, x.place(tick), bottom, "grid"); text(x.place(tick), bottom + 14, "middle", plain(tick)); }
    for (const tick of y.ticks) { line(LEFT, y.place(tick), W - RIGHT, y.place(tick), "grid"); text(LEFT - 5, y.place(tick) + 4, "end", plain(tick)); }
    marks.forEach(([at, label], i) => {
      const isLate = x.place(at) > W * 0.6;
      line(x.place(at), TOP, x.place(at), bottom, "mark");
      text(x.place(at) + (isLate ? -3 : 3), bottom - 8 - 14 * i, isLate ? "end" : "start", label);
    });
    const key = series.map((one, i) => {
      const colour = one.bars ?? `c${(one.colour ?? i) % 7 + 1}`;
      const points = one.points.map(([a, b, end, note]) => [x.place(a), y.place(b), end, `${one.label} ${note ?? ""}: ${plain(a)}, ${plain(b)}`]).filter(([a, b]) => Number.isFinite(a) && Number.isFinite(b));
      if (one.bars) for (const [a, b, end] of points) line(a, b, x.place(end), b, `bar-line ${colour}`);
      else if (!one.dots) {
        const corners = points.flatMap(([a, b], k) => [...(one.step && k ? [`${a},${points[k - 1][1]}`] : []), `${a},${b}`]);
        svg.append(el("svg:polyline", {class: `line ${colour}${one.dashed ? " dashed" : ""}`, points: corners.join(" ")}));
      }
      if (!one.bars && !one.step) for (const [cx, cy, , note] of points) svg.append(el("svg:circle", {cx, cy, r: 3.5, class: `dot ${colour}${one.dashed ? " open" : ""}`}, el("svg:title", {}, note)));
      return one.label && el("span", {class: `key-${colour}`}, `${one.dashed ? "○" : "●"} ${one.label} `);
    });
    return el("figure", {class: "card"}, svg, key.length > 1 ? el("p", {class: "key"}, ...key) : null);
  }

  /** Return the figures of all files, side by side. */
  function compare() {
    const known = files.map(({result}) => Object.fromEntries(Object.entries(result).filter(([, value]) => typeof value === "number")));
    const cell = (value, base) => el("td", {class: "number"}, value === undefined ? "" : plain(value),
      value !== undefined && base ? el("span", {class: "dim"}, ` ${value >= base ? "+" : "−"}${Math.abs(100 * (value / base - 1)).toFixed(1)} %`) : null);
    const rows = unique(known.flatMap(Object.keys)).map(key => el("tr", {}, el("th", {}, key), ...known.map((figures, i) => cell(figures[key], i && known[0][key]))));
    return rows.length ? [el("details", {open: files.length > 1}, el("summary", {}, "Figures"), el("div", {class: "scroll", tabindex: "0", role: "group", "aria-label": "Figures"},
      el("table", {}, el("tr", {}, el("th", {}, "figure"), ...files.map(({name}) => el("th", {}, name))), ...rows)))] : [];
  }

  const detailed = () => files.filter(({result}) => [result.ttfts, result.start_times].every(Array.isArray));
  const decodeOf = (result, i) => (result.e2els ? result.e2els[i] - result.ttfts[i] : sum(result.itls?.[i]));

  /** Return the milliseconds of each latency of the requests that succeeded, sorted. */
  function latencies(result) {
    const found = {ttft: [], tpot: [], itl: [], e2el: []};
    numbers(result.ttfts).forEach((ttft, i) => {
      if ((result.errors?.[i] ?? null) !== null) return;
      const decode = decodeOf(result, i), length = result.output_lens?.[i];
      found.ttft.push(ttft);
      found.e2el.push(ttft + decode);
      if (length > 1) found.tpot.push(decode / (length - 1));
      found.itl.push(...numbers(result.itls?.[i]));
    });
    for (const name of Object.keys(found)) found[name] = found[name].filter(Number.isFinite).map(value => value * 1000).sort((a, b) => a - b);
    return found;
  }

  function distributions() {
    const measured = detailed().map(({name, result}) => [name, latencies(result)]);
    return measured.length ? [el("div", {class: "cards"}, ...Object.entries(UNITS).map(([unit, short]) => {
      const series = measured.map(([label, {[unit]: values}]) => ({label, step: true, values,
        points: values.map((value, i) => [value, 100 * (i + 1) / values.length]).filter((_, i) => i % Math.ceil(values.length / MAX_SHOWN) === 0 || i === values.length - 1)}));
      const [{values}] = series, mark = (share, name) => [percentile(values, share), `${name} ${plain(percentile(values, share))} ms`];
      return chart(short, `${short} (ms)`, "Share at or below (%)", series, {logX: values[0] > 0 && values.at(-1) > 30 * percentile(values, 0.5),
        marks: series.length === 1 && values.length ? [mark(0.5, "median"), mark(0.99, "p99")] : []});
    }))] : [];
  }

  function timelines() {
    return detailed().map(({name, result}) => {
      const start = numbers(result.start_times).slice(0, MAX_SHOWN), planned = numbers(result.scheduled_times ?? result.start_times);
      const first = start.map((begin, i) => begin + result.ttfts[i]), last = first.map((begin, i) => begin + decodeOf(result, i));
      const order = [...start.keys()].sort((a, b) => planned[a] - planned[b]);
      const part = (label, bars, from, to) => ({label, bars, points: order.map((i, row) => [from[i], row, to[i]]).filter(([a, , b]) => b > a)});
      return chart(`${name}: timeline`, "Time (s)", "Request, in the order of arrival", [part("waiting in the client", "wait", planned, start),
        part("until the first token", "first", start, first), part("until the last token", "last", first, last)], {fromZero: true, down: true, height: Math.min(700, 110 + 5 * start.length)});
    });
  }

  function sweeps() {
    const runs = files.flatMap(({name, result}) => (result.runs ?? []).filter(run => Number.isFinite(run.output_throughput)).map(run => ({...run, label: files.length > 1 ? `${name}: ${run.label}` : String(run.label)})));
    const lines = (key, dashed) => unique(runs.map(run => run.label)).map((label, colour) => ({label: `${label}, ${key.split("_")[0]}`, colour, dashed,
      points: runs.filter(run => run.label === label && run[key] > 0).sort((a, b) => (a.request_rate ?? Infinity) - (b.request_rate ?? Infinity)).map(run => [run.output_throughput, run[key], undefined, run.request_rate ? `${run.request_rate}/s` : "all at once"])}));
    return runs.length ? [el("div", {class: "cards"}, ...["ttft", "tpot"].map(unit => {
      const [tail] = Object.keys(runs[0]).filter(key => key.startsWith("p") && key.endsWith(`_${unit}_ms`)).sort((a, b) => parseFloat(b.slice(1)) - parseFloat(a.slice(1)));
      return chart(UNITS[unit], "Output throughput (tokens/s)", `${UNITS[unit]} (ms)`, [...lines(`median_${unit}_ms`, true), ...(tail ? lines(tail) : [])], {fromZero: true, logY: true});
    }))] : [];
  }

  function trials() {
    return files.filter(({result}) => result.trials && result.slo).flatMap(({name, result: {trials: all, objective, slo, winner, default: given}}) => Object.entries(slo).map(([limit, value]) => {
      const dots = (label, list, dashed) => ({label, dots: true, dashed, points: list.filter(trial => trial?.figures?.[limit] > 0).map(({figures}) => [figures[limit], figures[objective]])});
      const series = unique(all.map(trial => trial.budget)).sort((a, b) => a - b).map(budget => dots(`${budget} requests`, all.filter(trial => trial.budget === budget)));
      return chart(name, limit.replaceAll("_", " "), objective.replaceAll("_", " "), [...series, dots("best", [winner], true), dots("default", [given], true)], {logX: true, marks: [[value, "limit"]]});
    }));
  }

  function starts() {
    return files.filter(({result}) => result.starts).map(({name, result: {starts: all}}) => {
      const moments = unique(all.flatMap(Object.keys)).filter(key => all.some(start => Number.isFinite(start[key])) && !/^(rss|pss|plan)/.test(key));
      return chart(`${name}: ${moments.map((moment, i) => `${i} ${moment}`).join(", ")}`, "Seconds from process start", "Moment", unique(all.map(start => start.cache)).map(cache => ({label: `${cache} file cache`, dots: true,
        points: all.filter(start => start.cache === cache).flatMap(start => moments.map((moment, i) => [start[moment] ?? NaN, i]))})), {fromZero: true, down: true});
    });
  }

  function rooflines() {
    return files.filter(({result}) => result.breakdown?.machine).map(({name, result: {breakdown}}) => {
      const kernels = ["prefill", "decode"].flatMap(phase => (breakdown[phase]?.kernels ?? []).filter(kernel => kernel.flops > 0).map(kernel => ({...kernel, label: `${phase}: ${kernel.name}`, at: kernel.flops / kernel.bytes})));
      const peak = Math.max(breakdown.machine.peak, ...kernels.map(kernel => kernel.gflop_s * 1e9)), bandwidth = Math.max(breakdown.machine.bandwidth, ...kernels.map(kernel => kernel.gb_s * 1e9));
      const ridge = peak / bandwidth, places = [...kernels.map(kernel => kernel.at), ridge];
      const roof = {label: "roof", colour: 6, points: [Math.min(...places) / 3, ridge, Math.max(...places) * 3].map(at => [at, Math.min(peak, at * bandwidth) / 1e9])};
      return chart(`${name}: roofline`, "Arithmetic intensity (FLOP/byte)", "Speed (GFLOP/s)", [...kernels.map(({label, at, gflop_s}) => ({label, dots: true, points: [[at, gflop_s]]})), roof], {logX: true, logY: true, height: 360});
    });
  }
}
