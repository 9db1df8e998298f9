// Benchmark view: files of `octavo bench`, drawn as --plot draws them, and compared.

const UNITS = [["ttft", "TTFT"], ["tpot", "TPOT"], ["itl", "ITL"], ["e2el", "E2EL"]];
const W = 560, H = 300, LEFT = 62, RIGHT = 12, TOP = 28, BOTTOM = 42;
const MAX_SHOWN = 2000;

export function mount(element, {el, say}) {
  let files = [];
  const shown = el("div");
  const input = el("input", {type: "file", id: "bench-files", accept: ".json,application/json", multiple: true, onchange: async () => {
    for (const file of input.files) {
      try {
        const result = JSON.parse(await file.text());
        if (typeof result !== "object" || result === null || Array.isArray(result)) throw new Error("it is no result");
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

  const numbers = list => (Array.isArray(list) ? list.map(value => (typeof value === "number" ? value : NaN)) : []);
  const plain = value => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4))));

  /** Draw a chart: series {label, points, dots, dashed, step, bars}; bars are [x, y, x end]. */
  function chart(title, xName, yName, series, {logX, logY, left, marks = [], height = H, down} = {}) {
    const all = series.flatMap(one => one.points), xs = all.flatMap(point => [point[0], point[2] ?? point[0]]).concat(marks.map(mark => mark[0])), ys = all.map(point => point[1]);
    const scale = (values, log, from, to, least) => {
      const good = values.filter(value => Number.isFinite(value) && (!log || value > 0)), map = log ? Math.log10 : value => value;
      let low = good.reduce((a, b) => Math.min(a, b), Infinity), high = good.reduce((a, b) => Math.max(a, b), -Infinity);
      if (!good.length) [low, high] = [log ? 1 : 0, 10];
      if (least !== undefined && !log) low = Math.min(low, least);
      if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
      const place = value => from + (map(value) - map(low)) / (map(high) - map(low)) * (to - from), ticks = [];
      if (log) {
        for (let e = Math.floor(map(low)); e <= map(high); e++) for (const k of high / low < 50 ? [1, 2, 5] : [1]) if (k * 10 ** e >= low && k * 10 ** e <= high) ticks.push(k * 10 ** e);
      } else {
        const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough)), size = [1, 2, 5, 10].find(k => k * power >= rough) * power;
        for (let tick = Math.ceil(low / size) * size; tick <= high; tick += size) ticks.push(tick);
      }
      return {place, ticks};
    };
    const x = scale(xs, logX, LEFT, W - RIGHT, left), y = scale(ys, logY, ...(down ? [TOP, height - BOTTOM] : [height - BOTTOM, TOP]), logY ? undefined : 0);
    const svg = el("svg:svg", {viewBox: `0 0 ${W} ${height}`, role: "img", "aria-label": `${title}: ${yName} over ${xName}`, class: "chart"}, el("svg:text", {x: LEFT, y: 16, class: "title"}, title));
    const text = (x, y, anchor, words) => svg.append(el("svg:text", {x, y, "text-anchor": anchor}, words));
    for (const tick of x.ticks) {
      svg.append(el("svg:line", {x1: x.place(tick), x2: x.place(tick), y1: TOP, y2: height - BOTTOM, class: "grid"}));
      text(x.place(tick), height - BOTTOM + 14, "middle", plain(tick));
    }
    for (const tick of y.ticks) {
      svg.append(el("svg:line", {x1: LEFT, x2: W - RIGHT, y1: y.place(tick), y2: y.place(tick), class: "grid"}));
      text(LEFT - 5, y.place(tick) + 4, "end", plain(tick));
    }
    text((LEFT + W) / 2, height - 8, "middle", xName);
    svg.append(el("svg:text", {transform: `translate(12 ${height / 2}) rotate(-90)`, "text-anchor": "middle"}, yName));
    for (const [value, label] of marks) {
      svg.append(el("svg:line", {x1: x.place(value), x2: x.place(value), y1: TOP, y2: height - BOTTOM, class: "mark"}));
      text(x.place(value) + 3, TOP + 10, "start", label);
    }
    series.forEach((one, i) => {
      const colour = `c${(one.colour ?? i) % 7 + 1}`, points = one.points.filter(point => Number.isFinite(x.place(point[0])) && Number.isFinite(y.place(point[1])));
      if (one.bars) for (const [a, row, b] of points) svg.append(el("svg:line", {x1: x.place(a), x2: x.place(b), y1: y.place(row), y2: y.place(row), class: `bar-line ${one.bars}`}));
      else if (!one.dots) svg.append(el("svg:polyline", {class: `line ${colour}${one.dashed ? " dashed" : ""}`, points: points.flatMap(([a, b], k) => [...(one.step && k ? [`${x.place(a)},${y.place(points[k - 1][1])}`] : []), `${x.place(a)},${y.place(b)}`]).join(" ")}));
      if (!one.bars && !one.step) for (const point of points) svg.append(el("svg:circle", {cx: x.place(point[0]), cy: y.place(point[1]), r: 3.5, class: `dot ${colour}${one.dashed ? " open" : ""}`}, el("svg:title", {}, `${one.label} ${point[3] ?? ""}: ${plain(point[0])}, ${plain(point[1])}`)));
    });
    const names = series.filter(one => one.label), key = names.length > 1 ? el("p", {class: "key"}, ...names.map(one => el("span", {class: one.bars ? `key-${one.bars}` : `key-c${(one.colour ?? series.indexOf(one)) % 7 + 1}`}, `${one.dashed ? "○" : "●"} ${one.label} `))) : null;
    return el("figure", {class: "card"}, svg, key);
  }

  /** Return the figures of all files, side by side. */
  function compare() {
    const known = files.map(({name, result}) => [name, Object.fromEntries(Object.entries(result).filter(([, value]) => typeof value === "number"))]);
    const keys = [...new Set(known.flatMap(([, figures]) => Object.keys(figures)))];
    if (!keys.length) return [];
    const cell = (figures, key, i) => {
      const value = figures[key], base = known[0][1][key];
      return el("td", {class: "number"}, value === undefined ? "" : plain(value), i && value !== undefined && base ? el("span", {class: "dim"}, ` ${value >= base ? "+" : "−"}${Math.abs(100 * (value / base - 1)).toFixed(1)} %`) : null);
    };
    return [el("details", {open: files.length > 1}, el("summary", {}, "Figures"), el("div", {class: "scroll", tabindex: "0", role: "group", "aria-label": "Figures"}, el("table", {},
      el("thead", {}, el("tr", {}, el("th", {}, "figure"), ...known.map(([name]) => el("th", {}, name)))),
      el("tbody", {}, ...keys.map(key => el("tr", {}, el("th", {}, key), ...known.map(([, figures], i) => cell(figures, key, i))))))))];
  }

  /** Return the milliseconds of each latency of the requests that succeeded, sorted. */
  function latencies(result) {
    const first = numbers(result.ttfts), lengths = numbers(result.output_lens), itls = result.itls ?? [], found = {ttft: [], tpot: [], itl: [], e2el: []};
    first.forEach((ttft, i) => {
      if ((result.errors?.[i] ?? null) !== null) return;
      const decode = result.e2els ? result.e2els[i] - ttft : numbers(itls[i]).reduce((a, b) => a + b, 0);
      found.ttft.push(ttft);
      found.e2el.push(ttft + decode);
      if (lengths[i] > 1) found.tpot.push(decode / (lengths[i] - 1));
      found.itl.push(...numbers(itls[i]));
    });
    for (const name of Object.keys(found)) found[name] = found[name].filter(Number.isFinite).map(value => value * 1000).sort((a, b) => a - b);
    return found;
  }

  const detailed = () => files.filter(({result}) => Array.isArray(result.ttfts) && Array.isArray(result.start_times));

  function distributions() {
    const measured = detailed().map(({name, result}) => [name, latencies(result)]);
    if (!measured.length) return [];
    return [el("div", {class: "cards"}, ...UNITS.map(([unit, short]) => {
      const series = measured.map(([label, found]) => {
        const values = found[unit], every = Math.ceil(values.length / MAX_SHOWN) || 1;
        return {label, step: true, values, points: values.map((value, i) => [value, 100 * (i + 1) / values.length]).filter((_, i) => i % every === 0 || i === values.length - 1)};
      });
      const values = series.length === 1 ? series[0].values : [], at = share => values[Math.min(values.length - 1, Math.round(share * (values.length - 1)))];
      return chart(short, `${short} (ms)`, "Share at or below (%)", series, {logX: series.some(({values}) => values.at(-1) > 30 * values[values.length >> 1] && values[0] > 0),
        marks: values.length ? [[at(0.5), `median ${plain(at(0.5))} ms`], [at(0.99), `p99 ${plain(at(0.99))} ms`]] : []});
    }))];
  }

  function timelines() {
    return detailed().map(({name, result}) => {
      const start = numbers(result.start_times).slice(0, MAX_SHOWN), planned = numbers(result.scheduled_times ?? result.start_times), first = start.map((begin, i) => begin + result.ttfts[i]);
      const last = first.map((begin, i) => (result.e2els ? start[i] + result.e2els[i] : begin + numbers(result.itls?.[i]).reduce((a, b) => a + b, 0)));
      const order = [...start.keys()].sort((a, b) => planned[a] - planned[b]), bars = (from, to) => order.map((i, row) => [from[i], row, to[i]]).filter(([a, , b]) => b > a);
      return chart(`${name}: timeline`, "Time (s)", "Request, in the order of arrival", [{label: "waiting in the client", bars: "wait", points: bars(planned, start)},
        {label: "until the first token", bars: "first", points: bars(start, first)}, {label: "until the last token", bars: "last", points: bars(first, last)}], {left: 0, down: true, height: Math.min(700, 110 + 5 * start.length)});
    });
  }

  function sweeps() {
    const runs = files.flatMap(({name, result}) => (Array.isArray(result.runs) ? result.runs : []).filter(run => Number.isFinite(run.output_throughput)).map(run => ({...run, label: files.length > 1 ? `${name}: ${run.label}` : String(run.label)})));
    if (!runs.length) return [];
    const labels = [...new Set(runs.map(run => run.label))], percentile = unit => Object.keys(runs[0]).filter(key => key.startsWith("p") && key.endsWith(`_${unit}_ms`)).sort((a, b) => parseFloat(b.slice(1)) - parseFloat(a.slice(1)))[0];
    return [el("div", {class: "cards"}, ...UNITS.slice(0, 2).map(([unit, short]) => {
      const tail = percentile(unit), lines = (key, dashed) => labels.map((label, colour) => ({label: `${label}, ${key.split("_")[0]}`, colour, dashed,
        points: runs.filter(run => run.label === label && run[key] > 0).sort((a, b) => (a.request_rate ?? Infinity) - (b.request_rate ?? Infinity)).map(run => [run.output_throughput, run[key], undefined, run.request_rate ? `${run.request_rate}/s` : "all at once"])}));
      return chart(short, "Output throughput (tokens/s)", `${short} (ms)`, [...lines(`median_${unit}_ms`, true), ...(tail ? lines(tail) : [])], {left: 0, logY: true});
    }))];
  }

  function trials() {
    return files.filter(({result}) => Array.isArray(result.trials) && result.slo).flatMap(({name, result: {trials: all, objective, slo, winner}}) => Object.entries(slo).map(([limit, value]) => {
      const budgets = [...new Set(all.map(trial => trial.budget))].sort((a, b) => a - b), point = trial => [trial.figures[limit], trial.figures[objective]];
      const series = budgets.map(budget => ({label: `${budget} requests`, dots: true, points: all.filter(trial => trial.budget === budget && trial.figures?.[limit] > 0).map(point)}));
      if (winner?.figures?.[limit] > 0) series.push({label: "best", dots: true, dashed: true, points: [point(winner)]});
      return chart(name, limit.replaceAll("_", " "), objective.replaceAll("_", " "), series, {logX: true, marks: [[value, "limit"]]});
    }));
  }

  function starts() {
    return files.filter(({result}) => Array.isArray(result.starts)).map(({name, result: {starts: all}}) => {
      const moments = [...new Set(all.flatMap(Object.keys))].filter(key => all.some(start => Number.isFinite(start[key])) && !/^(rss|pss|plan)/.test(key));
      const caches = [...new Set(all.map(start => start.cache))];
      return chart(`${name}: ${moments.map((moment, i) => `${i} ${moment}`).join(", ")}`, "Seconds from process start", "Moment", caches.map(cache => ({label: `${cache} file cache`, dots: true,
        points: all.filter(start => start.cache === cache).flatMap(start => moments.map((moment, i) => [start[moment], i]).filter(([value]) => Number.isFinite(value)))})), {left: 0, down: true});
    });
  }

  function rooflines() {
    return files.filter(({result}) => result.breakdown?.machine).map(({name, result: {breakdown}}) => {
      const kernels = ["prefill", "decode"].flatMap(phase => (breakdown[phase]?.kernels ?? []).filter(kernel => kernel.flops > 0 && kernel.bytes > 0).map(kernel => ({...kernel, name: `${phase} ${kernel.name}`})));
      const peak = Math.max(breakdown.machine.peak, ...kernels.map(kernel => kernel.gflop_s * 1e9)), bandwidth = Math.max(breakdown.machine.bandwidth, ...kernels.map(kernel => kernel.gb_s * 1e9));
      const places = [...kernels.map(kernel => kernel.flops / kernel.bytes), peak / bandwidth], ends = [Math.min(...places) / 3, peak / bandwidth, Math.max(...places) * 3];
      const roof = {label: "", colour: 6, points: ends.map(at => [at, Math.min(peak, at * bandwidth) / 1e9])};
      return chart(`${name}: roofline`, "Arithmetic intensity (FLOP/byte)", "Speed (GFLOP/s)", [...kernels.map(kernel => ({label: kernel.name, dots: true, points: [[kernel.flops / kernel.bytes, kernel.gflop_s]]})), roof], {logX: true, logY: true, height: 360});
    });
  }
}
