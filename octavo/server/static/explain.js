// Explain view: recent requests of the key, and the time line of one. All texts become text nodes.

const COLOURS = {
  prefill: "--c1", recompute: "--c5", decode: "--c3", queued: "--c2", step_of_others: "--c2",
  preempted: "--bad", engine_death: "--bad", failed_step: "--bad", client: "--c4",
  grammar: "--c4", kv_load: "--c4", between_steps: "--c7", deliver: "--c6",
};
const MISSES = {
  changed: m => `Token ${m.token} differs from the most alike recent prompt`,
  forgotten: m => `The cache has given up the blocks from token ${m.token} on`,
  no_state: m => `The cache has no recurrent state after token ${m.token}`,
  emptied: m => `The cache was emptied ${m.seconds} s before`,
};
const ms = number => number.toLocaleString("en", {maximumFractionDigits: number < 10 ? 2 : 0}) + " ms";

export function mount(element, api) {
  const {el} = api;
  const input = el("input", {id: "explain-id", autocomplete: "off", spellcheck: "false", size: 40,
    placeholder: "chatcmpl-..."});
  const list = el("div", {class: "scroll"});
  const story = el("div", {"aria-live": "polite"});
  const form = el("form", {class: "row", onsubmit: event => {
    event.preventDefault();
    if (input.value.trim()) api.open("explain", input.value.trim());
  }}, el("label", {for: "explain-id"}, "Id of an answer"), input,
  el("button", {class: "primary"}, "Explain"),
  el("button", {type: "button", onclick: refresh}, "Refresh the list"));
  element.append(el("h2", {}, "Why a request took as long as it did"), form, story,
    el("h3", {}, "Recent requests"), list);

  const table = (heads, rows, label) => el("table", {"aria-label": label},
    el("thead", {}, el("tr", {}, ...heads.map(head => el("th", {scope: "col"}, head)))),
    el("tbody", {}, ...rows.map(cells => el("tr", {}, ...cells.map(cell => el("td",
      typeof cell === "number" || cell?.number ? {class: "number"} : {},
      cell?.number ?? (cell instanceof Node ? cell : String(cell))))))));

  async function refresh() {
    try {
      const {data} = await api.json("v1/requests");
      list.replaceChildren(data.length ? table(
        ["Request", "Model", "Route", "Began", "Seconds", "Tokens", "Status"],
        data.map(r => [
          el("button", {class: "quiet mono", onclick: () => api.open("explain", r.id)}, r.id),
          r.model, r.path, new Date(r.created * 1000).toLocaleTimeString(),
          {number: r.seconds.toFixed(3)}, r.completion_tokens,
          r.finished ? r.status ?? "" : "runs",
        ]), "Recent requests") : el("p", {class: "dim"}, "No requests yet."));
    } catch (error) {
      list.replaceChildren(el("p", {class: "error"}, error.message));
    }
  }

  /** Draw the time line; each part is also a row of the table below, which says the same. */
  function timeLine(found) {
    const bar = el("div", {class: "row", role: "img",
      "aria-label": `Time line of ${ms(found.wall_ms)}; the table below has its parts.`});
    for (const span of found.timeline) {
      bar.append(el("span", {title: `${ms(span.ms)}: ${span.text}`}));
      Object.assign(bar.lastChild.style, {flex: `${span.ms} 1 0`, minWidth: "1px", height: "100%",
        background: `var(${COLOURS[span.cause] ?? "--c7"})`, borderRight: "1px solid var(--bg)"});
    }
    // The page's policy allows styles that a script sets, not style attributes.
    Object.assign(bar.style, {gap: 0, flexWrap: "nowrap", height: "2.2rem"});
    return bar;
  }

  function cacheLines({cache}) {
    const lines = [el("p", {}, `${cache.cached_tokens} of ${cache.prompt_tokens} prompt tokens were in the cache.`)];
    const {miss, difference, given_up: lost} = cache;
    if (miss) {
      const where = miss.message === null ? "" : `, in message ${miss.message}`;
      lines.push(el("p", {}, `${MISSES[miss.reason](miss)}${where}.`));
    }
    if (difference?.volatile) lines.push(el("p", {class: "warn"}, `What differs is ${difference.volatile}.`));
    for (const [name, title] of [["text", "This prompt"], ["earlier_text", "The earlier one"]]) {
      if (difference?.[name]) lines.push(el("p", {}, `${title}:`), el("pre", {}, difference[name]));
    }
    if (lost) {
      lines.push(el("p", {}, `The block of token ${lost.token} was given up for another request ` +
        `${lost.seconds_before.toFixed(1)} s before.`));
    }
    return lines;
  }

  function advice(entry) {
    const most = entry.estimate === "at_most" ? "at most " : "about ";
    const saved = entry.saved_ms === null ? "" : ` would save ${most}${ms(entry.saved_ms)}`;
    return el("li", {}, el("code", {}, entry.setting), `${saved}. ${entry.text}`);
  }

  async function show(id) {
    input.value = id;
    story.replaceChildren(el("p", {class: "dim"}, "Loading..."));
    try {
      const found = await api.json(`v1/requests/${encodeURIComponent(id)}/explain`);
      if (input.value !== id) return;
      const first = found.first_token_ms === null ? "" : `, first token after ${ms(found.first_token_ms)}`;
      const end = found.finished ? `status ${found.status}` : "still running";
      story.replaceChildren(
        el("h3", {class: "mono"}, found.id),
        el("p", {}, `${ms(found.wall_ms)}${first}, ${found.completion_tokens} tokens, ${end}, ${found.path}`),
        timeLine(found),
        el("details", {open: true}, el("summary", {}, "Parts in order"), el("div", {class: "scroll"},
          table(["From", "Time", "Cause"], found.timeline.map(span => [
            {number: ms(span.begin_ms)}, {number: ms(span.ms)}, span.text]), "Parts of the time"))),
        el("details", {}, el("summary", {}, "By cause"), table(["Time", "Share", "Cause"],
          found.causes.map(c => [{number: ms(c.ms)},
            {number: found.wall_ms ? `${(100 * c.ms / found.wall_ms).toFixed(1)} %` : ""}, c.text]), "Time by cause")),
        el("h3", {}, "Cache"), ...cacheLines(found),
        ...(found.advice.length ? [el("h3", {}, "What would have helped"),
          el("ul", {}, ...found.advice.map(advice))] : []));
    } catch (error) {
      story.replaceChildren(el("p", {class: "error"}, error.message));
    }
  }

  return {show(id) {
    refresh();
    if (id) show(id);
    else story.replaceChildren();
  }};
}
