// Explain view: recent requests of the key, and the time line of one. All texts become text nodes.

import {api, clock, el, ms, percent, scroll, table} from "./api.js";

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

/** Draw the time line; each part is also a row of the table below, which says the same. */
function timeLine(found) {
  const bar = el("div", {class: "row", role: "img", "aria-label": `Time line of ${ms(found.wall_ms)}; the table below has its parts.`});
  for (const span of found.timeline) {
    const part = el("span", {title: `${ms(span.ms)}: ${span.text}`});
    Object.assign(part.style, {flex: `${span.ms} 1 0`, minWidth: "1px", height: "100%",
      background: `var(${COLOURS[span.cause] ?? "--c7"})`, borderRight: "1px solid var(--bg)"});
    bar.append(part);
  }
  // The page's policy allows styles that a script sets, not style attributes.
  Object.assign(bar.style, {gap: 0, flexWrap: "nowrap", height: "2.2rem"});
  return bar;
}

function cacheLines({cached_tokens, prompt_tokens, miss, difference, given_up: lost}) {
  const lines = [el("p", {}, `${cached_tokens} of ${prompt_tokens} prompt tokens were in the cache.`)];
  const where = typeof miss?.message === "number" ? `, in message ${miss.message}` : "";
  if (miss) lines.push(el("p", {}, `${MISSES[miss.reason](miss)}${where}.`));
  if (difference?.volatile) lines.push(el("p", {class: "warn"}, `What differs is ${difference.volatile}.`));
  for (const [name, title] of [["text", "This prompt"], ["earlier_text", "The earlier one"]]) {
    if (difference?.[name]) lines.push(el("p", {}, `${title}:`), el("pre", {}, difference[name]));
  }
  const ago = lost?.seconds_before.toFixed(1);
  if (lost) lines.push(el("p", {}, `The block of token ${lost.token} was given up for ${lost.by ? `#${lost.by.number}` : "another request"} ${ago} s before.`));
  return lines;
}

function advice({estimate, saved_ms, setting, text}) {
  const saved = saved_ms === null ? "" : ` would save ${estimate === "at_most" ? "at most" : "about"} ${ms(saved_ms)}`;
  return el("li", {}, el("code", {}, setting), `${saved}. ${text}`);
}

export function mount(element) {
  const input = el("input", {id: "explain-id", autocomplete: "off", spellcheck: "false", size: 40, placeholder: "chatcmpl-..."});
  const list = scroll("Recent requests"), story = el("div", {"aria-live": "polite"});
  const form = el("form", {class: "row", onsubmit: event => {
    event.preventDefault();
    if (input.value.trim()) api.open("explain", input.value.trim());
  }}, el("label", {for: "explain-id"}, "Id of an answer"), input, el("button", {class: "primary"}, "Explain"),
  el("button", {type: "button", onclick: refresh}, "Refresh the list"));
  element.append(el("h2", {}, "Why a request took as long as it did"), form, story, el("h3", {}, "Recent requests"), list);

  /** Fill an element with what a function returns, or with its error. */
  async function fill(target, make) {
    const failed = error => [el("p", {class: "error"}, error.message)];
    target.replaceChildren(...await make().catch(failed));
  }

  function refresh() {
    return fill(list, async () => {
      const {data} = await api.json("v1/requests"), rows = data.map(r => [
        el("button", {class: "quiet mono", onclick: () => api.open("explain", r.id)}, r.id), r.model, r.path, clock(r.created),
        {number: r.seconds.toFixed(3)}, r.completion_tokens, r.finished ? r.status : "runs"]);
      return [rows.length ? table(["Request", "Model", "Route", "Began", "Seconds", "Tokens", "Status"], rows)
        : el("p", {class: "dim"}, "No requests yet.")];
    });
  }

  function tell(id) {
    input.value = id;
    story.replaceChildren(el("p", {class: "dim"}, "Loading..."));
    return fill(story, async () => {
      const found = await api.json(`v1/requests/${encodeURIComponent(id)}/explain`);
      if (input.value !== id) return story.childNodes;
      const first = found.first_token_ms === null ? "" : `, first token after ${ms(found.first_token_ms)}`;
      const end = found.finished ? `status ${found.status}` : "still running";
      const parts = found.timeline.map(span => [{number: ms(span.begin_ms)}, {number: ms(span.ms)}, span.text]);
      const causes = found.causes.map(({ms: time, text}) => [{number: ms(time)}, {number: found.wall_ms ? percent(time / found.wall_ms) : ""}, text]);
      return [
        el("h3", {class: "mono"}, found.id),
        el("p", {}, `${ms(found.wall_ms)}${first}, ${found.completion_tokens} tokens, ${end}, ${found.path}`), timeLine(found),
        el("details", {open: true}, el("summary", {}, "Parts in order"),
          scroll("Parts", table(["From", "Time", "Cause"], parts, "Parts of the time"))),
        el("details", {}, el("summary", {}, "By cause"), table(["Time", "Share", "Cause"], causes, "Time by cause")),
        el("h3", {}, "Cache"), ...cacheLines(found.cache),
        ...(found.advice.length ? [el("h3", {}, "What would have helped"), el("ul", {}, found.advice.map(advice))] : []),
      ];
    });
  }

  return {show(id) { refresh(); if (id) tell(id); else story.replaceChildren(); }};
}
