// Settings of a conversation: system prompt, sampling parameters, schema, tools.

import {byId, el} from "./api.js";

const SHOWN = 6;
const CHOICES = {
  flag: ["true", "false"], guard: ["off", "report", "stop", "close_thinking"], side: ["left", "right"],
  effort: ["none", "minimal", "low", "medium", "high", "xhigh", "max"],
};
// Kinds of the request's fields. The first ones are shown, the others folded.
export const FIELDS = {
  temperature: "number", top_p: "number", top_k: "number", max_tokens: "number", seed: "number", n: "number",
  min_p: "number", presence_penalty: "number", frequency_penalty: "number", repetition_penalty: "number",
  min_tokens: "number", stop: "text", stop_token_ids: "json", ignore_eos: "flag", include_stop_str_in_output: "flag",
  bad_words: "json", allowed_token_ids: "json", logit_bias: "json", logprob_token_ids: "json",
  skip_special_tokens: "flag", spaces_between_special_tokens: "flag", truncate_prompt_tokens: "number", truncation_side: "side",
  reasoning_effort: "effort", include_reasoning: "flag", thinking_token_budget: "number", repetition_guard: "guard",
  parallel_tool_calls: "flag", chat_template_kwargs: "json", priority: "number", deadline_ms: "number", max_ttft_ms: "number",
};
// Label, and an example.
const OTHERS = {
  system: ["System prompt", "You are ..."],
  logprobs: ["Alternatives of each token", "0"],
  other: ["Other fields of the request", '{"field": value}'],
  schema: ["JSON schema of the answer", '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'],
  tools: ["Definitions (JSON)", '[{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]'],
  choice: ["tool_choice", "auto, none, required or a name"],
};

/** Show the settings of a conversation in an element; `changed` is called after each change. */
export function showSettings(element, settings, changed) {
  const field = (name, kind) => {
    const [label, placeholder] = OTHERS[name] ?? [name, kind === "json" ? "JSON" : "default"], id = `set-${name}`;
    const holder = OTHERS[name] ? settings : settings.sampling, choices = CHOICES[kind] && ["", ...CHOICES[kind]];
    const options = choices?.map(value => el("option", {value}, value || "default"));
    const tag = CHOICES[kind] ? "select" : kind === "area" ? "textarea" : "input";
    const input = el(tag, {id, rows: 3, placeholder, spellcheck: "false", type: kind === "number" ? kind : null, step: "any", class: name === "system" ? null : "mono",
      "aria-describedby": `${id}-error`, oninput: () => { holder[name] = input.value; fail(name, ""); changed(); }}, options);
    input.value = holder[name] ?? "";
    return el("div", {class: kind === "area" ? "field wide" : "field"}, el("label", {for: id}, label), input,
      el("p", {id: `${id}-error`, class: "bad"}));
  };
  const group = (name, ...fields) => el("fieldset", {}, el("legend", {}, name), fields);
  const sampling = Object.entries(FIELDS).map(([name, kind]) => field(name, kind));
  element.replaceChildren(el("h2", {}, "Settings"), field("system", "area"),
    group("Sampling", sampling.slice(0, SHOWN), field("logprobs", "number"),
      el("details", {}, el("summary", {}, "More parameters"), sampling.slice(SHOWN), field("other", "area"))),
    group("Structured output", field("schema", "area")), group("Tools", field("tools", "area"), field("choice", "text")));
}

/** Show what is wrong with a setting; an empty text: nothing. */
function fail(name, text) {
  const input = byId(`set-${name}`);
  byId(`set-${name}-error`).textContent = text;
  input.setAttribute("aria-invalid", String(Boolean(text)));
  if (!text) return;
  input.closest("aside").hidden = false;
  input.closest("details")?.setAttribute("open", "");
  input.focus();
}

/** Return the fields of a request that the settings stand for. Raises Error, shown at its field. */
export function readSettings(settings) {
  const fields = {};
  let current;
  const json = (name, text) => { current = name; return JSON.parse(text); };
  try {
    for (const [name, kind] of Object.entries(FIELDS)) {
      const text = (settings.sampling[name] ?? "").trim();
      if (text) fields[name] = ["number", "json", "flag"].includes(kind) || (kind === "text" && text[0] === "[") ? json(name, text) : text;
    }
    const given = name => settings[name].trim() && json(name, settings[name]);
    if (given("logprobs")) Object.assign(fields, {logprobs: true, top_logprobs: given("logprobs")});
    if (settings.schema.trim()) fields.response_format = {type: "json_schema", json_schema: {name: "answer", schema: given("schema")}};
    const tools = given("tools"), choice = settings.choice.trim() || "auto";
    if (tools) {
      if (!Array.isArray(tools)) throw new Error("give a list of tools");
      fields.tools = tools.map(tool => (tool?.function ? tool : {type: "function", function: tool}));
      fields.tool_choice = ["auto", "none", "required"].includes(choice) ? choice : {type: "function", function: {name: choice}};
    }
    Object.assign(fields, given("other") || {});
  } catch (error) {
    fail(current, `Not valid: ${error.message}`);
    throw new Error(`${OTHERS[current]?.[0] ?? current} is not valid: ${error.message}`);
  }
  return fields;
}
