// Settings of a conversation: system prompt, sampling parameters, schema, tools.

import {el} from "./api.js";

// Name: kind, a number, a text, JSON, or a choice. The first ones are shown, the others folded.
const SHOWN = 6;
const CHOICE = {
  flag: ["true", "false"], guard: ["off", "report", "stop", "close_thinking"], side: ["left", "right"],
  effort: ["none", "minimal", "low", "medium", "high", "xhigh", "max"],
};
export const FIELDS = {
  temperature: "number", top_p: "number", top_k: "number", max_tokens: "number", seed: "number", n: "number",
  min_p: "number", presence_penalty: "number", frequency_penalty: "number", repetition_penalty: "number",
  min_tokens: "number", stop: "text", stop_token_ids: "json", ignore_eos: "flag", include_stop_str_in_output: "flag",
  bad_words: "json", allowed_token_ids: "json", logit_bias: "json", logprob_token_ids: "json",
  skip_special_tokens: "flag", spaces_between_special_tokens: "flag", truncate_prompt_tokens: "number", truncation_side: "side",
  reasoning_effort: "effort", include_reasoning: "flag", thinking_token_budget: "number", repetition_guard: "guard",
  parallel_tool_calls: "flag", chat_template_kwargs: "json", priority: "number", deadline_ms: "number", max_ttft_ms: "number",
};
const TOOL_EXAMPLE = '[{"name": "weather", "description": "Weather of a city",\n  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]';
const SCHEMA_EXAMPLE = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}';

/** Show the settings of a conversation in an element; `changed` is called after each change. */
export function showSettings(element, settings, changed) {
  const field = (name, kind, holder, key, hint) => {
    const id = `set-${name}`, value = holder[key] ?? "";
    const common = {id, value, placeholder: hint, "aria-describedby": `${id}-error`, spellcheck: "false"};
    let input;
    if (CHOICE[kind]) input = el("select", {id}, ...["", ...CHOICE[kind]].map(text => el("option", {value: text}, text || "default")));
    else if (kind === "area") input = el("textarea", {...common, rows: 3, class: name === "system" ? null : "mono"});
    else input = el("input", {...common, type: kind === "number" ? "number" : "text", step: "any"});
    input.value = value;
    input.addEventListener("input", () => {
      holder[key] = input.value;
      fail(name, "");
      changed();
    });
    const label = kind === "area" || holder === settings ? hintless(name) : name;
    return el("div", {class: kind === "area" ? "field wide" : "field"}, el("label", {for: id}, label), input, el("p", {id: `${id}-error`, class: "bad"}));
  };
  const sampling = Object.entries(FIELDS).map(([name, kind]) => field(name, kind, settings.sampling, name, kind === "json" ? "JSON" : "default"));
  const choice = field("choice", "tool_choice", settings, "choice", "auto, none, required or a name");
  element.replaceChildren(
    el("h2", {}, "Settings"), field("system", "area", settings, "system", "You are ..."),
    el("fieldset", {}, el("legend", {}, "Sampling"), ...sampling.slice(0, SHOWN), field("logprobs", "number", settings, "logprobs", "0"),
      el("details", {}, el("summary", {}, "More parameters"), ...sampling.slice(SHOWN), field("other", "area", settings, "other", '{"field": value}'))),
    el("fieldset", {}, el("legend", {}, "Structured output"), field("schema", "area", settings, "schema", SCHEMA_EXAMPLE)),
    el("fieldset", {}, el("legend", {}, "Tools"), field("tools", "area", settings, "tools", TOOL_EXAMPLE), choice));
}

const LABELS = {system: "System prompt", other: "Other fields of the request", schema: "JSON schema of the answer", tools: "Definitions (JSON)", choice: "tool_choice", logprobs: "Alternatives of each token"};
const hintless = name => LABELS[name] ?? name;

/** Show what is wrong with a setting; an empty text: nothing. */
function fail(name, text) {
  const input = document.getElementById(`set-${name}`);
  document.getElementById(`set-${name}-error`).textContent = text;
  input.setAttribute("aria-invalid", String(Boolean(text)));
  if (!text) return;
  for (let outer = input; outer; outer = outer.parentElement) if (outer.localName === "details" || outer.localName === "aside") { outer.open = true; outer.hidden = false; }
  input.focus();
}

/** Return the fields of a request that the settings stand for. Raises Error, shown at its field. */
export function readSettings(settings) {
  let current = "";
  const json = (name, text) => { current = name; return JSON.parse(text); };
  const fields = {};
  try {
    for (const [name, kind] of Object.entries(FIELDS)) {
      const text = settings.sampling[name] ?? "";
      if (!text.trim()) continue;
      if (kind === "text") fields[name] = text[0] === "[" ? json(name, text) : text;
      else fields[name] = kind === "number" || kind === "json" || kind === "flag" ? json(name, text) : text;
    }
    if (Number(settings.logprobs) > 0) Object.assign(fields, {logprobs: true, top_logprobs: json("logprobs", settings.logprobs)});
    if (settings.schema.trim()) fields.response_format = {type: "json_schema", json_schema: {name: "answer", schema: json("schema", settings.schema)}};
    if (settings.tools.trim()) {
      const tools = json("tools", settings.tools);
      if (!Array.isArray(tools)) throw new Error("give a list of tools");
      fields.tools = tools.map(tool => (tool?.function ? tool : {type: "function", function: tool}));
      const choice = settings.choice.trim() || "auto";
      fields.tool_choice = ["auto", "none", "required"].includes(choice) ? choice : {type: "function", function: {name: choice}};
    }
    if (settings.other.trim()) Object.assign(fields, json("other", settings.other));
  } catch (error) {
    fail(current, `Not valid: ${error.message}`);
    throw new Error(`${hintless(current)} is not valid: ${error.message}`);
  }
  return fields;
}
